"""CrossPool: serve many cold Mixture-of-Experts models from a shared weights pool and a shared KV pool."""

__version__ = "0.1.0"
