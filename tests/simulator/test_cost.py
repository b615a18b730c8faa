"""Stage times: the planner's roofline where it applies, arithmetic and links beyond it, measured points over both."""

from __future__ import annotations

import json

import pytest

from crosspool.planner.catalogue import catalogue_facts
from crosspool.planner.gpus import gpu_kind
from crosspool.planner.roofline import stage_times
from crosspool.simulator.cost import MonolithicCost, PooledCost, StepWork, decode_work, prompt_works, step_work
from crosspool.simulator.measured import MeasuredCost, sharing_of, whole_with_measurements, with_measurements
from crosspool.simulator.measured_files import read_measured
from crosspool.simulator.sharing import Sharing
from tests.support.simulating import LinearCost, prefill_step

H200 = gpu_kind("h200")
NAMES = ["qwen3-30b-a3b", "glm-4.7-flash", "deepseek-v2-lite", "qwen3-next-80b-a3b"]


def pooled(name="qwen3-30b-a3b", num_kv=1, num_weights=1) -> PooledCost:
    return PooledCost(catalogue_facts(name), H200, num_kv=num_kv, num_weights=num_weights)


def chunk(new=512, cached=0) -> StepWork:
    return StepWork(num_tokens=new, kv_tokens=cached + new, pairs=new * (cached + (new + 1) / 2), num_sampled=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("batch", "context"), [(1, 100), (4, 8000), (8, 32000)])
def test_decode_is_the_planners_roofline(name, batch, context):
    ours = pooled(name).times(decode_work(batch, batch * context))
    theirs = stage_times(
        catalogue_facts(name), H200, batch=batch, context_tokens=context, num_kv_ranks=1, num_weights_ranks=1
    )
    assert ours.step_s == pytest.approx(theirs.step_s, rel=1e-6)
    assert ours.kv_busy_s == pytest.approx(theirs.kv_busy_s, rel=1e-6)


def test_floors_of_qwen3_on_an_h200():
    """48 layers of eight experts of 9.4 MB and of 37.7 MB attention weights, at 4.25 TB/s."""
    times = pooled().times(decode_work(1, 0))
    assert 48 * (times.ffn_s - H200.segment_s) == pytest.approx(3.65e9 / 4.25e12, rel=0.02)
    assert 48 * (times.attention_s - H200.segment_s) == pytest.approx(48 * 37.7e6 / 4.25e12, rel=0.02)
    assert times.tail_s == pytest.approx(622e6 / 4.25e12, rel=0.1)


def test_more_ranks_take_less_and_cross_more():
    one, three = pooled(num_weights=1), pooled(num_weights=3)
    work = decode_work(4, 4000)
    assert three.times(work).ffn_s < one.times(work).ffn_s
    assert three.times(chunk()).crossing_s > 2 * one.times(chunk()).crossing_s
    long = decode_work(1, 200_000)
    assert pooled(num_kv=2).times(long).attention_s < 0.65 * pooled(num_kv=1).times(long).attention_s
    assert pooled(num_kv=2).times(decode_work(1, 0)).attention_s > one.times(decode_work(1, 0)).attention_s  # the merge


def test_a_share_beside_attention_takes_its_part_of_the_width():
    facts, fixed = catalogue_facts("qwen3-30b-a3b"), H200.segment_s
    whole, half = pooled().times(decode_work(4, 0)), pooled(num_weights=2).times(decode_work(4, 0))
    cut = PooledCost(facts, H200, num_kv=1, num_weights=1, beside_share=0.25).times(decode_work(4, 0))
    assert cut.ffn_s - fixed == pytest.approx(0.75 * (whole.ffn_s - fixed))
    assert cut.beside_s - fixed == pytest.approx(0.25 * (whole.ffn_s - fixed))
    assert (cut.attention_s, whole.beside_s) == (whole.attention_s, 0.0)
    third = PooledCost(facts, H200, num_kv=1, num_weights=2, beside_share=1 / 3).times(decode_work(4, 0))
    assert third.ffn_s == pytest.approx(third.beside_s)
    assert third.ffn_s - fixed == pytest.approx(2 / 3 * (half.ffn_s - fixed))


