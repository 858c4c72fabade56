"""WorkerModel: what a step reads before it writes."""

import numpy as np
import pytest

from kvreplay.engine.suspects import WrongBlock
from kvreplay.engine.worker import WorkerModel
from kvreplay.kv.buffers import KVBuffers
from kvreplay.kv.memory import Provenance
from kvreplay.kv.specs import CIRCULAR_BUFFER, FULL, MAMBA, KVCacheGroupSpec
from tests.engine.bench import Bench, load

RING = 1
GROUPS = (
    KVCacheGroupSpec(kind=FULL, block_size=4),
    KVCacheGroupSpec(kind=CIRCULAR_BUFFER, block_size=8),
)


def first_step_after_a_load(monkeypatch: pytest.MonkeyPatch, *, spoiled: list[int]) -> tuple[list[WrongBlock], int]:
    """What is found, and the ring's block.

    Of 26 tokens 14 come from outside, the ring with them, and the rest is computed in one step, which overwrites all
    of the ring. `spoiled`: positions whose words in the ring are wrong.
    """
    bench = Bench(groups=GROUPS, num_gpu_blocks=50, scripts={"r": load(14)})
    monkeypatch.setattr(bench.connector, "loads_every_group", lambda request_id: True)
    model = WorkerModel(bench.scheduler, KVBuffers(50, GROUPS))
    request = bench.add("r", 26)
    bench.schedule()
    tables = bench.kv.block_arrays("r")
    for group, table in enumerate(tables):
        model.buffers.write(table, request.content, group, 0, 14)
    (ring,) = tables[RING].tolist()
    for position in spoiled:
        model.buffers.words[ring, position % 8] = 0
    bench.update(finished=["r"])
    bench.schedule()
    out = bench.output
    assert out is not None
    assert [(share.start, share.end) for share in out.shares] == [(14, 26)]
    model.execute(out)
    return model.commit(out.step, ["r"], ()), ring


def test_a_ring_is_read_before_it_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_step_after_a_load(monkeypatch, spoiled=[])[0] == []
    found, ring = first_step_after_a_load(monkeypatch, spoiled=[9, 12])
    assert found == [WrongBlock(ring, RING, "r", 9, None)]


@pytest.mark.parametrize("position", [6, 7])
def test_of_a_ring_only_what_is_open_is_read(position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens up to 8 are compressed."""
    assert first_step_after_a_load(monkeypatch, spoiled=[position])[0] == []


def test_a_scheduler_tells_one_model_of_contents_only() -> None:
    """A second one would take the first one's place, and what is in its blocks would be taken for wrong."""
    bench = Bench(groups=GROUPS, num_gpu_blocks=50)
    WorkerModel(bench.scheduler, KVBuffers(50, GROUPS))
    with pytest.raises(AssertionError, match=r"^contents has a subscriber$"):
        WorkerModel(bench.scheduler, KVBuffers(50, GROUPS))


@pytest.mark.parametrize("loads_for", ["first", "second", "gone"])
def test_a_write_is_for_whom_it_says_if_it_holds_the_block(loads_for: str) -> None:
    """Another may have hit the block in the very step that loads it."""
    bench = Bench(num_gpu_blocks=50)
    model = WorkerModel(bench.scheduler, KVBuffers(50, bench.kv.groups))
    for name in ("first", "second"):
        bench.add(name, range(12))
        bench.schedule()
        bench.update()
    (shared, _, _, *_), (also, *_) = (bench.kv.block_arrays(name)[0].tolist() for name in ("first", "second"))
    assert shared == also
    words = model.read_blocks(0, [shared])
    model.write_blocks(0, [shared], words, provenance=Provenance("job 1", loads_for))
    assert [late.owner for late in model.late_writes] == ["first" if loads_for == "gone" else loads_for]


def test_a_load_that_lands_before_a_step_computes_does_not_let_members_write_its_states() -> None:
    groups = (
        KVCacheGroupSpec(kind=FULL, block_size=4),
        KVCacheGroupSpec(kind=MAMBA, block_size=4, mamba_cache_mode="align", state_bytes=32),
    )
    bench = Bench(groups=groups, num_gpu_blocks=50, use_lockstep=True)
    model = WorkerModel(bench.scheduler, KVBuffers(50, groups), every_read=True)
    bench.add("r", 9)
    for _ in range(6):
        bench.schedule()
        out = bench.output
        assert out is not None
        model.prepare(out)
        model.note_landing(0, np.array([40]), provenance=Provenance("job 1", "other"))
        model.execute(out)
        assert model.commit(out.step, ["r"], ()) == []
        bench.update()
    assert list(bench.scheduler.lockstep), "it would be no member otherwise"
