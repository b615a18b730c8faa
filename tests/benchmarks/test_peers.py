"""Commands of other engines, and the plugin that spreads their dummy weights."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.bench_layouts_gpu import Load
from benchmarks.full_models import CONFIGS
from benchmarks.peers import bench_peers
from benchmarks.peers.ballast import GIB, ballast_bytes
from benchmarks.peers.bench_peers import peer_settings
from benchmarks.peers.instances import GPU_BYTES, PEERS, STATIC, PeerOptions, instances, memory_shares, write_peer_dir
from benchmarks.peers.spread_weights import MODULE, spread, write_plugin
from benchmarks.report import Report


@pytest.mark.parametrize("peer", PEERS)
def test_every_model_has_one_server_on_its_gpus(peer, tmp_path):
    found = instances(peer, tmp_path, tmp_path / "plugin", PeerOptions(tokens_per_step=2048))
    assert [instance.model for instance in found] == list(PEERS[peer][1])
    assert len({instance.port for instance in found}) == len(found)
    for instance in found:
        gpus = PEERS[peer][1][instance.model]
        assert instance.environment["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, gpus))
        assert str(len(gpus)) in instance.command
        assert "dummy" in instance.command
        assert "2048" in instance.command


def test_only_kvcached_shares_its_memory(tmp_path):
    static = instances("vllm-static-2", tmp_path, tmp_path, PeerOptions(kv_bytes=7))
    elastic = instances("kvcached-2", tmp_path, tmp_path, PeerOptions(kv_bytes=7))
    assert all(instance.command[-2:] == ("--kv-cache-memory-bytes", "7") for instance in static)
    assert not any("ENABLE_KVCACHED" in instance.environment for instance in static)
    layouts = {instance.model: instance.environment["KVCACHED_CONTIGUOUS_LAYOUT"] for instance in elastic}
    assert layouts == {"qwen3-30b-a3b": "false", "glm-4.7-flash": "true", "deepseek-v2-lite": "true"}
    assert not any("--kv-cache-memory-bytes" in instance.command for instance in elastic)


def test_two_instances_of_vllm_may_start_on_one_gpu(tmp_path):
    for instance in instances("vllm-static-2", tmp_path, tmp_path, PeerOptions()):
        share = instance.command[instance.command.index("--gpu-memory-utilization") + 1]
        assert float(share) < 0.4, "GLM and 20 GiB of KV leave less than this of an H200"


GIB_OF_WEIGHTS = {"qwen3-30b-a3b": 56.9, "glm-4.7-flash": 55.8, "deepseek-v2-lite": 29.3}


def test_sglangs_shares_are_of_what_is_free_when_each_starts():
    """SGLang takes its share of the memory that is free before it loads, weights included."""
    shares = memory_shares(STATIC, 20 * GIB)
    free = dict.fromkeys((0, 1), GPU_BYTES / GIB)
    for model, (gpu,) in STATIC.items():
        kv = shares[model] * free[gpu] - GIB_OF_WEIGHTS[model]
        assert kv == pytest.approx(20, abs=0.2), model
        free[gpu] -= GIB_OF_WEIGHTS[model] + kv + 6
    assert min(free.values()) > 0
    with pytest.raises(ValueError, match="deepseek-v2-lite wants 75 GiB of a GPU that has 38; give less KV"):
        memory_shares(STATIC, 40 * GIB)


def test_sglang_is_told_its_share_and_kvcached_to_patch(tmp_path):
    shares = memory_shares(STATIC, 20 * GIB)
    for instance in instances("sglang-static-2", tmp_path, tmp_path, PeerOptions()):
        told = instance.command[instance.command.index("--mem-fraction-static") + 1]
        assert float(told) == pytest.approx(shares[instance.model], abs=1e-3)
    for instance in instances("kvcached-2", tmp_path, tmp_path, PeerOptions()):
        assert instance.environment["KVCACHED_AUTOPATCH"] == "1"


def test_an_engine_that_is_not_there_is_told_and_the_next_one_runs(tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(bench_peers, "is_installed", lambda engine: engine == "sglang")
    monkeypatch.setattr(bench_peers, "measure", lambda args, peer, started, report: ran.append(peer))
    monkeypatch.setattr(bench_peers.Running, "start", lambda *_: None)
    monkeypatch.setattr(bench_peers.Running, "wait_ready", lambda *_: None)
    words = ["bench", "--peers", "vllm-static-2", "sglang-static-2", "--out", str(tmp_path), "--log-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    assert bench_peers.main() == 1
    assert ran == ["sglang-static-2"]
    assert "vllm-static-2: FAILED: vLLM is not installed here" in capsys.readouterr().out


def test_peers_get_the_load_of_our_own_layouts(tmp_path):
    (tmp_path / "sharegpt_0.8.jsonl").write_text(
        "\n".join(
            json.dumps({"t": 0.1 * number, "model": name, "in": 9, "out": 6}) for number, name in enumerate(CONFIGS)
        )
    )
    args = argparse.Namespace(seconds=100.0, max_model_len=32768, seed=2026, trace_dir=tmp_path, length_scale=1.0)
    theirs = peer_settings(args, ("http://x",), list(CONFIGS), "0.8")
    ours = Load.parse("static-2:0.8").settings("http://x", tmp_path, list(CONFIGS))
    for name in ("temperature", "vocab_size", "seed", "ignore_eos", "trace"):
        assert getattr(theirs, name) == getattr(ours, name), name


def test_every_number_of_tokens_a_step_is_a_start_with_a_name_of_its_own(tmp_path, monkeypatch):
    def run_peer(args, peer, name, wanted, folder, report):
        (tokens,) = {instance.command[instance.command.index("--max-num-batched-tokens") + 1] for instance in wanted}
        report.metric(f"served.{name}.0.8", int(tokens))

    monkeypatch.setattr(bench_peers, "run_peer", run_peer)
    words = ["bench", "--tokens-per-step", "2048", "8192", "--trace-dir", str(tmp_path), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    assert bench_peers.main() == 0
    (path,) = tmp_path.glob("peers-vllm-static-2_h200-x2_*.json")
    assert json.loads(path.read_text())["metrics"] == {
        "served.vllm-static-2.2048.0.8": 2048,
        "served.vllm-static-2.0.8": 8192,
    }


def test_what_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ValueError, match="peer is 'tgi'; it must be one of vllm-static-2"):
        instances("tgi", tmp_path, tmp_path, PeerOptions())
    with pytest.raises(ValueError, match="tokens_per_step is 0"):
        PeerOptions(tokens_per_step=0)


def test_a_ballast_leaves_the_pool():
    assert ballast_bytes(100 * GIB, 40 * GIB) == 60 * GIB
    with pytest.raises(ValueError, match=r"30.0 GiB are free, less than the 40.0 to leave"):
        ballast_bytes(30 * GIB, 40 * GIB)


def test_vllm_finds_the_plugin_on_the_path(tmp_path):
    """As vLLM looks for it: by entry point, in a fresh process."""
    code = (
        "from importlib.metadata import entry_points\n"
        "found = [e for e in entry_points(group='vllm.general_plugins')]\n"
        "print([e.name for e in found], found[0].load().__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(write_plugin(tmp_path))},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == f"['{MODULE}'] register"


class Tensor:
    """As much of a torch tensor as the plugin touches."""

    def __init__(self, shape):
        self.values = np.zeros(shape)

    @property
    def data(self):
        return self

    def fill_(self, value):
        self.values[:] = value

    def zero_(self):
        self.values[:] = 0

    def normal_(self, mean, std):
        self.values = np.random.default_rng(0).normal(mean, std, self.values.shape)


def test_norms_embeddings_and_routers_are_spread_and_nothing_else():
    names = {
        "model.embed_tokens.weight": (512, 64),
        "model.layers.0.input_layernorm.weight": (64,),
        "model.layers.0.self_attn.q_a_layernorm.weight": (64,),
        "model.layers.0.mlp.gate.weight": (64, 64),
        "model.layers.0.mlp.gate.e_score_correction_bias": (64,),
        "model.layers.0.mlp.experts.w13_weight": (8, 96, 64),
        "model.layers.0.mlp.gate_up_proj.weight": (96, 64),
        "model.norm.weight": (64,),
    }
    tensors = {name: Tensor(shape) for name, shape in names.items()}
    assert spread(tensors.items()) == 6
    assert tensors["model.norm.weight"].values.tolist() == [1.0] * 64
    assert tensors["model.layers.0.self_attn.q_a_layernorm.weight"].values.min() == 1.0
    assert tensors["model.embed_tokens.weight"].values.std() == pytest.approx(1.0, rel=0.05)
    assert tensors["model.layers.0.mlp.gate.weight"].values.std() == pytest.approx(0.02, rel=0.05)
    assert not tensors["model.layers.0.mlp.experts.w13_weight"].values.any()
    assert not tensors["model.layers.0.mlp.gate_up_proj.weight"].values.any()


@pytest.mark.parametrize("model", CONFIGS)
def test_transformers_reads_the_model_directories(model, tmp_path):
    transformers = pytest.importorskip("transformers")
    path = write_peer_dir(tmp_path, model)
    config = transformers.AutoConfig.from_pretrained(path)
    assert config.model_type == CONFIGS[model]["model_type"]
    assert config.num_hidden_layers == CONFIGS[model]["num_hidden_layers"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert tokenizer.decode([7, 8]) == "w7 w8"


@pytest.mark.parametrize(
    ("peer", "words"), [("vllm-static-2", "spread by the plugin"), ("sglang-static-2", "NOT spread")]
)
def test_a_result_says_whether_routing_was_spread(peer, words, tmp_path):
    report = Report(f"peers-{peer}", hardware="h200-x2")
    report.metric("served", 1)
    bench_peers.write_report(report, peer, tmp_path)
    assert words in report.summary