def test_long_chunks_are_bound_by_arithmetic():
    short, long = pooled().times(chunk(512, 0)), pooled().times(chunk(512, 30_000))
    assert long.attention_s > 5 * short.attention_s
    again = pooled().times(chunk(512, 60_000))
    assert again.attention_s - long.attention_s == pytest.approx(2 * 512 * 30_000 * 2 * 32 * 128 / 590e12, rel=0.02)


def test_a_chunk_that_samples_nothing_has_no_tail_to_speak_of():
    assert pooled().times(chunk()).tail_s == H200.segment_s


@pytest.mark.parametrize("name", NAMES[:3])
def test_one_gpu_alone_reads_what_both_pools_read_and_crosses_nothing(name):
    facts = catalogue_facts(name)
    alone, work = MonolithicCost(facts, H200, num_gpus=1).times(decode_work(2, 2000)), decode_work(2, 2000)
    both = PooledCost(facts, H200, num_kv=1, num_weights=1).times(work)
    assert alone.crossing_s == 0
    assert alone.step_s == pytest.approx(both.step_s - 2 * both.num_layers * both.crossing_s)


def test_tensor_parallel_attention_is_cut_by_heads_and_no_further():
    work = decode_work(1, 0)
    gqa = [MonolithicCost(catalogue_facts(NAMES[0]), H200, num_gpus=n).times(work).attention_s for n in (1, 4)]
    mla = [MonolithicCost(catalogue_facts(NAMES[1]), H200, num_gpus=n).times(work).attention_s for n in (1, 4)]
    assert (gqa[1] - H200.segment_s) == pytest.approx((gqa[0] - H200.segment_s) / 4, rel=1e-6)
    assert mla[1] == pytest.approx(mla[0], rel=1e-6)


def test_a_sequence_on_one_replica_is_read_by_its_gpus_alone():
    facts, long = catalogue_facts(NAMES[1]), 100_000
    spread, apart = (MonolithicCost(facts, H200, num_gpus=4, replica_gpus=size) for size in (4, 1))
    empty = apart.times(decode_work(1, 0)).attention_s

    def cache_s(cost, batch):
        return cost.times(decode_work(batch, batch * long)).attention_s - empty

    assert cache_s(apart, 1) == pytest.approx(4 * cache_s(spread, 1))
    assert cache_s(apart, 4) == pytest.approx(cache_s(apart, 1)) == pytest.approx(cache_s(spread, 4))
    assert cache_s(apart, 5) == pytest.approx(2 * cache_s(apart, 4))  # one replica has two


def test_work_of_a_step_is_read_from_its_descriptor():
    step = prefill_step(prompts=(100, 20), max_tokens=64)
    work = step_work(step)
    assert [row.num_new_tokens for row in step.rows] == [44, 20]
    assert work == StepWork(num_tokens=64, kv_tokens=64, pairs=44 * 45 / 2 + 20 * 21 / 2, num_sampled=1)


def test_measured_points_replace_the_roofline(tmp_path):
    path = tmp_path / "measured.json"
    entry = {
        "ffn_us": {"2": {"1": 20.0, "8": 90.0}},
        "attention_us": [[1, 1000, 21.0], [4, 1000, 24.0], [8, 1000, 28.0]],
        "crossing_us": 2.9,
        "tail_us": 170.0,
    }
    path.write_text(json.dumps({"models": {"qwen3-30b-a3b": entry}}))
    table = read_measured([path])
    cost = with_measurements(pooled(num_weights=2), table, "Qwen/Qwen3-30B-A3B")
    times = cost.times(decode_work(8, 8000))
    assert times.ffn_s == pytest.approx(90e-6)
    assert cost.times(decode_work(4, 0)).ffn_s == pytest.approx(50e-6)  # in between
    assert times.attention_s == pytest.approx(28e-6)
    assert cost.times(decode_work(1, 100_000)).attention_s == pytest.approx(120e-6)
    assert times.crossing_s == pytest.approx(2.9e-6)
    assert times.tail_s == pytest.approx(170e-6)
    bound = pooled(num_weights=2)
    shared = PooledCost(catalogue_facts("qwen3-30b-a3b"), H200, num_kv=1, num_weights=2, beside_share=0.2)
    parts = with_measurements(shared, table, "qwen3-30b-a3b").times(decode_work(8, 8000))
    width_s = pooled(num_weights=2).times(decode_work(8, 0)).ffn_s - H200.segment_s  # what is beyond does not shrink
    assert parts.ffn_s == pytest.approx(90e-6 - 0.2 * width_s)
    assert parts.beside_s == pytest.approx(90e-6 - 0.6 * width_s)
    ratio = 90e-6 / bound.times(decode_work(8, 0)).ffn_s
    assert cost.times(chunk()).ffn_s == pytest.approx(ratio * bound.times(chunk()).ffn_s)


