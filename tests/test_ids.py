"""Units: how they are converted and counted."""

from kvreplay.ids import nanoseconds, plural


def test_seconds_become_the_nearest_whole_nanosecond() -> None:
    assert [nanoseconds(seconds) for seconds in (0, 480.0, 0.1, 1.0000000016)] == [
        0,
        480_000_000_000,
        100_000_000,
        1_000_000_002,
    ]


def test_plural() -> None:
    assert [plural(count, "block") for count in (0, 1, 1200)] == ["0 blocks", "1 block", "1,200 blocks"]
