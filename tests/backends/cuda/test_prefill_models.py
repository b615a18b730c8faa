"""Models that take turns on a prefill rank: what copies and chunks still use is neither freed nor given away."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from crosspool.backends.cuda.chunks import chunk_warm_up  # noqa: E402
from crosspool.backends.cuda.loading.streaming import stream_share  # noqa: E402
from crosspool.backends.cuda.loading.weights import pack_attention_weights  # noqa: E402
from crosspool.backends.cuda.prefill_rank import prefill_models  # noqa: E402
from crosspool.backends.cuda.prefill_rank.prefill_models import ModelsInTurn  # noqa: E402
from crosspool.kv_pool.geometry import PageGeometry  # noqa: E402
from crosspool.models.directory import read_model_dir  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402
from tests.support.tiny_models import write_tiny_model  # noqa: E402

pytestmark = pytest.mark.judge


class Copies:
    """A `Swapper` that notes what happens. beside: called while copies are enqueued."""

    def __init__(self, device) -> None:
        self.log, self.beside = [], lambda: None

    def bring(self, host, place):
        self.beside()
        self.log.append(f"bring {host.name}")
        return SimpleNamespace(name=host.name, seconds=lambda: None)

    def settle(self) -> None:
        self.log.append("settle")


@pytest.fixture
def rank(monkeypatch):
    """(models in turn with 100 bytes of room, the log of their copies)."""
    monkeypatch.setattr(prefill_models, "Swapper", Copies)
    return ModelsInTurn(SimpleNamespace(rank="p0", device=torch.device("cpu")), 100)


def model(rank, name, num_bytes=60):
    blob = SimpleNamespace(close=lambda: rank._swapper.log.append(f"unpin {name}"))
    return SimpleNamespace(host=SimpleNamespace(name=name, num_bytes=num_bytes, blob=blob))


def lane(*, is_drained=True):
    return SimpleNamespace(memory=SimpleNamespace(is_drained=is_drained))


def load(rank, name, num_bytes=60):
    assert rank.make_room(name, num_bytes)
    rank.add(name, model(rank, name, num_bytes))


def test_a_model_is_unpinned_behind_its_copies_also_where_another_has_its_place(rank):
    load(rank, "a")
    load(rank, "b")
    rank.bring_next("b")
    assert rank.places.models() == ("b",)
    rank.remove("a")
    assert rank._swapper.log == ["bring a", "bring b", "settle", "unpin a"]


def test_no_place_goes_while_a_model_is_brought_there(rank):
    load(rank, "a")
    load(rank, "b")
    made = []
    load_of_larger = threading.Thread(target=lambda: made.append(rank.make_room("larger", 90)))

    def beside():
        (place,) = rank.places._places
        load_of_larger.start()
        load_of_larger.join(0.1)
        assert rank.places._places == [place]

    rank._swapper.beside = beside
    rank.bring_next("b")
    load_of_larger.join(10)
    assert made == [True]
    assert [place.num_bytes for place in rank.places._places] == [90]


def test_what_a_chunk_uses_that_was_given_up_is_kept_until_it_has_ended(rank):
    class Chunk:
        """Something that a weak reference can point to."""

    load(rank, "a")
    own, chunks = lane(is_drained=False), [Chunk()]
    kept = weakref.ref(chunks[0])
    with rank.taken("a", own, lambda: chunks[0]):
        pass
    chunks.clear()
    rank.settle()
    assert kept() is not None
    assert not rank.make_room("larger", 90)
    own.memory.is_drained = True
    assert rank.make_room("larger", 90)
    assert kept() is None


def test_a_place_is_free_again_where_nothing_was_enqueued_or_all_has_ended(rank):
    load(rank, "a")
    with rank.taken("a", lane(is_drained=False), lambda: None):
        assert not rank.make_room("larger", 90)
    assert rank.make_room("larger", 90)


class Stream:
    """No GPU's."""

    def synchronize(self) -> None: ...


@pytest.mark.triton
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_a_model_warms_up_in_one_frame(family, tmp_path, monkeypatch):
    """Behind a model's frame 0 other models have a prompt's KV."""
    monkeypatch.setattr(chunk_warm_up, "PADDED_ROWS", (16,))
    monkeypatch.setattr(chunk_warm_up, "SPAN_SIZES", SimpleNamespace(rows=(16,), keys=(64,)))
    monkeypatch.setattr(chunk_warm_up, "_expand_all", lambda *_: None)  # writes to no frame
    directory = read_model_dir(write_tiny_model(tmp_path / "m", family, dtype="bfloat16", tokenizer=False))
    spec = directory.spec
    own, layers = stream_share(directory, "kv", torch.device("cpu"), lambda loaded, total: None)
    weights = pack_attention_weights(spec, own, iter(layers))
    width = spec.kv_elements_per_token_layer
    geometry = PageGeometry(
        num_layers=1,
        element_bytes=2,
        elements_per_token_layer=width,
        page_tokens=16,
        frame_bytes=2 * width * 16,
        model="m",
    )
    frames = torch.zeros(4, geometry.frame_bytes, dtype=torch.uint8)
    chunk_warm_up.warm_up_attention(EmulatedKernels(), spec, weights, frames[1:2], geometry, [Stream()])
    assert frames[1].any(), "what is warmed up writes slots"
    assert not frames[0].any()
    assert not frames[2:].any()