def test_later_files_give_rows_of_ffns_and_what_lanes_beside_attention_do(tmp_path):
    name = "qwen3-30b-a3b"
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    pair = f"pipeline_efficiency.{name}{{0}}.b12+{name}{{0}}.b12.1k.fused"
    first.write_text(json.dumps({"metrics": {f"moe_us.{name}.b{rows}.uniform.p50": 10.0 * rows for rows in (1, 8)}}))
    metrics = {f"decode_us_a_layer.{name}.1+1.b{rows}.1k.fused.ffn": 200.0 for rows in (8, 12)}
    efficiencies = {pair.format(""): 0.97, pair.format(".1+1s25"): 0.9}
    second.write_text(json.dumps({"metrics": metrics | efficiencies}))
    table = read_measured([first, second])
    assert [(rows, round(1e6 * s)) for rows, s in table[name].ffn_s[1]] == [(1, 10), (8, 200), (12, 200)]
    work, facts = decode_work(12, 0), catalogue_facts(name)
    assert with_measurements(pooled(), table, name).beside_others(work) == pytest.approx(1 / 0.97)
    shared = PooledCost(facts, H200, num_kv=1, num_weights=1, beside_share=0.25)
    assert with_measurements(shared, table, name).beside_others(work) == pytest.approx(1 / 0.9)


def test_rows_and_tokens_of_attention_are_told_apart_where_points_allow(tmp_path):
    path = tmp_path / "measured.json"
    points = [
        [rows, context, 20 + 2 * (rows - 1) + 0.001 * rows * context] for rows in (1, 4) for context in (1000, 8000)
    ]
    path.write_text(json.dumps({"models": {"qwen3-30b-a3b": {"attention_us": points}}}))
    cost = with_measurements(pooled(), read_measured([path]), "qwen3-30b-a3b")
    assert cost.times(decode_work(12, 12_000)).attention_s == pytest.approx(54e-6)
    assert cost.times(decode_work(1, 100_000)).attention_s == pytest.approx(120e-6)


def test_a_model_whole_on_one_gpu_takes_the_measured_stages_and_crosses_nothing(tmp_path):
    path = tmp_path / "measured.json"
    entry = {"ffn_us": {"1": {"1": 40.0}}, "attention_us": [[1, 1000, 27.0]], "crossing_us": 2.9}
    path.write_text(json.dumps({"models": {"qwen3-30b-a3b": entry}}))
    table = read_measured([path])
    one, two = (MonolithicCost(catalogue_facts("qwen3-30b-a3b"), H200, num_gpus=count) for count in (1, 2))
    times = whole_with_measurements(one, table, "qwen3-30b-a3b").times(decode_work(1, 1000))
    assert (times.ffn_s, times.attention_s) == (pytest.approx(40e-6), pytest.approx(27e-6))
    assert times.crossing_s == 0
    assert whole_with_measurements(one, table, "qwen3-30b-a3b").times(chunk()).crossing_s == 0
    assert whole_with_measurements(two, table, "qwen3-30b-a3b") is two, "all-reduces were not measured"
    assert whole_with_measurements(one, table, "glm-4.7-flash") is one


