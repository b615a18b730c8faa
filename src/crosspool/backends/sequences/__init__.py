"""What a KV worker of any backend remembers of its sequences, and how their next tokens are drawn."""
