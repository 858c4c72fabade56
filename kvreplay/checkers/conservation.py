"""CONSERVATION: every block is free or held, once. Recounted from scratch, trusting no counter."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvreplay.checkers.finding import CONSERVATION, NULL_BLOCK, Finding
from kvreplay.ids import NULL_BLOCK_ID, plural
from kvreplay.kv.cache_manager import KVCacheManager
from kvreplay.kv.prefix_cache import NO_KEY

MAX_FINDINGS_PER_LAW: Final = 5
"""A pool that has come apart breaks a law at thousands of blocks; the first few say what happened."""

IdArray = NDArray[np.integer]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSnapshot:
    """One block pool at one moment. Taken while the instance idles, never in the middle of a step."""

    num_blocks: int
    """All of the pool, null block included; ids are 0 … num_blocks - 1."""
    free_ids: IdArray
    """The free queue, next to be given first."""
    ref_counts: IdArray
    keys: IdArray
    """The prefix-cache key that each block holds, or `NO_KEY`."""
    first_blocks: IdArray
    """The prefix cache: key → the block that a lookup finds, 0 for none."""
    num_cached_keys: int | None = None
    """Those that have a block, by the cache's own account; None: nobody has counted."""
    more_keys: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Block → keys that it holds beside the one in `keys`: prefixes that end inside it."""
    tables: Sequence[tuple[str, IdArray]]
    """Every holder with its blocks, one reference each: requests that run or are parked, and finished ones
    whose blocks a transfer still pins. Null blocks in a table count for nothing."""


def snapshot_of(kv: KVCacheManager) -> PoolSnapshot:
    """The pool and tables of an instance as they are now: views, not copies, so check before anything moves."""
    pool = kv.pool
    return PoolSnapshot(
        num_blocks=pool.num_blocks,
        free_ids=pool.free_queue(),
        ref_counts=pool.ref_counts,
        keys=pool.keys,
        first_blocks=pool._first,  # a recount looks inside on purpose
        num_cached_keys=pool.num_cached_keys,
        more_keys=pool._more_keys,
        tables=[(name, table.ids) for manager in kv.managers for name, table in manager.tables.items()],
    )


def check_conservation(
    snapshot: PoolSnapshot, instance: str, time_ns: int, *, whole_cache: bool = True
) -> list[Finding]:
    """Recount `snapshot`; no findings if every law holds.

    `whole_cache` also looks for keys in the cache that no block holds.
    """
    held = _references(snapshot)
    laws = (
        (CONSERVATION, _check_references(snapshot, held)),
        (CONSERVATION, _check_free_queue(snapshot, held)),
        (CONSERVATION, _check_cache(snapshot, whole=whole_cache)),
        (NULL_BLOCK, _check_null(snapshot)),
    )
    return [
        Finding(checker, time_ns, detail, instance=instance, block_id=block_id)
        for checker, breaches in laws
        for block_id, detail in breaches
    ]


def check_drained(snapshot: PoolSnapshot, instance: str, time_ns: int) -> list[Finding]:
    """After healing and with nothing left to run, nobody holds a block.

    What a request that is proven stalled holds is reported too: the verdict attaches that to its stall.
    """
    found: list[Finding] = []
    for request_id, block_ids in snapshot.tables:
        held = block_ids[block_ids != NULL_BLOCK_ID]
        if held.size:
            detail = f"{plural(held.size, 'block')} still held at the end"
            first = int(held[0])
            found.append(Finding(CONSERVATION, time_ns, detail, instance, request_id, block_id=first))
    return found


_Breaches = Iterator[tuple[int | None, str]]


def _references(snapshot: PoolSnapshot) -> NDArray[np.int64]:
    """How many tables hold each block. An id outside the pool counts nowhere: its own law reports it."""
    ids = [block_ids for _, block_ids in snapshot.tables]
    flat = np.concatenate(ids).astype(np.int64) if ids else np.zeros(0, np.int64)
    inside = flat[(flat >= 0) & (flat < snapshot.num_blocks)]
    counts = np.bincount(inside, minlength=snapshot.num_blocks).astype(np.int64)
    counts[NULL_BLOCK_ID] = 0
    return counts


def _check_references(snapshot: PoolSnapshot, held: NDArray[np.int64]) -> _Breaches:
    for request_id, block_ids in snapshot.tables:
        outside = block_ids[(block_ids < 0) | (block_ids >= snapshot.num_blocks)]
        if outside.size:
            yield int(outside[0]), f"{request_id} holds a block that the pool does not have"
    wrong = np.flatnonzero(snapshot.ref_counts[: snapshot.num_blocks] != held)
    for block_id in wrong[wrong != NULL_BLOCK_ID][:MAX_FINDINGS_PER_LAW].tolist():
        counted = int(snapshot.ref_counts[block_id])
        yield block_id, f"reference count {counted}, but {int(held[block_id])} tables hold it"


def _check_free_queue(snapshot: PoolSnapshot, held: NDArray[np.int64]) -> _Breaches:
    """The free queue has exactly the blocks that nobody holds, each once."""
    free = snapshot.free_ids.astype(np.int64)
    inside = free[(free > NULL_BLOCK_ID) & (free < snapshot.num_blocks)]
    times = np.bincount(inside, minlength=snapshot.num_blocks)
    expected = (held == 0).astype(np.int64)
    expected[NULL_BLOCK_ID] = 0
    for block_id in np.flatnonzero(times != expected)[:MAX_FINDINGS_PER_LAW].tolist():
        holders = int(held[block_id])
        yield block_id, f"{int(times[block_id])} times in the free queue, and {holders} tables hold it"
    strange = free[(free < 0) | (free >= snapshot.num_blocks)]
    for block_id in strange[:MAX_FINDINGS_PER_LAW].tolist():
        yield block_id, "in the free queue, but the pool does not have it"
    num_held = int(np.count_nonzero(held))
    if free.size + num_held != snapshot.num_blocks - 1:
        yield None, f"{free.size:,} free + {num_held:,} held is not {snapshot.num_blocks - 1:,}"


def _check_cache(snapshot: PoolSnapshot, *, whole: bool) -> _Breaches:
    """Each key names a block that holds it, and each key that a block holds can be found."""
    keys, first_blocks = snapshot.keys[: snapshot.num_blocks], snapshot.first_blocks
    holding = np.flatnonzero(keys != NO_KEY)
    held_keys = keys[holding]
    inside = held_keys < first_blocks.size
    found = first_blocks[held_keys[inside]]
    known = held_keys[inside][found != NULL_BLOCK_ID]
    # A look at the keys of the whole workload, most of them never used here, takes longer than all other laws: only
    # where the cache knows of more than blocks hold. Of those that hold one key it names one.
    if whole and snapshot.num_cached_keys != np.count_nonzero(found == holding[inside]):
        known = np.flatnonzero(first_blocks)
    named = first_blocks[known]
    holds = (named > 0) & (named < snapshot.num_blocks)
    holds[holds] = keys[named[holds]] == known[holds]
    unheld = [key for key in known[~holds].tolist() if key not in snapshot.more_keys.get(int(first_blocks[key]), ())]
    for key in unheld[:MAX_FINDINGS_PER_LAW]:
        yield int(first_blocks[key]), f"the cache names it for key {key}, which it does not hold"
    lost = ~inside
    lost[inside] = found == NULL_BLOCK_ID
    for block_id in holding[lost][:MAX_FINDINGS_PER_LAW].tolist():
        yield block_id, f"holds key {int(keys[block_id])}, which the cache does not know"
    more = [(block_id, key) for block_id, others in snapshot.more_keys.items() for key in others]
    lost_too = [(block_id, key) for block_id, key in more if key >= first_blocks.size or not first_blocks[key]]
    for block_id, key in lost_too[:MAX_FINDINGS_PER_LAW]:
        yield block_id, f"holds key {key}, which the cache does not know"


def _check_null(snapshot: PoolSnapshot) -> _Breaches:
    if np.any(snapshot.free_ids == NULL_BLOCK_ID):
        yield NULL_BLOCK_ID, "the null block is in the free queue"
    if snapshot.keys[NULL_BLOCK_ID] != NO_KEY:
        yield NULL_BLOCK_ID, "the null block holds a prefix-cache key"
