"""Random requests, aborts, failures and lost ranks against a simulated cluster: nothing accepted is lost.

Every turn checks that no frame has two owners, that the budget adds up and holds, and that what lives can end.
"""

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosspool.core import FinishReason
from crosspool.errors import CapacityError, DeadlineExceededError, QueueFullError, StepError, WorkerLostError
from tests.support.core_drive import Drive, a_config, a_model

MODELS = [
    a_model("p", page_tokens=4, frames_per_page=1, max_context=64, weights_ranks=("w0",), prefill_ranks=("p0", "p1")),
    a_model("q", page_tokens=3, frames_per_page=2, max_context=48, weights_ranks=("w0", "w1"), prefill_ranks=("p0",)),
    a_model("r", page_tokens=8, frames_per_page=3, max_context=96, weights_ranks=("w1",)),
    a_model("s", page_tokens=4, frames_per_page=2, max_context=64, weights_ranks=("w1",), kv_rank="kv1"),
]
RANKS = ("p0", "p1", "kv0", "kv1", "w0", "w1")


def add_at_random(drive: Drive, rng: random.Random) -> None:
    with contextlib.suppress(CapacityError, QueueFullError, WorkerLostError):
        ids = drive.add(
            rng.choice(MODELS).name,
            prompt=rng.randint(1, 40),
            max_tokens=rng.randint(1, 30),
            n=rng.choice((1, 1, 1, 3)),
            stops=rng.sample(range(64), 3),
            priority=rng.randint(-2, 2),
            deadline_s=drive.now + rng.uniform(0.0, 2.0) if rng.random() < 0.2 else None,
        )
        if rng.random() < 0.03:
            drive.cluster.poison[ids[0]] = rng.choice(("prefill", "decode"))


def chaos(
    seed: int, *, admission: str, fail_rate: float, num_losses: int, timeout_s: float, num_frames: int, is_ahead: bool
) -> Drive:
    rng, rules = random.Random(seed), random.Random(seed + 1)
    num_prefill_lanes, num_prefill_ranks = rng.randint(1, 2), rng.randint(0, 2)
    config = a_config(
        num_frames,
        admission=admission,
        max_queue=6,
        max_num_seqs=rng.randint(1, 6),
        num_decode_lanes=rng.randint(1, 3),
        num_prefill_lanes=min(num_prefill_lanes, num_prefill_ranks or num_prefill_lanes),
        prefill_ranks=("p0", "p1")[:num_prefill_ranks],
        ageing_s=rng.choice((0.0, 0.05, 2.0)),
        bypass_window=rng.choice((0, 3)),
        recovery_timeout_s=timeout_s,
        forecast_quantile=0.5,
        rerun_tokens=rules.choice((0, 3)),
        batch_invariant=rules.random() < 0.3,
    )
    drive = Drive(config, MODELS, seed=seed, fail_rate=fail_rate, is_ahead=is_ahead)
    for name in "pqrs":  # so that a forecast has outputs to go by, and goes wrong
        for length in rng.choices(range(1, 8), k=40):
            drive.core._estimate.record(name, length)
    for _ in range(rng.randint(5, 40)):
        for _ in range(rng.randint(0, 4)):
            add_at_random(drive, rng)
        running = [sequence_id for sequence_id in drive.requests if sequence_id not in drive.ends]
        if running and rng.random() < 0.2:
            drive.end(rng.choice(running), rng.choice((FinishReason.ABORT, FinishReason.STOP)))
        if num_losses and rng.random() < 0.2:
            num_losses -= 1
            rank = rng.choice([rank for rank in RANKS if rank not in drive.cluster.down] or [None])
            if rank is not None:
                back_in_s = rng.uniform(0.0, 0.5)
                here = [model.name for model in MODELS if rank in model.placement.ranks]
                early = rules.sample(here, rules.randint(0, max(0, len(here) - 1)))
                models_in_s = {name: rules.uniform(0.0, back_in_s) for name in early}
                drive.cluster.lose(rank, drive.now, back_in_s, models_in_s)
        drive.run(until_s=drive.now + rng.uniform(0.0, 0.1))
    drive.run()
    return drive


@pytest.mark.fuzz
@settings(max_examples=settings.default.max_examples // 2)
@given(
    seed=st.integers(0, 10**6),
    admission=st.sampled_from(["reserve", "forecast"]),
    fail_rate=st.sampled_from([0.0, 0.05]),
    num_losses=st.integers(0, 4),
    num_frames=st.sampled_from([40, 64, 200]),
    is_ahead=st.booleans(),
)
def test_every_accepted_request_ends_with_the_tokens_of_an_undisturbed_run(
    seed, admission, fail_rate, num_losses, num_frames, is_ahead
):
    drive = chaos(
        seed,
        admission=admission,
        fail_rate=fail_rate,
        num_losses=num_losses,
        timeout_s=60.0,
        num_frames=num_frames,
        is_ahead=is_ahead,
    )
    drive.check_all_ended()
    for sequence_id, end in drive.ends.items():
        if isinstance(end.error, StepError):
            assert sequence_id in drive.cluster.poison
        elif end.error is not None:
            assert isinstance(end.error, DeadlineExceededError), end.error
    if admission == "reserve":
        assert drive.core.dispatcher.num_stalls == 0


@pytest.mark.fuzz
@settings(max_examples=settings.default.max_examples // 2)
@given(
    seed=st.integers(0, 10**6),
    timeout_s=st.sampled_from([0.0, 0.01, 0.3]),
    num_losses=st.integers(1, 5),
    is_ahead=st.booleans(),
)
def test_with_a_short_recovery_bound_every_request_still_ends_and_pages_return(seed, timeout_s, num_losses, is_ahead):
    drive = chaos(
        seed,
        admission="reserve",
        fail_rate=0.02,
        num_losses=num_losses,
        timeout_s=timeout_s,
        num_frames=64,
        is_ahead=is_ahead,
    )
    drive.check_all_ended()


def test_a_forecast_that_is_too_low_stalls_and_never_deadlocks():
    """The chaos above must reach the case it is there for: sequences that outgrow what was set aside for them."""
    drives = [
        chaos(
            seed,
            admission="forecast",
            fail_rate=0.0,
            num_losses=0,
            timeout_s=60.0,
            num_frames=40,
            is_ahead=seed % 2 == 0,
        )
        for seed in range(25)
    ]
    for drive in drives:
        drive.check_all_ended()
    assert sum(drive.core.dispatcher.num_stalls for drive in drives) > 20


@pytest.mark.parametrize("admission", ["reserve", "forecast"])
def test_a31_a_pool_at_a_fifth_of_the_need_serves_everything_in_turn(admission):
    models = [a_model("p", page_tokens=16, frames_per_page=2), a_model("q", page_tokens=32, frames_per_page=3)]
    num_frames = 2400  # 2 x 200 requests of about 800 tokens would take some 32,000 frames, 64 of them some 6,000
    config = a_config(num_frames, admission=admission, max_queue=200, max_num_seqs=32, max_num_batched_tokens=2048)
    drive = Drive(config, models)
    rng = random.Random(31)
    for model in models:
        for _ in range(200):
            drive.add(model.name, prompt=rng.randint(300, 900), max_tokens=124 if rng.random() < 0.5 else 100)
    drive.run()  # every turn checks that no step lacks pages and that the counters add up to the pool
    assert {end.finish_reason for end in drive.ends.values()} == {FinishReason.LENGTH}
    assert len(drive.ends) == 400
    drive.check_all_ended()
