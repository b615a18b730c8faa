"""The shared KV pool: frames, pages, block tables, budget."""