def test_numbers_of_gpus_that_were_not_measured_keep_the_excess(tmp_path):
    path = tmp_path / "measured.json"
    entry = {"ffn_us": {"1": {"1": 40.0, "8": 150.0}}, "attention_us": [[1, 1000, 31.0], [8, 1000, 45.0]]}
    path.write_text(json.dumps({"models": {"qwen3-30b-a3b": entry}}))
    table = read_measured([path])
    cost = with_measurements(pooled(num_weights=3, num_kv=2), table, "qwen3-30b-a3b")
    one, three = pooled(), pooled(num_weights=3, num_kv=2)
    work = decode_work(8, 8000)
    assert cost.times(work).ffn_s == pytest.approx(three.times(work).ffn_s + 150e-6 - one.times(work).ffn_s)
    excess = 29e-6 - one.times(decode_work(1, 0)).attention_s  # 29 us without a cache
    assert cost.times(work).attention_s == pytest.approx(three.times(work).attention_s + excess)
    first = with_measurements(pooled(), table, "qwen3-30b-a3b")
    assert first.times(chunk()).attention_s == pytest.approx(one.times(chunk()).attention_s + excess)


def test_kept_results_of_the_benchmarks_are_read(tmp_path):
    ffn, attention, steps = (tmp_path / f"{name}.json" for name in ("moe", "half", "steps"))
    ffn.write_text(json.dumps({"metrics": {"moe_us.glm-4.7-flash.b1.uniform.p50": 44.0, "moe_us.x.b1.p50": 9.0}}))
    points = {f"attention_half_us.glm-4.7-flash.{k}k.b{b}.p50": 30.0 + b * k for k in (4, 32) for b in (1, 4)}
    attention.write_text(json.dumps({"metrics": points}))
    name = "decode_ms.glm-4.7-flash.1+1.b{}.4k.graphs.crossing_us_a_layer"
    rest = {name.format(batch): value for batch, value in ((1, -2.0), (2, 3.0), (4, 5.0))}
    steps.write_text(json.dumps({"metrics": rest}))
    table = read_measured([ffn, attention, steps])
    assert list(table) == ["glm-4.7-flash"]
    times = with_measurements(pooled("glm-4.7-flash"), table, "glm-4.7-flash").times(decode_work(1, 4096))
    assert times.ffn_s == pytest.approx(44e-6)
    assert times.attention_s == pytest.approx(34e-6)
    assert times.crossing_s == pytest.approx(0.05e-6), "hidden behind prefetched weights"
    third = with_measurements(pooled("glm-4.7-flash"), table, "glm-4.7-flash").times(decode_work(3, 4096))
    assert third.crossing_s == pytest.approx(2e-6)
    batch = "decode_us_a_layer.glm-4.7-flash.1+1.b{}.{}k.graphs.{}"
    newer = {batch.format(1, 4, "ffn"): 40.0, batch.format(8, 4, "ffn"): 150.0, batch.format(8, 1, "ffn"): 140.0}
    newer |= {batch.format(1, 4, "rest"): -3.0, batch.format(8, 4, "rest"): 6.0, batch.format(1, 4, "tail"): 2.0}
    served = "decode_us_a_layer.glm-4.7-flash.1+1.b2.4k.{}.ffn"
    newer |= {served.format("fused"): 61.0, served.format("graphs"): 99.0}
    newer |= {"pipeline_efficiency.glm-4.7-flash.b4+glm-4.7-flash.b4.4k.fused": 0.9}
    newer |= {"pipeline_efficiency.glm-4.7-flash.b4+qwen3-30b-a3b.b4.4k.fused": 0.5}
    steps.write_text(json.dumps({"metrics": newer}))
    cost = with_measurements(pooled("glm-4.7-flash"), read_measured([ffn, attention, steps]), "glm-4.7-flash")
    one, two, eight = (cost.times(decode_work(rows, 4096)) for rows in (1, 2, 8))
    assert two.ffn_s == pytest.approx(61e-6), "as a server runs it"
    assert (one.ffn_s, eight.ffn_s) == (pytest.approx(40e-6), pytest.approx(145e-6)), "as whole steps show it"
    assert (one.crossing_s, eight.crossing_s) == (pytest.approx(0.05e-6), pytest.approx(3e-6))
    assert cost.beside_others(decode_work(8, 0)) == pytest.approx(1 / 0.9)
    assert pooled("glm-4.7-flash").beside_others(decode_work(8, 0)) == 1.0
    ways = ((1, "words", 0.75), (4, "words", 0.9), (4, "fused", 1.02))
    paused = {f"pipeline_efficiency.glm-4.7-flash.b{b}.pause22.{way}": value for b, way, value in ways}
    steps.write_text(json.dumps({"metrics": paused}))
    cost = with_measurements(pooled("glm-4.7-flash"), read_measured([steps]), "glm-4.7-flash")
    found = [cost.beside_others(decode_work(rows, 0)) for rows in (1, 4)]
    assert found == [pytest.approx(1 / 0.75), pytest.approx(1 / 0.9)]
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"metrics": {"copy_tb_per_s": 4.2}}))
    with pytest.raises(ValueError, match="it has none of a model's stages"):
        read_measured([other])


