"""`crosspool demo`: three small models served from two pools, asked over HTTP, and what that looked like."""
