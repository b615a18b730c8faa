"""A GPU of its own for prompts: whole models that take turns on it, and their KV on its way home."""
