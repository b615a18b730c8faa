"""The CUDA backend: hand-written kernels behind the same contracts as `backends/numpy`. Needs the extra `cuda`."""
