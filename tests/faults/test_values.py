"""Durations, probabilities, ordinals: read, refused, and written back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreplay.faults.values import (
    MAX_DURATION_NS,
    format_duration,
    format_float,
    format_ordinals,
    parse_duration,
    parse_integer,
    parse_ordinals,
    parse_probability,
    parse_share,
)


@pytest.mark.parametrize(
    ("text", "duration_ns"),
    [
        ("500ms", 500_000_000),
        ("2s", 2_000_000_000),
        ("1m", 60_000_000_000),
        ("1.5h", 5_400_000_000_000),
        ("0s", 0),
        ("7ns", 7),
        ("0.1us", 100),
    ],
)
def test_a_duration_has_a_unit(text: str, duration_ns: int) -> None:
    assert parse_duration(text) == duration_ns


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "1 s", "1d", "1e3s", ".5s", "1.s", "٣s", "1S"])
def test_anything_else_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=r"^must be a duration such as 500ms, 2s or 1m, got "):
        parse_duration(text)


def test_a_duration_is_whole_in_nanoseconds_and_at_most_a_year() -> None:
    with pytest.raises(ValueError, match=r"^must be a whole number of nanoseconds, got '0\.5ns'$"):
        parse_duration("0.5ns")
    with pytest.raises(ValueError, match=r"^must be at most 8784h, got '9999h'$"):
        parse_duration("9999h")


@given(st.integers(0, MAX_DURATION_NS))
def test_a_written_duration_is_read_back(duration_ns: int) -> None:
    assert parse_duration(format_duration(duration_ns)) == duration_ns


@given(st.floats(0, 1, exclude_min=True))
def test_a_written_probability_is_read_back(value: float) -> None:
    assert parse_probability(format_float(value)) == value


@pytest.mark.parametrize("text", ["2", "-0.1", "nan", "inf", "x", ""])
def test_a_probability_lies_between_0_and_1(text: str) -> None:
    with pytest.raises(ValueError, match=r"^must be a probability above 0, up to 1, got "):
        parse_probability(text)


def test_a_share_is_not_nothing() -> None:
    assert parse_share("1") == 1.0
    with pytest.raises(ValueError, match=r"^must be a share above 0, up to 1, got '0'$"):
        parse_share("0")


@pytest.mark.parametrize("text", ["0", "1.5", "", "+1", "99999999999"])
def test_an_integer_has_bounds(text: str) -> None:
    with pytest.raises(ValueError, match=r"^must be a whole number from 1, got "):
        parse_integer(text, 1)


@pytest.mark.parametrize(
    ("text", "canonical", "members"),
    [("3", "3", {3}), ("2..4", "2..4", {2, 3, 4}), ("7,1,2..3,3", "1..3,7", {1, 2, 3, 7})],
)
def test_ordinals_are_numbers_and_ranges(text: str, canonical: str, members: set[int]) -> None:
    ordinals = parse_ordinals(text)
    assert format_ordinals(ordinals) == canonical
    assert {number for number in range(20) if number in ordinals} == members


@pytest.mark.parametrize("text", ["", "0", "4..2", "1..", "a", "1,,2", "1.5"])
def test_ordinals_count_from_1_upwards(text: str) -> None:
    with pytest.raises(ValueError, match=r"^counts from 1: "):
        parse_ordinals(text)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 5)), min_size=1, max_size=8))
def test_written_ordinals_are_read_back(ranges: list[tuple[int, int]]) -> None:
    ordinals = parse_ordinals(",".join(f"{first}..{first + length}" for first, length in ranges))
    assert parse_ordinals(format_ordinals(ordinals)) == ordinals
