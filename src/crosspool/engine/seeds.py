"""Seeds of sequences: sequence i of a request samples from a seed derived from (the request's seed, i)."""

import hashlib


def sequence_seed(seed: int, index: int) -> int:
    """A seed below 2**63; that of index 0 is the request's own, so that n does not change the first answer."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
