"""A circular buffer holds what is not compressed yet: no prefix hit needs it, and a load has to bring it.

A ring of 8 tokens beside full attention: hits end on multiples of 8, where nothing is open.
"""

import pytest

from kvreplay.engine.worker import WorkerModel
from kvreplay.kv.memory import Provenance
from kvreplay.kv.prefix_cache import BlockIds
from kvreplay.kv.specs import CIRCULAR_BUFFER, KVCacheGroupSpec
from kvreplay.replay.config import ReplayConfig
from tests.scenarios.hybrid_worlds import with_groups
from tests.scenarios.stage import BLOCK, Check, Play, Sizes, pair, play, request, workload

RING = 1
GROUPS = (
    KVCacheGroupSpec(block_size=BLOCK, bytes_per_token=8),
    KVCacheGroupSpec(kind=CIRCULAR_BUFFER, block_size=8, bytes_per_token=4),
)
SMALL = (
    KVCacheGroupSpec(block_size=8, bytes_per_token=4),
    KVCacheGroupSpec(kind=CIRCULAR_BUFFER, block_size=4, bytes_per_token=8),
)
"""Hits end on multiples of 8: more may be open than the ring has room for."""
ONE_RANK: tuple[Sizes, Sizes] = ((1, 1), (1, 1))
REAL = ("vllm-0.33", "vllm-2026-08", "pre-50984", "post-50984", "pre-50388", "post-50388")
GARBAGE = f"mooncake.engine-corrupt:group={RING},blocks=1"
LEFT_OUT = "mooncake.engine-partial:share=0.99"
"""The last block of a write does not come, and that is the ring."""


def rings(*, ranks: tuple[Sizes, Sizes] = ONE_RANK, check: Check = "on") -> ReplayConfig:
    return with_groups(pair(ranks=ranks, check=check), GROUPS)


def contents(played: Play) -> list[tuple[str | None, int | None, str | None]]:
    assert {event.status for event in played.violations} <= {"CONTENT"}
    return [(event.request_id, event.group, event.cause) for event in played.violations]


@pytest.mark.parametrize("prompt_tokens", [*range(1, 10), 16, 17, 23, 24, 25, 30])
@pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
@pytest.mark.parametrize("groups", [GROUPS, SMALL], ids=["as large as a hit's unit", "smaller"])
def test_a_good_pull_brings_the_ring(groups: tuple[KVCacheGroupSpec, ...], behaviour: str, prompt_tokens: int) -> None:
    config = with_groups(pair(), groups)
    played = play(config, workload(request("a", prompt_tokens=prompt_tokens)), behaviour=behaviour)
    assert played.violations == []
    assert played.ends()["a"][0] == "finished"


@pytest.mark.parametrize("ranks", [ONE_RANK, ((4, 1), (2, 1)), ((1, 2), (1, 1))], ids=str)
@pytest.mark.parametrize("behaviour", REAL)
def test_garbage_in_the_ring_is_read_by_the_first_token_that_is_computed(
    behaviour: str, ranks: tuple[Sizes, Sizes]
) -> None:
    """23 tokens are brought, the last one is computed again: tokens 16 to 21 are open then."""
    played = play(rings(ranks=ranks), workload(request("a", prompt_tokens=23)), GARBAGE, behaviour=behaviour)
    assert contents(played) == [("a", RING, "read wrong contents from position 16 on, brought by xfer-a for a")]
    clean = play(rings(ranks=ranks), workload(request("a", prompt_tokens=23)), behaviour=behaviour)
    hashes = [[event.output_hash for event in run.of("request.finished", instance="D0")] for run in (played, clean)]
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize("behaviour", REAL)
def test_a_ring_that_is_left_out_is_found(behaviour: str) -> None:
    played = play(rings(), workload(request("a", prompt_tokens=23)), LEFT_OUT, behaviour=behaviour)
    assert contents(played) == [("a", RING, "read wrong contents from position 16 on")]


@pytest.mark.parametrize("fault", [GARBAGE, LEFT_OUT])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("prompt_tokens", [7, 17, 23, 24, 25])
def test_ideally_nobody_reads_it(fault: str, prompt_tokens: int, recompute: bool) -> None:
    clients = workload(request("a", prompt_tokens=prompt_tokens), request("b", 200, prompt_tokens=prompt_tokens))
    played = play(rings(), clients, f"{fault},request=a", behaviour="ideal", recompute=recompute)
    assert played.violations == []
    ends = {name: end[0] for name, end in played.ends().items()}
    assert ends == {"a": "finished" if recompute else "failed", "b": "finished"}


@pytest.mark.parametrize(("prompt_tokens", "is_read"), [(16, True), (17, False), (18, True), (24, True), (25, False)])
def test_what_is_compressed_already_is_not_read(prompt_tokens: int, is_read: bool) -> None:
    """The last of 17 tokens is computed again: 16 are compressed, and what the ring still has of them is dead."""
    played = play(rings(), workload(request("a", prompt_tokens=prompt_tokens)), GARBAGE)
    assert bool(contents(played)) == is_read


def test_a_prefix_hit_needs_no_ring() -> None:
    """b comes after a, and a's ring is gone: what b hits of D's cache it goes on from, the rest is pulled."""
    clients = workload(
        request("a", prompt_tokens=23, text="abcdef"), request("b", 200, prompt_tokens=30, text="abcdefgh")
    )
    played = play(rings(), clients)
    assert played.violations == []
    assert [event.num_tokens for event in played.of("load.started", instance="D0", request_id="b")] == [14]
    spoiled = play(rings(), clients, f"{GARBAGE},request=b")
    assert contents(spoiled) == [("b", RING, "read wrong contents from position 24 on, brought by xfer-b for b")]


def test_a_ring_is_being_loaded_wherever_the_load_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a local hit, too, its one block lands where it is waited for."""
    late: list[list[int]] = []
    note_landing = WorkerModel.note_landing

    def spy(model: WorkerModel, group: int, ids: BlockIds, *, provenance: Provenance | None) -> list[int]:
        late.append(note_landing(model, group, ids, provenance=provenance))
        return late[-1]

    monkeypatch.setattr(WorkerModel, "note_landing", spy)
    clients = workload(
        request("a", prompt_tokens=23, text="abcdef"), request("b", 200, prompt_tokens=30, text="abcdefgh")
    )
    play(rings(), clients)
    assert len(late) == 4
    assert late == [[]] * 4


@pytest.mark.parametrize("fault", [GARBAGE, LEFT_OUT])
def test_looking_at_every_read_finds_the_same(fault: str) -> None:
    clients = workload(*(request(f"r{tokens}", tokens * 30, prompt_tokens=tokens) for tokens in range(14, 26)))
    found = [contents(play(rings(check=check), clients, fault)) for check in ("on", "every-read")]
    assert found[0] == found[1]
    assert len(found[0]) == 10
