"""Holds GPU memory so that an elastic pool gets what is left, no more: runs beside kvcached, once weights are loaded.

python -m benchmarks.peers.ballast --gpu 0 --leave-gib 40
"""

from __future__ import annotations

import argparse
import signal

GIB = 1 << 30


def ballast_bytes(free_bytes: int, leave_bytes: int) -> int:
    """What to hold. Raises ValueError where less than that is free."""
    if leave_bytes > free_bytes:
        raise ValueError(
            f"{free_bytes / GIB:.1f} GiB are free, less than the {leave_bytes / GIB:.1f} to leave; use a smaller pool"
        )
    return free_bytes - leave_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--leave-gib", type=float, default=40.0)
    args = parser.parse_args()
    import torch

    free, _ = torch.cuda.mem_get_info(args.gpu)
    held = torch.empty(ballast_bytes(free, int(args.leave_gib * GIB)), dtype=torch.uint8, device=f"cuda:{args.gpu}")
    print(f"holding {held.numel() / GIB:.1f} GiB of GPU {args.gpu}", flush=True)
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
