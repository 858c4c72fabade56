"""BlockTable: a list of block ids that grows."""

import numpy as np

from kvreplay.kv.block_table import UNTRACKED, BlockTable


def test_starts_empty_and_untracked() -> None:
    table = BlockTable()
    assert (len(table), table.ids.tolist(), table.num_cached) == (0, [], UNTRACKED)


def test_keeps_order_through_all_ways_to_grow() -> None:
    table = BlockTable(capacity=2)
    table.extend(np.array([3, 1], np.int64))
    table.append(9)
    table.extend_nulls(2)
    table.extend(np.arange(10, 30))
    table.append(5)
    assert table.ids.tolist() == [3, 1, 9, 0, 0, *range(10, 30), 5]
    assert len(table) == 26


def test_the_view_follows_when_the_array_moves() -> None:
    table = BlockTable(capacity=1)
    for block_id in range(1, 20):
        table.append(block_id)
        assert table.view[block_id - 1] == block_id
    table.view[0] = 7
    assert table.ids[0] == 7
