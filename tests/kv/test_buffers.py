"""KVBuffers: what a block holds, who is to blame for it, and that a wrong read makes wrong words."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvreplay.kv.buffers import KVBuffers
from kvreplay.kv.content_index import TokenContent, TokenIndex
from kvreplay.kv.memory import Provenance

BLOCK = 4
LENGTH = 40
CULPRIT = Provenance("xfer-r", "r", "corrupt", 7)


def content(*prompt: int) -> TokenContent:
    return TokenIndex(BLOCK).content(prompt or range(LENGTH))


def table(*block_ids: int) -> NDArray[np.int64]:
    return np.array(block_ids, np.int64)


def wrong(buffers: KVBuffers, ids: NDArray[np.int64], text: TokenContent, start: int, end: int) -> list[int]:
    positions = buffers.wrong_positions(ids, text, 0, start, end)
    return [] if positions is None else positions.tolist()


@pytest.fixture
def buffers() -> KVBuffers:
    return KVBuffers(12, BLOCK)


TEXT = content()
IDS = table(7, 2, 9, 4, 1, 3, 5, 6, 8, 10)


class TestWords:
    def test_fresh_memory_is_nobodys_contents(self, buffers: KVBuffers) -> None:
        assert wrong(buffers, IDS, TEXT, 0, 6) == [0, 1, 2, 3, 4, 5]

    @given(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    def test_written_in_any_pieces_a_prompt_reads_right_and_nothing_else_is_touched(self, pieces: list[int]) -> None:
        buffers = KVBuffers(12, BLOCK)
        buffers.words[11] = 99
        end = 0
        for piece in pieces:
            start, end = end, min(end + piece, LENGTH)
            if start < end:
                buffers.write(IDS, TEXT, 0, start, end)
        assert wrong(buffers, IDS, TEXT, 0, end) == []
        assert wrong(buffers, IDS, TEXT, 0, LENGTH) == list(range(end, LENGTH))
        assert buffers.words[0].tolist() == [0] * BLOCK
        assert buffers.words[11].tolist() == [99] * BLOCK

    @given(st.integers(0, LENGTH - 1), st.integers(1, LENGTH))
    def test_any_stretch_can_be_verified(self, start: int, length: int) -> None:
        buffers = KVBuffers(12, BLOCK)
        buffers.write(IDS, TEXT, 0, 0, LENGTH)
        end = min(start + length, LENGTH)
        assert wrong(buffers, IDS, TEXT, start, end) == []
        buffers.words[IDS[start // BLOCK], start % BLOCK] ^= np.uint64(1)
        assert wrong(buffers, IDS, TEXT, start, end) == [start]
        assert wrong(buffers, IDS, TEXT, start + 1, end) == [] if start + 1 < end else True

    def test_the_same_tokens_after_another_prefix_are_other_contents(self, buffers: KVBuffers) -> None:
        buffers.write(IDS, content(1, 2, 3, 4, 5, 6, 7, 8), 0, 0, 8)
        assert wrong(buffers, IDS, content(9, 2, 3, 4, 5, 6, 7, 8), 0, 8) == list(range(8))
        assert wrong(buffers, IDS, content(1, 2, 3, 4, 5, 6, 7, 9), 0, 8) == [7]

    def test_groups_hold_different_words_for_one_token(self, buffers: KVBuffers) -> None:
        buffers.write(IDS, TEXT, 1, 0, 8)
        assert buffers.wrong_positions(IDS, TEXT, 1, 0, 8) is None
        assert wrong(buffers, IDS, TEXT, 0, 8) == list(range(8))

    def test_the_tensor_shares_its_memory(self, buffers: KVBuffers) -> None:
        buffers.write(IDS, TEXT, 0, 0, 4)
        assert buffers.tensor.shape == (12, BLOCK)
        assert buffers.tensor[7].numpy().view(np.uint64).tolist() == TEXT.fingerprints(0, 4).tolist()


class TestTaint:
    def test_who_read_wrong_words_writes_wrong_words(self, buffers: KVBuffers) -> None:
        buffers.write(IDS, TEXT, 0, 0, 6, taint=5)
        assert wrong(buffers, IDS, TEXT, 0, 6) == list(range(6))

    def test_other_taints_other_words(self, buffers: KVBuffers) -> None:
        written = []
        for taint in (1, 2, 3, 1):
            buffers.write(IDS, TEXT, 0, 0, 4, taint=taint)
            written.append(tuple(buffers.words[7].tolist()))
        assert len(set(written)) == 3
        assert written[0] == written[3]

    def test_a_taint_depends_on_what_is_wrong_and_where(self, buffers: KVBuffers) -> None:
        buffers.words[7] = [1 << 40, 2 << 40, 1 << 40, 2 << 40]
        taints = {buffers.taint_of(IDS, np.array(positions)) for positions in ([0], [1], [2], [0, 1], [2, 3])}
        assert len(taints) == 5
        assert all(taint % 2 for taint in taints), "never 0, which means none"


class TestTransfers:
    def test_whole_blocks_are_read_as_a_copy(self, buffers: KVBuffers) -> None:
        buffers.write(IDS, TEXT, 0, 0, 8)
        copy = buffers.read_blocks(0, [2, 7])
        buffers.words[:] = 0
        assert copy.tolist() == [TEXT.fingerprints(4, 8).tolist(), TEXT.fingerprints(0, 4).tolist()]

    def test_blocks_arrive_where_they_are_sent(self, buffers: KVBuffers) -> None:
        source = KVBuffers(12, BLOCK)
        source.write(IDS, TEXT, 0, 0, 8)
        buffers.write_blocks(0, [3, 6], source.read_blocks(0, [7, 2]))
        assert wrong(buffers, table(3, 6), TEXT, 0, 8) == []

    def test_no_blocks_are_no_harm(self, buffers: KVBuffers) -> None:
        assert buffers.read_blocks(0, []).shape == (0, BLOCK)
        buffers.write_blocks(0, [], np.empty((0, BLOCK), np.uint64))
        assert not buffers.words.any()

    def test_words_of_any_layout_can_be_written(self, buffers: KVBuffers) -> None:
        words = np.arange(8, dtype=np.uint64).reshape(BLOCK, 2).T
        buffers.write_blocks(0, [3, 6], words)
        assert buffers.words[[3, 6]].tolist() == words.tolist()


class TestHistory:
    """Who is to blame for a block is known until somebody writes it anew."""

    @pytest.fixture
    def blamed(self, buffers: KVBuffers) -> KVBuffers:
        for block_id in (7, 2, 9):
            buffers.provenance[block_id] = CULPRIT
            buffers.origins[block_id] = 1
        return buffers

    @staticmethod
    def still_blamed(buffers: KVBuffers) -> list[int]:
        assert set(buffers.provenance) == set(buffers.origins)
        return sorted(buffers.provenance)

    def test_computing_a_block_from_its_start_forgets_it(self, blamed: KVBuffers) -> None:
        blamed.write(IDS, TEXT, 0, 0, 6)
        assert self.still_blamed(blamed) == [9]

    def test_a_block_that_is_only_written_on_keeps_it(self, blamed: KVBuffers) -> None:
        blamed.write(IDS, TEXT, 0, 1, 4)
        assert self.still_blamed(blamed) == [2, 7, 9]
        blamed.write(IDS, TEXT, 0, 6, 12)
        assert self.still_blamed(blamed) == [2, 7]

    def test_a_transfer_forgets_it(self, blamed: KVBuffers) -> None:
        blamed.write_blocks(0, [2, 9], np.zeros((2, BLOCK), np.uint64))
        assert self.still_blamed(blamed) == [7]

    def test_wrong_or_right_makes_no_difference(self, blamed: KVBuffers) -> None:
        blamed.write(IDS, TEXT, 0, 0, 4, taint=3)
        assert self.still_blamed(blamed) == [2, 9]
