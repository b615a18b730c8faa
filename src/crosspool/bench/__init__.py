"""Load on a running server, measured at the client: what `crosspool bench` does."""
