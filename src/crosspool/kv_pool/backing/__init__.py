"""What frames are made of on one KV rank: one allocation that is cut up (arena), or mapped physical memory (vmm)."""
