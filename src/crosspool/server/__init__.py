"""The OpenAI-compatible HTTP server. Knows the engine's face and nothing below it."""
