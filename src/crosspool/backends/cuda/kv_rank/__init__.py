"""The KV pool's worker and its half of steps and chunks."""
