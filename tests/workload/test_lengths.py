"""Length distributions: means, spread, and pairs that stay pairs."""

from __future__ import annotations

import numpy as np
import pytest

from crosspool.workload.lengths import Fixed, Lognormal, LogUniform, Recorded


def rng():
    return np.random.default_rng(1)


def test_lognormal_has_the_mean_and_spread_asked_for():
    lengths = Lognormal(prompt_mean=900.0, output_mean=300.0, prompt_cv=1.5, output_cv=0.5)
    prompt, output = lengths.draw(rng(), 20000)
    assert prompt.mean() == pytest.approx(900.0, rel=0.02)
    assert prompt.std() / prompt.mean() == pytest.approx(1.5, rel=0.1)
    assert output.mean() == pytest.approx(300.0, rel=0.01)
    assert abs(np.corrcoef(np.log(prompt), np.log(output))[0, 1]) < 0.03


def test_lognormal_correlates_prompt_and_output():
    lengths = Lognormal(prompt_mean=900.0, output_mean=300.0, correlation=0.7)
    prompt, output = lengths.draw(rng(), 20000)
    assert np.corrcoef(np.log(prompt), np.log(output))[0, 1] == pytest.approx(0.7, abs=0.03)


def test_recorded_pairs_stay_pairs():
    lengths = Recorded(prompt_tokens=np.array([10, 20, 30]), output_tokens=np.array([100, 200, 0]))
    prompt, output = lengths.draw(rng(), 500)
    assert set(zip(prompt.tolist(), output.tolist(), strict=True)) == {(10, 100), (20, 200), (30, 1)}


def test_log_uniform_fills_each_octave_alike():
    prompt, output = LogUniform(shortest=1024, longest=4096, output_tokens=256).draw(rng(), 20000)
    assert (prompt < 2048).mean() == pytest.approx(0.5, abs=0.02)
    assert prompt.min() >= 1024
    assert prompt.max() <= 4096
    assert set(output.tolist()) == {256}


def test_cut_lengths_stay_below_the_cut():
    prompt, _ = Lognormal(prompt_mean=900.0, output_mean=300.0, prompt_cv=3.0, longest=2000).draw(rng(), 5000)
    assert prompt.max() == 2000


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fixed(prompt_tokens=0, output_tokens=1),
        lambda: Lognormal(prompt_mean=-1.0, output_mean=1.0),
        lambda: Lognormal(prompt_mean=1.0, output_mean=1.0, correlation=2.0),
        lambda: LogUniform(shortest=10, longest=5, output_tokens=1),
        lambda: Recorded(prompt_tokens=np.array([1]), output_tokens=np.array([1, 2])),
    ],
)
def test_impossible_lengths_are_refused(make):
    with pytest.raises(ValueError, match=r"must|give"):
        make()
