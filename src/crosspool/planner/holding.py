"""Holding: what one request of a model takes from the KV pool while it is there."""

from dataclasses import dataclass

import numpy as np

from crosspool.config import AdmissionPolicy
from crosspool.planner.request_table import RequestTable
from crosspool.workload.trace import FloatColumn, IntColumn


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """Bytes by tokens of one model under one admission policy.

    forecast: the tokens a request has, prompt + output * age / service time (CrossPool, arXiv 2606.24506, eq. 1).
    reserve: prompt + max_tokens from admission to end, since that is set aside whether used or not.
    kv_bytes_per_token counts tokens exactly; page_bytes counts whole pages of page_tokens, as the pool hands them out.
    """

    policy: AdmissionPolicy
    kv_bytes_per_token: int
    page_tokens: int
    page_bytes: int
    state_bytes: int = 0

    def start_and_growth(self, requests: RequestTable) -> tuple[IntColumn, IntColumn]:
        """Tokens at age 0 and tokens gained until the end, of each row."""
        if self.policy == "reserve":
            return requests.prompt_tokens + requests.max_tokens, np.zeros_like(requests.prompt_tokens)
        return requests.prompt_tokens, requests.output_tokens

    def exact_bytes(self, tokens: FloatColumn) -> FloatColumn:
        return tokens * float(self.kv_bytes_per_token) + float(self.state_bytes)

    def paged_bytes(self, tokens: FloatColumn) -> FloatColumn:
        """Whole pages of each request; at least one, since a request is never without its first page."""
        pages = np.maximum(1.0, np.ceil(tokens / self.page_tokens))
        return pages * float(self.page_bytes) + float(self.state_bytes)
