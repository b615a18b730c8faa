"""The channels of a rank's lanes."""

from functools import partial

import pytest

from crosspool.cluster import messages
from crosspool.scheduler.step import epoch
from tests.support.rank_rig import KVRig


@pytest.fixture
def make_rig(tmp_path):
    return partial(KVRig, tmp_path / "m")


def test_a_lane_without_channels_is_named(make_rig):
    rig = make_rig(num_lanes=1)
    rig.step(5)
    (ended,) = rig.said
    assert ended.fatal
    assert ended.error == "kv0: ValueError: lane 5 has no channels for m to w0"
    rig.loop.handle(messages.CloseChannels("w0"))
    rig.step(0)
    assert "no channels" in rig.said[-1].error


def test_channels_made_anew_are_those_of_the_next_step(make_rig):
    rig = make_rig()
    rig.step(0)
    rig.spin()
    rig.open(0, "w0")
    rig.step(0, step_seq=2)
    rig.spin()
    assert rig.into[0, "w0"].arrived(epoch(2, 0))
