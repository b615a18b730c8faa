"""KV frames on a GPU and behind it on the host: arenas, mapped memory, frame tables, copies."""
