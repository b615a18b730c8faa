"""Where steps spend their time, what they move and what is loaded: numbers of real workers, in /metrics."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import httpx2
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from crosspool.config import DeploymentConfig, ModelConfig
from crosspool.pools_config import PoolsConfig
from crosspool.units import KiB, MiB
from tests.support.awaited import until
from tests.support.live_deployment import live_deployment
from tests.support.tiny_models import write_tiny_model

NUM_TOKENS = 40


def numbers(http: httpx2.Client) -> dict[tuple[str, ...], float]:
    """Samples of `m` by name and the values of their other labels."""
    found = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            if sample.labels.get("model_name") == "m":
                others = [value for label, value in sorted(sample.labels.items()) if label != "model_name"]
                found[sample.name.removeprefix("crosspool:"), *others] = sample.value
    return found


@pytest.mark.parametrize("layout", ["inprocess", "processes"])
def test_times_experts_and_weights_have_a_true_source(
    tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    # deepseek_v2's first layer is dense, the others send each token to two experts
    path = write_tiny_model(tmp_path / "m", "deepseek_v2", num_layers=3)
    config = DeploymentConfig(
        models=(ModelConfig(source=str(path), name="m", page_tokens=16),),
        pools=PoolsConfig(layout=layout, kv_pool_bytes=16 * MiB, frame_bytes=64 * KiB),  # type: ignore[arg-type]
    )
    with live_deployment(config) as live, httpx2.Client(base_url=live.url, timeout=30) as http:
        weights = sum(live.engine.model("m").bytes_by_rank.values())
        assert numbers(http)["weight_bytes_moved_total",] == weights > 0
        body = {"model": "m", "prompt": [5] * 10, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        started = time.monotonic()
        assert http.post("/v1/completions", json=body).status_code == 200
        seconds = time.monotonic() - started
        seen = numbers(http)
        spans = live.engine.steps_since(0.0)
        for phase, steps, tokens in (("prefill", 1, 10), ("decode", NUM_TOKENS - 1, NUM_TOKENS - 1)):
            assert seen["iteration_tokens_total_sum", phase] == tokens
            own = [span for span in spans if span.phase == phase]
            for part in ("attention", "ffn", "transfer"):
                assert seen[f"{part}_seconds_count", phase] == steps
                assert 0 <= seen[f"{part}_seconds_sum", phase] < seconds
                parts = [getattr(span, f"{part}_s") for span in own]
                assert sum(parts) == pytest.approx(seen[f"{part}_seconds_sum", phase])
        for span in spans:
            assert span.ffn_s is not None
            assert span.transfer_s is not None
        if layout == "processes":  # threads of one process compute in one another's turns
            told = sum(span.attention_s + (span.ffn_s or 0) + (span.transfer_s or 0) for span in spans)
            assert told <= sum(span.ended_s - span.started_s for span in spans)
            assert seen["transfer_seconds_sum", "decode"] > 0
        assert seen["attention_seconds_sum", "decode"] > 0
        assert seen["ffn_seconds_sum", "decode"] > 0
        run = 10 + NUM_TOKENS - 1
        experts = {
            layer: value for (name, *rest), value in seen.items() if name == "expert_tokens_total" for layer in rest
        }
        assert experts == {"1": 2 * run, "2": 2 * run}
        if layout == "processes":
            lost = next(child for child in psutil.Process().children(recursive=True) if child.cmdline()[-1] == "w0")
            own_bytes = live.engine.model("m").bytes_by_rank["w0"]
            lost.send_signal(signal.SIGKILL)
            until(lambda: numbers(http)["weight_bytes_moved_total",] == weights + own_bytes)
            told = [record.getMessage() for record in caplog.records if "lost" in record.getMessage()]
            assert len(told) == 1, told  # a loss is one line of the log
            assert "w0" in told[0]
