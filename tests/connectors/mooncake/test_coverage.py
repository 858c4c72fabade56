"""Coverage: which destination blocks are whole, whoever brought their parts."""

from kvreplay.connectors.mooncake.coverage import Coverage


def coverage(*wanted: list[int], block_bytes: int = 100, ratio: int = 1) -> Coverage:
    return Coverage(wanted, [block_bytes] * len(wanted), [ratio] * len(wanted))


def test_nothing_is_there_at_first() -> None:
    assert coverage([4, 5], [7]).missing_blocks() == [4, 5, 7]


def test_halves_make_a_whole() -> None:
    half = coverage([4, 5, 6])
    half.add(0, [4, 5, 6], 50)
    assert half.missing_blocks() == [4, 5, 6]
    half.add(0, [4, 5, 6], 50)
    assert half.missing_blocks() == []


def test_a_block_that_one_peer_left_out_is_missing() -> None:
    half = coverage([4, 5, 6])
    half.add(0, [4, 5, 6], 50)
    half.add(0, [4, 6], 50)
    assert half.missing_blocks() == [5]


def test_groups_are_counted_apart() -> None:
    both = coverage([4, 5], [4])
    both.add(0, [4, 5], 100)
    assert both.missing_blocks() == [4]


def test_null_blocks_are_not_waited_for() -> None:
    states = coverage([0, 0, 7])
    assert states.missing_blocks() == [7]
    states.add(0, [7], 100)
    assert states.missing_blocks() == []


def test_a_block_is_whole_when_all_blocks_of_the_kernel_are() -> None:
    cut = coverage([2, 3], ratio=2)
    cut.add(0, [4, 5, 6], 50)
    assert cut.missing_blocks() == [3]
    cut.add(0, [7], 50)
    assert cut.missing_blocks() == []


def test_a_part_of_a_write_is_new_once() -> None:
    parts = coverage([4])
    assert parts.is_new(("pull", 0, 2))
    assert not parts.is_new(("pull", 0, 2))
    assert parts.is_new(("pull", 0, 3))
    assert parts.is_new(("pull", 1, 2))
