"""How rows cross between ranks: memory that a peer's GPU writes, flags, and how each side finds the other's."""
