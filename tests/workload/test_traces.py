"""Readers: every format from a small file of that format, gzipped too, and what is wrong named by file and line."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from crosspool.workload.formats.plain import read_table
from crosspool.workload.formats.servegen import read_servegen
from crosspool.workload.traces import read_trace, recognise

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.9799600,4808,10
2023-11-17 00:00:00.0319600,3180,8
2023-11-17 00:00:01,110,27
"""
MOONCAKE = "\n".join(
    json.dumps({"timestamp": ms, "input_length": n, "output_length": 5, "hash_ids": [0, 1]})
    for ms, n in ((3000, 700), (0, 600))
)
PLAIN = "arrival_s,model,prompt_tokens,output_tokens,service_s\n0.5,b,10,3,1.5\n0.25,a,20,4,\n"
JSONL = '{"t": 1.5, "model": "x", "in": 9, "out": 2}\n\n{"t": 0.5, "model": "y", "in": 8, "out": 3}\n'
BENCH = {
    "model_id": "org/name",
    "duration": 4.0,
    "input_lens": [100, 200, 300],
    "output_lens": [3, 2, 0],
    "ttfts": [0.5, 0.25, 0.0],
    "itls": [[0.1, 0.1], [0.2], []],
    "errors": ["", "", "boom"],
    "start_times": [1000.0, 1002.0, 1003.0],
}


def write(path, text, *, packed=False):
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("text", "kind", "rows"),
    [
        (AZURE, "azure", [(0.0, "trace", 4808, 10), (0.052, "trace", 3180, 8), (1.02004, "trace", 110, 27)]),
        (MOONCAKE, "mooncake", [(0.0, "trace", 600, 5), (3.0, "trace", 700, 5)]),
        (PLAIN, "plain", [(0.25, "a", 20, 4), (0.5, "b", 10, 3)]),
        (JSONL, "plain", [(0.5, "y", 8, 3), (1.5, "x", 9, 2)]),
        (json.dumps(BENCH), "bench", [(0.0, "org/name", 100, 3), (2.0, "org/name", 200, 2)]),
        (json.dumps(BENCH, indent=2), "bench", [(0.0, "org/name", 100, 3), (2.0, "org/name", 200, 2)]),
    ],
)
def test_each_format_is_recognised_and_read(tmp_path, text, kind, rows, packed):
    path = write(tmp_path / "trace.data", text, packed=packed)
    assert recognise(path) == kind
    trace = read_trace(path)
    found = list(trace.rows())
    assert [row[1:] for row in found] == [row[1:] for row in rows]
    assert [row[0] for row in found] == pytest.approx([row[0] for row in rows], abs=1e-6)


def test_bench_results_give_service_times(tmp_path):
    trace = read_trace(write(tmp_path / "b.json", json.dumps(BENCH)))
    assert trace.service_s == pytest.approx([0.7, 0.45])
    assert trace.has_service_times
    without = {key: value for key, value in BENCH.items() if key != "start_times"}
    assert read_trace(write(tmp_path / "c.json", json.dumps(without))).arrival_s == pytest.approx([0.0, 4 / 3])


def test_missing_service_times_are_unknown_not_zero(tmp_path):
    trace = read_trace(write(tmp_path / "p.csv", PLAIN))
    assert np.isnan(trace.service_s).tolist() == [True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PLAIN.replace("10,3", "ten,3"), r"t\.csv:2: prompt_tokens is 'ten'"),
        (PLAIN.replace("0.5,", "-0.5,"), r"t\.csv:2: arrival_s is '-0\.5'"),
        (PLAIN.replace("10,3", "10.5,3"), r"prompt_tokens is '10\.5'; it must be a whole number"),
        (PLAIN + "1,2\n", r"t\.csv:4: 2 values under 5 columns"),
        ("a,b\n1,2\n", "has no column for prompt_tokens among a, b"),
        ("", "holds no request"),
        ('{"t": 1, "in": 2, "out": 3}\n{bad\n', r"t\.csv:2: not JSON"),
        (AZURE.replace("2023-11-17 00:00:01", "yesterday"), r"t\.csv:4: TIMESTAMP is 'yesterday'"),
        (MOONCAKE.replace("700", '"x"'), r"t\.csv:1: input_length is 'x'"),
        ("prompt,output\n3,4\n", "has no arrival column"),
        (json.dumps({"ttfts": [1.0], "input_lens": [1]}), "run the benchmark with --save-detailed"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_trace(write(tmp_path / "t.csv", text))
    assert "\n" not in str(caught.value)


def test_unreadable_files_and_unknown_formats_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*none\.csv: No such file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="trace format 'sql' is unknown"):
        read_trace(write(tmp_path / "t.csv", PLAIN), "sql")
    damaged = tmp_path / "t.csv.gz"
    header, *rows = PLAIN.splitlines(keepends=True)
    packed = gzip.compress((header + "".join(rows) * 4000).encode(), compresslevel=0)
    for broken in (packed[:-20], packed[:5000] + b"\xff" * 64 + packed[5064:]):
        damaged.write_bytes(broken)
        with pytest.raises(ValueError, match=r"t\.csv\.gz"):
            read_trace(damaged)


def test_pairs_without_arrivals_can_be_read_as_lengths(tmp_path):
    table = read_table(write(tmp_path / "t.csv", "num_prefill_tokens,num_decode_tokens\n3,4\n5,6\n"))
    assert (table.prompt_tokens, table.output_tokens, table.arrival_s) == ([3, 5], [4, 6], [])


def test_servegen_clients_have_their_rates_and_lengths(tmp_path):
    rates = write(
        tmp_path / "rates.csv.gz",
        "client,t_s,rate_rps,cv,pattern,p1,p2\n7,600,0.5,1.5,G,1,1\n7,0,1.0,1.0,G,1,1\n3,0,2.0,1.0,G,1,1\n9,0,1,1,G,1,1\n",
        packed=True,
    )
    hist = {"hist": [[0, 0.25], [1, 0.75]]}
    lengths = {
        "bin_edges": [10, 20, 40],
        "clients": {"7": {"input": hist, "output": hist}, "3": {"input": hist, "output": hist}},
    }
    clients = read_servegen(rates, write(tmp_path / "lengths.json", json.dumps(lengths)))
    assert [client.client for client in clients] == [3, 7]
    assert clients[1].arrivals.rate_rps == pytest.approx((1.0 + 0.5) * 600 / 86400)
    trace = clients[1].trace(np.random.default_rng(0), "cold", rate_rps=0.05)
    assert trace.models == ("cold",)
    assert trace.num_requests == pytest.approx(0.05 * 86400, rel=0.15)
    assert trace.arrival_s.max() < 1200
    assert 10 <= trace.prompt_tokens.min() <= trace.prompt_tokens.max() < 40
    assert (trace.prompt_tokens < 20).mean() == pytest.approx(0.25, abs=0.03)


def test_servegen_files_that_do_not_match_are_refused(tmp_path):
    rates = write(tmp_path / "r.csv", "client,t_s,rate_rps,cv\n1,0,1,1\n")
    lengths = {"bin_edges": [1, 2], "clients": {}}
    with pytest.raises(ValueError, match="no client in common"):
        read_servegen(rates, write(tmp_path / "l.json", json.dumps(lengths)))
    with pytest.raises(ValueError, match="no column rate_rps"):
        read_servegen(write(tmp_path / "r2.csv", "client,t_s,cv\n1,0,1\n"), tmp_path / "l.json")
