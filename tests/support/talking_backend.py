"""The backend of small integers, whose ranks log when they start."""

import logging

from tests.support import fake_backend

logger = logging.getLogger(__name__)


def attention_worker(num_frames: int, frame_bytes: int) -> object:
    logger.debug("%d frames", num_frames)
    return fake_backend.attention_worker(num_frames, frame_bytes)


def ffn_worker(rank: str) -> object:
    logger.debug("%s is here", rank)
    return fake_backend.ffn_worker(rank)
