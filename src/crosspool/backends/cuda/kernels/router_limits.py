"""What the router's kernels take at most. No torch in here: a deployment asks before it has any."""

MAX_EXPERTS = 512
MAX_TOP_K = 32
MAX_GROUPS = 32
