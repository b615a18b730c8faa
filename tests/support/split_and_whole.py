"""Tiny models split over NumPy workers, the same whole, and a script of steps for both."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from crosspool.core import SamplingParams
from crosspool.kv_pool.geometry import page_geometry
from crosspool.models.directory import read_model_dir
from crosspool.weights_pool.loader import load_attention_weights, load_ffn_weights
from tests.support.direct_lanes import SplitModel
from tests.support.monolithic import MonolithicModel
from tests.support.step_script import Script
from tests.support.tiny_models import write_tiny_model

PAGE_TOKENS = 8
FRAME_BYTES = 32 * 1024
NUM_FRAMES = 200
GREEDY = SamplingParams(max_tokens=50, temperature=0.0)
SEEDED = SamplingParams(max_tokens=50, temperature=1.2, seed=5, top_p=0.95, presence_penalty=0.5, num_logprobs=3)

_directories = TemporaryDirectory()


@cache
def model_dir(family):
    return read_model_dir(write_tiny_model(Path(_directories.name) / family, family, tokenizer=False))


def split(family, num_weights=1):
    directory = model_dir(family)
    return SplitModel(directory, num_weights, page_tokens=PAGE_TOKENS, num_frames=NUM_FRAMES, frame_bytes=FRAME_BYTES)


def whole(family, num_slices=1):
    directory = model_dir(family)
    return MonolithicModel(
        directory.spec,
        load_attention_weights(directory),
        [load_ffn_weights(directory, idx, num_slices) for idx in range(num_slices)],
        page_tokens=PAGE_TOKENS,
        num_frames=NUM_FRAMES,
        frame_bytes=FRAME_BYTES,
    )


def script(family, seed=0, lengths=(5, 17, 11), num_output=10):
    spec = model_dir(family).spec
    rng = np.random.default_rng(seed)
    return Script(
        family,
        page_geometry(spec, page_tokens=PAGE_TOKENS, frame_bytes=FRAME_BYTES, kv_dtype="float32"),
        [rng.integers(0, spec.vocab_size, length).tolist() for length in lengths],
        [GREEDY, SEEDED, replace(SEEDED, seed=6)],
        num_output=num_output,
        num_frames=NUM_FRAMES,
        seed=seed,
    ).steps()
