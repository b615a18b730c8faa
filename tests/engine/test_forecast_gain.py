"""What `forecast` is for: clients ask for far more tokens than they use."""

import random

from crosspool.core import FinishReason
from tests.support.core_drive import Drive, a_config, a_model


def serve(admission: str) -> tuple[float, Drive]:
    """Seconds to serve 160 requests that ask for 512 tokens and stop after 64 on average."""
    config = a_config(
        200, admission=admission, forecast_quantile=0.9, max_num_seqs=64, max_queue=200, max_num_batched_tokens=1024
    )
    drive = Drive(config, [a_model("p", page_tokens=16), a_model("q", page_tokens=16, frames_per_page=2)])
    drive.cluster.durations = {"p": 0.01, "q": 0.01}
    rng = random.Random(1)
    for _ in range(80):
        for model in "pq":
            drive.add(model, prompt=rng.randint(16, 100), max_tokens=512, stops=[5])
    drive.run()
    drive.check_all_ended()
    return drive.now, drive


def test_forecast_serves_short_answers_faster_and_hardly_ever_lets_one_wait():
    reserve_s, _ = serve("reserve")
    forecast_s, drive = serve("forecast")
    assert forecast_s < 0.75 * reserve_s
    num_rows = sum(len(step.rows) for step in drive.cluster.steps if step.header.phase == "decode")
    assert drive.core.dispatcher.num_stalls < 0.01 * num_rows
    assert any(end.finish_reason is FinishReason.STOP for end in drive.ends.values())
