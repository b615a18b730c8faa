"""What else was under way while a token was waited for, as the client saw it: where a layout's time goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from crosspool.workload.trace import FloatColumn

ALONE, OTHERS, PROMPT = "alone", "beside_decode", "beside_prompt"


def gaps_by_company(run: Mapping[str, Any], model: str) -> dict[str, FloatColumn]:
    """Milliseconds between the model's tokens in a detailed result, by what was under way halfway through each.

    beside_prompt: a request of any model waited for its first token, which counts its time in queues too;
    beside_decode: another model decoded, and no prompt was there; alone: neither.
    """
    begun = np.asarray(run["start_times"])
    first = begun + np.asarray(run["ttfts"])
    last = first + np.array([sum(gaps) for gaps in run["itls"]])
    is_own = np.array([name == model for name in run["request_models"]])
    times = [first[idx] + np.cumsum([0.0, *run["itls"][idx]]) for idx in np.flatnonzero(is_own)]
    gaps = np.concatenate([np.diff(each) for each in times]) if times else np.empty(0)
    halfway = (np.concatenate([each[:-1] for each in times]) if times else np.empty(0)) + gaps / 2
    moments = halfway[:, None]
    has_prompt = ((begun <= moments) & (moments < first)).any(axis=1)
    has_others = ((first <= moments) & (moments < last) & ~is_own).any(axis=1)
    kinds = {PROMPT: has_prompt, OTHERS: ~has_prompt & has_others, ALONE: ~has_prompt & ~has_others}
    return {kind: 1e3 * gaps[chosen] for kind, chosen in kinds.items()}