def test_prompts_are_as_much_slower_as_whole_ones_were(tmp_path):
    path = tmp_path / "prefill.json"
    bound = pooled()
    alone_s = {tokens: sum(bound.times(work).step_s for work in prompt_works(tokens)) for tokens in (4096, 32768)}
    metrics = {
        "ttft_ms.qwen3-30b-a3b.1+1.4k": 2e3 * alone_s[4096],
        "ttft_ms.qwen3-30b-a3b.1+1.32k": 3e3 * alone_s[32768],
    }
    path.write_text(json.dumps({"metrics": metrics}))
    cost = with_measurements(pooled(), read_measured([path]), "qwen3-30b-a3b")
    (whole,) = prompt_works(4096)
    assert cost.times(whole).step_s == pytest.approx(2 * alone_s[4096])
    (short,) = prompt_works(100)
    assert cost.times(short).ffn_s == pytest.approx(2 * bound.times(short).ffn_s)
    first, *_, last = prompt_works(32768)
    assert (len(prompt_works(32768)), first.num_sampled, last.num_sampled, last.kv_tokens) == (4, 0, 1, 32768)
    assert 2 < cost.times(first).ffn_s / bound.times(first).ffn_s < 3
    assert cost.times(decode_work(4, 4000)) == bound.times(decode_work(4, 4000))


def test_models_and_parts_without_measurements_keep_the_roofline(tmp_path):
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"models": {"qwen3-30b-a3b": {"tail_us": 170.0}}}))
    table = read_measured([path])
    other = pooled("glm-4.7-flash")
    assert with_measurements(other, table, "glm-4.7-flash") is other
    cost = with_measurements(pooled(), table, "qwen3-30b-a3b")
    assert isinstance(cost, MeasuredCost)
    plain, work = pooled(), decode_work(4, 4000)
    assert cost.times(work).ffn_s == plain.times(work).ffn_s
    assert cost.times(work).attention_s == plain.times(work).attention_s


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"models": {"m": {"tail_us": -1}}}',
        '{"models": {"m": {"ffn_us": {"x": {"1": 1}}}}}',
        '{"models": {"m": {"lanes_efficiency": {"1": 2}}}}',
    ],
)
def test_a_broken_table_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "measured.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no table of measured stage times") as refused:
        read_measured([path])
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="no table"):
        read_measured([tmp_path / "missing.json"])


def test_rows_and_tokens_make_steps_longer():
    cost = LinearCost()
    assert cost.times(decode_work(4, 100)).ffn_s > cost.times(decode_work(1, 100)).ffn_s
    for name in NAMES:
        steps = [pooled(name).times(decode_work(batch, batch * 1000)).step_s for batch in (1, 2, 4, 8, 16)]
        assert steps == sorted(steps)
        assert pooled(name).times(decode_work(1, 9000)).step_s > pooled(name).times(decode_work(1, 10)).step_s


