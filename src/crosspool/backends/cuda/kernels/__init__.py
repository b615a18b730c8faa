"""Each kernel as a function of tensors, with its parameters and the shapes it takes (sources in `csrc`)."""
