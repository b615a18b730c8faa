"""Chunks of prompts on either side: pieces, crossings in bulk, attention over earlier keys, experts by sorted rows."""
