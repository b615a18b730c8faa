"""Requests of the warm-up."""

from __future__ import annotations

from crosspool.bench.server import warm_up_requests
from crosspool.bench.target import Target
from crosspool.bench.traffic import PlannedRequest

PLANNED = [
    PlannedRequest(index=index, due_s=1.0 * index, model="ab"[index % 2], prompt_tokens=5 + index, output_tokens=3)
    for index in range(8)
]


def test_each_model_gets_requests_like_its_first_ones():
    found = warm_up_requests(PLANNED, 2)
    assert [(request.model, request.prompt_tokens, request.due_s) for request in found] == [
        ("a", 5, 0.0),
        ("a", 7, 0.0),
        ("b", 6, 0.0),
        ("b", 8, 0.0),
    ]
    assert warm_up_requests(PLANNED, 0) == []


def test_no_prompt_of_the_warm_up_is_sent_again():
    target = Target(base_url="http://x")
    prompts = [target.body(request)["prompt"] for request in (*warm_up_requests(PLANNED, 3), *PLANNED)]
    assert all(first[:5] != second[:5] for at, first in enumerate(prompts) for second in prompts[:at])
