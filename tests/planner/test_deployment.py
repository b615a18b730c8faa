"""The input file: sizes, defaults, paths, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from crosspool.planner.deployment import parse_plan_input, read_plan_input

BASE = {"gpus": {"kind": "h200", "count": 2}, "models": ["glm-4.7-flash"]}


def test_defaults_and_bare_names():
    given = parse_plan_input(BASE)
    assert given.models[0].model == "glm-4.7-flash"
    assert given.gpus.memory_bytes == 143771 << 20
    assert given.num_groups == 1
    assert list(given.kv_choices()) == [1]
    assert (given.admission, given.quantile) == ("forecast", 0.99)


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 10**9), ("37.5 GiB", 75 << 29), (123, 123), ("512MiB", 512 << 20), ("3 MB", 3 * 10**6)],
)
def test_sizes_are_decimal_with_gb_and_binary_with_gib(text, size):
    assert parse_plan_input({**BASE, "gpus": {**BASE["gpus"], "memory": text}}).gpus.memory_bytes == size


def test_groups_are_whole():
    given = parse_plan_input({**BASE, "gpus": {"kind": "h200", "count": 16}})
    assert (given.num_groups, given.gpus.group_size) == (2, 8)
    with pytest.raises(ValueError, match="12 GPUs are no whole number of groups of 8; set per_group"):
        parse_plan_input({**BASE, "gpus": {"kind": "h200", "count": 12}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": {}}, r"plan input: gpu: is not a setting"),
        ({"gpus": {"kind": "h300", "count": 1}}, r"gpus\.kind: GPU kind 'h300' is unknown"),
        ({"gpus": {"kind": "h200", "count": 0}}, r"gpus\.count: .*greater than or equal to 1 \(given: '0'\)"),
        ({"gpus": {"kind": "h200", "count": 1, "memory": "lots"}}, r"gpus\.memory: 'lots' is not a size"),
        ({"models": []}, r"models: "),
        ({"models": [{"model": "x", "rate": 1.0}]}, r"models\.0: x has a rate but no lengths"),
        ({"models": [{"model": "x", "rate": -1.0}]}, r"models\.0\.rate"),
        ({"models": [{"model": "x", "lengths": {"prompt": 5}}]}, r"lengths need either a file, or both"),
        ({"service": {"cost": "steady"}}, r"service: cost steady needs tbt_ms"),
        ({"quantile": 1.0}, r"quantile: .*less than 1"),
    ],
)
def test_each_mistake_is_one_line_with_its_place(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_plan_input({**BASE, **change})
    assert "\n" not in str(caught.value)


def test_the_number_of_kv_gpus_leaves_one_for_weights():
    with pytest.raises(ValueError, match=r"gpus\.kv is 2 of 2 GPUs a group"):
        parse_plan_input({**BASE, "gpus": {"kind": "h200", "count": 2, "kv": 2}}).kv_choices()


def test_paths_count_from_the_file(tmp_path):
    (tmp_path / "plan.yaml").write_text(
        "gpus: {kind: h200, count: 1}\n"
        "models: [{model: olmoe-1b-7b, rate: 1, lengths: {file: pairs.csv}}]\n"
        "trace: {file: sub/trace.csv}\n"
    )
    given = read_plan_input(tmp_path / "plan.yaml")
    assert given.models[0].lengths is not None
    assert given.models[0].lengths.file == tmp_path / "pairs.csv"
    assert given.trace is not None
    assert given.trace.file == tmp_path / "sub" / "trace.csv"


def test_unreadable_and_broken_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*none"):
        read_plan_input(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("gpus: [")
    with pytest.raises(ValueError, match="not valid YAML"):
        read_plan_input(broken)
    broken.write_text("- 1")
    with pytest.raises(ValueError, match="holds a list"):
        read_plan_input(Path(broken))
