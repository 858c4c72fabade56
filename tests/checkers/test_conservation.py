"""CONSERVATION: snapshots of sound pools pass, and any single damage is seen."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreplay.checkers.conservation import (
    MAX_FINDINGS_PER_LAW,
    PoolSnapshot,
    check_conservation,
    check_drained,
    snapshot_of,
)
from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.cache_manager import KVCacheManager, Slots
from kvreplay.kv.prefix_cache import NO_KEY
from kvreplay.kv.specs import KVCacheGroupSpec


def snapshot(num_blocks: int = 6) -> PoolSnapshot:
    """r1 holds 1 and 2, r2 holds 2; 1 and 4 are cached under keys 0 and 2."""
    return PoolSnapshot(
        num_blocks=num_blocks,
        free_ids=np.array([3, 5, 4]),
        ref_counts=np.array([0, 1, 2, 0, 0, 0]),
        keys=np.array([NO_KEY, 0, NO_KEY, NO_KEY, 2, NO_KEY]),
        first_blocks=np.array([1, 0, 4]),
        tables=[("r1", np.array([1, 0, 2])), ("r2", np.array([2]))],
    )


def said(broken: PoolSnapshot) -> list[str]:
    return [f"{finding.block_id}: {finding.detail}" for finding in check_conservation(broken, "D0", 5)]


def test_a_sound_pool_passes() -> None:
    assert said(snapshot()) == []


def test_a_leaked_block_is_in_no_table_and_not_free() -> None:
    assert said(replace(snapshot(), free_ids=np.array([3, 5]))) == [
        "4: 0 times in the free queue, and 0 tables hold it",
        "None: 2 free + 2 held is not 5",
    ]


def test_a_block_freed_twice_is_in_the_queue_twice() -> None:
    assert "5: 2 times in the free queue, and 0 tables hold it" in said(
        replace(snapshot(), free_ids=np.array([3, 5, 4, 5]))
    )


def test_a_block_freed_while_held_is_seen_from_both_sides() -> None:
    broken = replace(snapshot(), free_ids=np.array([3, 5, 4, 1]), ref_counts=np.array([0, 0, 2, 0, 0, 0]))
    assert said(broken)[:2] == [
        "1: reference count 0, but 1 tables hold it",
        "1: 1 times in the free queue, and 1 tables hold it",
    ]


@pytest.mark.parametrize(
    ("first_blocks", "detail"),
    [
        ([1, 0, 5], "5: the cache names it for key 2, which it does not hold"),
        ([1, 0, 99], "99: the cache names it for key 2, which it does not hold"),
        ([1, 0, 0], "4: holds key 2, which the cache does not know"),
        ([1], "4: holds key 2, which the cache does not know"),
    ],
)
def test_the_cache_and_the_blocks_agree(first_blocks: list[int], detail: str) -> None:
    assert detail in said(replace(snapshot(), first_blocks=np.array(first_blocks)))


@pytest.mark.parametrize("table", [[1, 2, 6], [1, 2, -1]])
def test_an_id_outside_the_pool_is_reported_not_followed(table: list[int]) -> None:
    broken = replace(snapshot(), tables=[("r1", np.array(table)), ("r2", np.array([2]))])
    assert said(broken) == [f"{table[-1]}: r1 holds a block that the pool does not have"]


def test_the_null_block_is_never_free_nor_cached() -> None:
    sound = snapshot()
    keys = sound.keys.copy()
    keys[0] = 1
    broken = replace(sound, free_ids=np.array([3, 5, 4, 0]), keys=keys, first_blocks=np.array([1, 0, 4]))
    found = check_conservation(broken, "D0", 5)
    assert [finding.detail for finding in found if finding.checker == "NULL-BLOCK"] == [
        "the null block is in the free queue",
        "the null block holds a prefix-cache key",
    ]


def test_a_pool_that_has_come_apart_is_reported_briefly() -> None:
    count = 1000
    broken = PoolSnapshot(
        num_blocks=count,
        free_ids=np.zeros(0, np.int32),
        ref_counts=np.ones(count, np.int32),
        keys=np.arange(count) - 1,
        first_blocks=np.zeros(count, np.int32),
        tables=[],
    )
    assert len(check_conservation(broken, "D0", 5)) <= 4 * MAX_FINDINGS_PER_LAW


def test_after_the_end_every_holder_is_named() -> None:
    found = check_drained(snapshot(), "D0", 5)
    assert [(finding.request_id, finding.block_id, finding.detail) for finding in found] == [
        ("r1", 1, "2 blocks still held at the end"),
        ("r2", 2, "1 block still held at the end"),
    ]
    assert not check_drained(replace(snapshot(), tables=[("r1", np.array([0, 0]))]), "D0", 5)


@st.composite
def sound_snapshots(draw: st.DrawFn) -> PoolSnapshot:
    """Any tables over any pool, with the rest of the pool as it must then be."""
    num_blocks = draw(st.integers(3, 20))
    usable = st.integers(1, num_blocks - 1)
    tables = draw(st.lists(st.lists(usable, unique=True, max_size=6), max_size=5))
    ref_counts = np.zeros(num_blocks, np.int32)
    for table in tables:
        ref_counts[table] += 1
    free = [block_id for block_id in range(1, num_blocks) if not ref_counts[block_id]]
    keys = np.full(num_blocks, NO_KEY)
    cached = draw(st.dictionaries(usable, st.integers(0, 8)))
    first_blocks = np.zeros(9, np.int32)
    for block_id, key in cached.items():
        keys[block_id] = key
        first_blocks[key] = first_blocks[key] or block_id
    return PoolSnapshot(
        num_blocks=num_blocks,
        free_ids=np.array(draw(st.permutations(free)), np.int32),
        ref_counts=ref_counts,
        keys=keys,
        first_blocks=first_blocks,
        tables=[(f"r{index}", np.array([*table, 0], np.int32)) for index, table in enumerate(tables)],
    )


@given(sound_snapshots())
def test_any_sound_pool_passes(sound: PoolSnapshot) -> None:
    assert said(sound) == []


def lose_a_free_block(sound: PoolSnapshot, block_id: int) -> PoolSnapshot:
    return replace(sound, free_ids=sound.free_ids[sound.free_ids != block_id])


def free_once_more(sound: PoolSnapshot, block_id: int) -> PoolSnapshot:
    return replace(sound, free_ids=np.append(sound.free_ids, block_id))


def count_once_more(sound: PoolSnapshot, block_id: int) -> PoolSnapshot:
    counts = sound.ref_counts.copy()
    counts[block_id] += 1
    return replace(sound, ref_counts=counts)


def hold_once_more(sound: PoolSnapshot, block_id: int) -> PoolSnapshot:
    return replace(sound, tables=[*sound.tables, ("other", np.array([block_id]))])


def forget_a_key(sound: PoolSnapshot, block_id: int) -> PoolSnapshot:
    keys = sound.keys.copy()
    keys[sound.first_blocks[sound.keys[block_id]]] = NO_KEY
    return replace(sound, keys=keys) if sound.keys[block_id] != NO_KEY else count_once_more(sound, block_id)


@given(
    sound_snapshots(),
    st.sampled_from([free_once_more, count_once_more, hold_once_more, forget_a_key, lose_a_free_block]),
    st.data(),
)
def test_any_single_damage_is_seen(
    sound: PoolSnapshot, damage: Callable[[PoolSnapshot, int], PoolSnapshot], data: st.DataObject
) -> None:
    block_id = data.draw(st.integers(1, sound.num_blocks - 1))
    if damage is lose_a_free_block and block_id not in sound.free_ids:
        damage = free_once_more
    assert check_conservation(damage(sound, block_id), "D0", 5)


def test_a_real_pool_is_sound_at_every_turn() -> None:
    pool = BlockPool(16, 8)
    kv = KVCacheManager([KVCacheGroupSpec(block_size=4)], pool, max_model_len=64, max_in_flight_tokens=64)
    assert check_conservation(snapshot_of(kv), "D0", 0) == []
    kv.allocate_slots("r1", Slots(num_computed_tokens=0, num_tokens=20, num_new_tokens=20))
    pool.cache(kv.block_arrays("r1")[0][:3], np.arange(3))
    assert check_conservation(snapshot_of(kv), "D0", 1) == []
    assert [finding.request_id for finding in check_drained(snapshot_of(kv), "D0", 1)] == ["r1"]
    kv.free("r1")
    assert check_conservation(snapshot_of(kv), "D0", 2) == check_drained(snapshot_of(kv), "D0", 2) == []