def test_what_prompts_and_decode_cost_each_other_is_read_of_the_shortest_prompts(tmp_path):
    """Names of models hold dots, and neighbour and prompt stand in one name."""
    path = tmp_path / "prefill_h200-x2_2026-11-30.json"
    glm, qwen = "glm-4.7-flash", "qwen3-30b-a3b"
    metrics = {
        f"ttft_ms.{qwen}.1+1.4k": 90.0,
        f"ttft_ms.{qwen}.1+1.32k": 1100.0,
        f"ttft_ms_beside_decode.{qwen}.1+1.4k": 135.0,
        f"ttft_ms_beside_decode.{qwen}.1+1.32k": 1200.0,
        f"tbt_p50_ms_during_prefill.{glm}.{qwen}.1+1.4k": 9.7,
        f"tbt_p50_ms_before_prefill.{glm}.{qwen}.1+1.4k": 5.0,
        f"tbt_p50_ms_during_prefill.{glm}.{qwen}.1+1.32k": 50.0,
        f"tbt_p50_ms_before_prefill.{glm}.{qwen}.1+1.32k": 5.0,
    }
    path.write_text(json.dumps({"metrics": metrics}))
    table = read_measured([path])
    assert table[qwen].prompt_slower == pytest.approx(1.5)
    assert table[qwen].beside_prompt_s is None, "it decoded beside nobody's prompt"
    assert table[glm].beside_prompt_s == pytest.approx(4.7e-3)
    assert sharing_of(table, glm, 47).longer_s == pytest.approx(100e-6)
    assert sharing_of(table, qwen, 48) == Sharing(prompt_slower=pytest.approx(1.5))
    assert sharing_of({}, qwen, 48) == Sharing()


@pytest.mark.parametrize("entry", [{"prompt_slower": 0}, {"prompt_slower": "much"}, {"beside_prompt_us": -1}])
def test_impossible_costs_of_sharing_are_refused(tmp_path, entry):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"models": {"qwen3-30b-a3b": entry}}))
    with pytest.raises(ValueError, match="no table of measured stage times"):
        read_measured([path])


def test_the_usual_costs_of_sharing_are_the_means_of_the_kept_result():
    from benchmarks.layouts.predicted import stage_times as kept_stage_times

    measured = [model for model in kept_stage_times().values() if model.prompt_slower is not None]
    assert len(measured) == 2
    assert sum(model.prompt_slower for model in measured) / 2 == pytest.approx(Sharing().prompt_slower, abs=0.01)
    layers = {"qwen3-30b-a3b": 48, "deepseek-v2-lite": 27}
    longer = [kept_stage_times()[name].beside_prompt_s / count for name, count in layers.items()]
    assert sum(longer) / 2 == pytest.approx(Sharing().longer_s, abs=1e-6)


def test_a_model_whole_on_a_gpu_is_as_slow_as_a_lone_token_was(tmp_path):
    path = tmp_path / "layouts_h200-x2_2026-11-30.json"
    metrics = {
        "alone_tbt_ms.static-2.glm-4.7-flash.4k.p50": 4.0,
        "alone_tbt_ms.crosspool-1+1.glm-4.7-flash.4k.p50": 3.8,
        "alone_tbt_ms.crosspool-1.glm-4.7-flash.4k.p50": 5.0,
    }
    path.write_text(json.dumps({"metrics": metrics}))
    table = read_measured([path])
    name = "glm-4.7-flash"
    whole = whole_with_measurements(MonolithicCost(catalogue_facts(name), H200, num_gpus=1), table, name)
    assert whole.times(decode_work(1, 4096)).step_s == pytest.approx(4e-3)
    plain = MonolithicCost(catalogue_facts(name), H200, num_gpus=1).times(decode_work(8, 8 * 4096)).step_s
    slower = 4e-3 / MonolithicCost(catalogue_facts(name), H200, num_gpus=1).times(decode_work(1, 4096)).step_s
    assert whole.times(decode_work(8, 8 * 4096)).step_s == pytest.approx(slower * plain, rel=0.02)
    pools = with_measurements(pooled(name), table, name)
    assert pools.times(decode_work(1, 4096)).step_s < 3e-3, "two pools are measured otherwise"
    on_one = with_measurements(pooled(name), table, name, is_one_gpu=True)
    assert on_one.times(decode_work(1, 4096)).step_s == pytest.approx(5e-3)
    assert on_one.times(decode_work(1, 4096)).crossing_s > 0
