"""A model whose weights hold NaN ends its requests with a clear error; its neighbour answers as before."""

from __future__ import annotations

from pathlib import Path

import httpx2
import numpy as np
from safetensors.numpy import load_file, save_file

from crosspool.config import DeploymentConfig, ModelConfig
from crosspool.pools_config import PoolsConfig
from crosspool.units import KiB, MiB
from tests.support.live_deployment import live_deployment
from tests.support.server_fixtures import events
from tests.support.tiny_models import write_tiny_model


def test_weights_that_are_no_numbers_are_told_in_plain_words(tmp_path: Path) -> None:
    paths = {name: write_tiny_model(tmp_path / name, "qwen3_moe", num_layers=2) for name in ("good", "broken")}
    (file,) = paths["broken"].glob("*.safetensors")
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("layers.1.self_attn.o_proj.weight"))
    weights[name] = np.full_like(weights[name], np.nan)
    save_file(weights, file)
    config = DeploymentConfig(
        models=tuple(ModelConfig(source=str(path), name=name, page_tokens=16) for name, path in paths.items()),
        pools=PoolsConfig(layout="inprocess", kv_pool_bytes=16 * MiB, frame_bytes=64 * KiB),
    )
    body = {"prompt": "hi", "max_tokens": 4}
    with live_deployment(config) as live, httpx2.Client(base_url=live.url, timeout=30) as http:
        good = http.post("/v1/completions", json={**body, "model": "good", "temperature": 0}).json()["choices"]
        for extra in ({"temperature": 0}, {"temperature": 1}, {"temperature": 0, "logprobs": 2, "n": 2}):
            for stream in (False, True):
                response = http.post("/v1/completions", json={**body, **extra, "model": "broken", "stream": stream})
                if response.status_code == 200:  # the error may come after the headers
                    error = events(response.text)[0]["error"]
                else:
                    assert response.status_code == 500
                    error = response.json()["error"]
                assert "logits are not numbers" in error["message"]
        again = http.post("/v1/completions", json={**body, "model": "good", "temperature": 0}).json()["choices"]
        assert again == good
        live.until_idle()
