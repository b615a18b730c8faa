"""Turns of models."""

from hypothesis import given
from hypothesis import strategies as st

from crosspool.engine.turns import Turns


@given(st.data())
def test_between_two_turns_of_a_ready_model_each_other_takes_at_most_one(data):
    turns = Turns()
    for model in "abcd":
        turns.add(model)
    served = {model: 0 for model in "bcd"}
    for _ in range(12):
        ready = {"a"} | data.draw(st.sets(st.sampled_from("bcd")))
        chosen = turns.ready(ready)[0]
        turns.take(chosen)
        if chosen == "a":
            served = dict.fromkeys("bcd", 0)
        else:
            served[chosen] += 1
        assert max(served.values()) <= 1
    turns.remove("a")
    assert "a" not in turns.ready(set("abcd"))
