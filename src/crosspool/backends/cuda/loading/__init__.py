"""A model's weights on their way to a GPU, and as its kernels read them."""
