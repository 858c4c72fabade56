"""BlockRows: what each kind of group keeps in its blocks, over pages that all of them share."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvreplay.kv.buffers import KVBuffers
from kvreplay.kv.content_index import TokenContent, TokenIndex
from kvreplay.kv.memory import Provenance
from kvreplay.kv.specs import (
    CHUNKED_LOCAL,
    CIRCULAR_BUFFER,
    FULL,
    MAMBA,
    MAMBA_ALIGN,
    MLA,
    SLIDING_WINDOW,
    KVCacheGroupSpec,
)

GROUPS = (
    KVCacheGroupSpec(kind=FULL, block_size=8),
    KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=4, sliding_window=8),
    KVCacheGroupSpec(kind=MLA, block_size=8, tokens_per_state=4),
    KVCacheGroupSpec(kind=MAMBA, block_size=8, mamba_cache_mode=MAMBA_ALIGN),
    KVCacheGroupSpec(kind=CHUNKED_LOCAL, block_size=8, attention_chunk_size=16),
    KVCacheGroupSpec(kind=CIRCULAR_BUFFER, block_size=4),
)
FULL_GROUP, WINDOW, COMPRESSED, STATE, CHUNKED, SCRATCH = range(6)
LENGTH = 32
TEXT: TokenContent = TokenIndex(4).content(range(LENGTH))


def ids(*block_ids: int) -> NDArray[np.int64]:
    return np.array(block_ids, np.int64)


TABLES = {
    FULL_GROUP: ids(1, 2, 3, 4),
    WINDOW: ids(5, 6, 7, 8, 9, 10, 11, 12),
    COMPRESSED: ids(13, 14, 15, 16),
    STATE: ids(17, 18, 19, 20),
    CHUNKED: ids(21, 22, 23, 24),
    SCRATCH: ids(25),
}


@pytest.fixture
def buffers() -> KVBuffers:
    return KVBuffers(32, GROUPS)


def wrong(buffers: KVBuffers, group: int, start: int, end: int) -> list[int]:
    positions = buffers.wrong_positions(TABLES[group], TEXT, group, start, end)
    return [] if positions is None else positions.tolist()


@pytest.mark.parametrize("group", TABLES)
@settings(deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_written_in_any_pieces_a_prompt_reads_right(group: int, pieces: list[int]) -> None:
    buffers, end = KVBuffers(32, GROUPS), 0
    for piece in pieces:
        start, end = end, min(end + piece, LENGTH)
        if start < end:
            buffers.write(TABLES[group], TEXT, group, start, end)
            assert wrong(buffers, group, 0, end) == []


@pytest.mark.parametrize("group", TABLES)
def test_what_was_never_written_is_wrong(group: int, buffers: KVBuffers) -> None:
    assert wrong(buffers, group, 0, 8)


def test_pages_are_as_wide_as_the_widest_group(buffers: KVBuffers) -> None:
    assert buffers.tensor.shape == (32, 8)
    assert [buffers.read_blocks(group, [1]).shape[1] for group in TABLES] == [8, 4, 2, 1, 8, 4]


@pytest.mark.parametrize("group", TABLES)
def test_a_block_that_another_group_has_taken_is_wrong_for_this_one(group: int, buffers: KVBuffers) -> None:
    buffers.write(TABLES[group], TEXT, group, 0, 8)
    other = (group + 1) % len(TABLES)
    buffers.write(TABLES[group], TEXT, other, 0, 8)
    assert wrong(buffers, group, 0, 8)


class TestCompressed:
    def test_a_state_is_written_with_its_last_token(self, buffers: KVBuffers) -> None:
        table = TABLES[COMPRESSED]
        buffers.write(table, TEXT, COMPRESSED, 0, 3)
        assert not buffers.words.any()
        buffers.write(table, TEXT, COMPRESSED, 3, 4)
        assert buffers.words[13, 0] == buffers._expected(TEXT, COMPRESSED, 3, 4)[0]

    def test_a_state_that_is_not_complete_is_not_read(self, buffers: KVBuffers) -> None:
        buffers.write(TABLES[COMPRESSED], TEXT, COMPRESSED, 0, 8)
        assert wrong(buffers, COMPRESSED, 0, 11) == []
        assert wrong(buffers, COMPRESSED, 0, 12) == [8]


class TestStates:
    def test_only_the_state_after_the_last_token_is_kept(self, buffers: KVBuffers) -> None:
        buffers.write(ids(0, 18), TEXT, STATE, 0, 16)
        assert np.flatnonzero(buffers.words.any(axis=1)).tolist() == [18]
        assert buffers.wrong_positions(ids(0, 18), TEXT, STATE, 0, 16) is None

    def test_a_state_of_another_prefix_length_is_wrong_though_the_block_is_the_same(self, buffers: KVBuffers) -> None:
        buffers.write(TABLES[STATE], TEXT, STATE, 0, 6)
        assert wrong(buffers, STATE, 0, 6) == []
        assert wrong(buffers, STATE, 0, 5) == [4]
        assert wrong(buffers, STATE, 0, 7) == [6]


class TestScratch:
    def test_each_token_takes_the_place_of_an_earlier_one(self, buffers: KVBuffers) -> None:
        buffers.write(ids(25), TEXT, SCRATCH, 0, 10)
        expected = buffers._expected(TEXT, SCRATCH, 6, 10).tolist()
        assert buffers.read_blocks(SCRATCH, [25]).tolist() == [[*expected[2:], *expected[:2]]]

    def test_what_has_been_overwritten_is_not_looked_for(self, buffers: KVBuffers) -> None:
        buffers.write(ids(25), TEXT, SCRATCH, 0, 10)
        assert wrong(buffers, SCRATCH, 0, 10) == []
        assert wrong(buffers, SCRATCH, 8, 10) == []
        assert wrong(buffers, SCRATCH, 0, 9) == [5]

    def test_tokens_in_wrong_places_are_named(self, buffers: KVBuffers) -> None:
        buffers.write(ids(25), TEXT, SCRATCH, 0, 10)
        buffers.words[25, [0, 3]] += np.uint64(1)
        assert wrong(buffers, SCRATCH, 0, 10) == [7, 8]
        assert wrong(buffers, SCRATCH, 9, 10) == []
        places = buffers.rows_of(SCRATCH).places_of(np.array([7, 8], np.int64))
        assert places.tolist() == [0, 0], "one block has them all"
        assert buffers.taint_of(ids(25), np.array([7, 8], np.int64), SCRATCH) % 2 == 1


class TestNullBlock:
    @pytest.mark.parametrize(("group", "table"), [(WINDOW, ids(0, 6)), (STATE, ids(0)), (CHUNKED, ids(0))])
    def test_a_write_into_it_is_noticed(self, group: int, table: NDArray[np.int64], buffers: KVBuffers) -> None:
        assert buffers.write(table, TEXT, group, 0, 8)

    def test_null_blocks_before_what_is_written_are_none_of_it(self, buffers: KVBuffers) -> None:
        assert not buffers.write(ids(0, 0, 7), TEXT, WINDOW, 8, 12)
        assert not buffers.write(ids(0, 18), TEXT, STATE, 0, 12)
        assert not buffers.words[0].any()


class TestWholeBlocks:
    def test_a_transfer_brings_what_the_group_keeps(self, buffers: KVBuffers) -> None:
        for group, table in TABLES.items():
            buffers.write(table, TEXT, group, 0, 8)
        target = KVBuffers(32, GROUPS)
        for group, table in TABLES.items():
            target.write_blocks(group, table, buffers.read_blocks(group, table))
            assert wrong(target, group, 0, 8) == []

    def test_zeroed_blocks_hold_nothing(self, buffers: KVBuffers) -> None:
        buffers.write(TABLES[FULL_GROUP], TEXT, FULL_GROUP, 0, 16)
        buffers.zero([2])
        assert wrong(buffers, FULL_GROUP, 0, 16) == list(range(8, 16))

    def test_a_copy_is_as_right_and_as_wrong_as_its_source(self, buffers: KVBuffers) -> None:
        buffers.write(TABLES[STATE], TEXT, STATE, 0, 6)
        culprit = Provenance("xfer-r", "r")
        buffers.provenance[17] = culprit
        buffers.origins[17] = 1
        buffers.origins[30] = 2
        buffers.copy_block(17, 30)
        assert buffers.wrong_positions(ids(30), TEXT, STATE, 0, 6) is None
        assert (buffers.provenance[30], buffers.origins[30]) == (culprit, 1)
        buffers.copy_block(18, 30)
        assert 30 not in buffers.provenance
        assert 30 not in buffers.origins


def test_one_share_of_heads_has_other_words_than_the_next(buffers: KVBuffers) -> None:
    buffers.write(TABLES[WINDOW], TEXT, WINDOW + 1024, 0, 8)
    assert buffers.wrong_positions(TABLES[WINDOW], TEXT, WINDOW + 1024, 0, 8) is None
    assert wrong(buffers, WINDOW, 0, 8) == list(range(8))
