"""The published traces, where they lie beside the project: counts and means as their authors give them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from crosspool.workload.formats.plain import read_table
from crosspool.workload.formats.servegen import read_servegen
from crosspool.workload.traces import read_trace

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "traces"
pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="the traces are not beside this checkout")


@pytest.mark.parametrize(
    ("file", "num", "duration", "prompt", "output"),
    [
        ("azure2023/AzureLLMInferenceTrace_code.csv", 8819, 3436, 2048, 28),
        ("azure2023/AzureLLMInferenceTrace_conv.csv", 19366, 3502, 1155, 211),
        ("mooncake_fast25/conversation_trace.jsonl.gz", 12031, 3537, 12035, 343),
        ("composed_cold_moe_24h.csv.gz", 46956, 86400, 2582, 1073),
        ("sharegpt_poisson/sharegpt_0.8.jsonl", 240, 100, None, None),
        ("sharegpt_llmservingsim/sharegpt_qwen3-30b-a3b_300sessions.csv", 300, 29, 862, 665),
    ],
)
def test_counts_and_means_are_the_published_ones(file, num, duration, prompt, output):
    trace = read_trace(TRACES / file)
    assert trace.num_requests == num
    assert trace.duration_s == pytest.approx(duration, abs=2)
    if prompt is not None:
        assert trace.prompt_tokens.mean() == pytest.approx(prompt, abs=1)
        assert trace.output_tokens.mean() == pytest.approx(output, abs=1)


def test_servegen_clients_sum_to_the_published_rate():
    clients = read_servegen(
        TRACES / "servegen" / "rates_deepseek-r1.csv.gz", TRACES / "servegen" / "lengths_deepseek-r1.json.gz"
    )
    assert len(clients) == 73
    assert sum(client.arrivals.rate_rps for client in clients) == pytest.approx(16.0, abs=0.05)
    drawn = clients[0].trace(np.random.default_rng(0), "cold")
    assert drawn.num_requests / 86400 == pytest.approx(clients[0].arrivals.rate_rps, rel=0.1)


def test_lengths_without_times_are_read_as_pairs():
    file = "vidur_arxiv/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv.gz"
    table = read_table(TRACES / file)
    assert len(table.prompt_tokens) == 28257
    assert np.mean(table.prompt_tokens) == pytest.approx(2588, abs=1)
