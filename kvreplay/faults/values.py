"""The values that a fault's keys take: durations, probabilities, ordinals, and how each is written.

A parser raises ValueError with the rule and the value; who calls it knows the key and the place. What a formatter
writes, its parser reads back as the same value.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from kvreplay.ids import NS_PER_MS, NS_PER_S, NS_PER_US

MAX_DURATION_NS: Final = 366 * 24 * 3600 * NS_PER_S
MAX_INTEGER: Final = 2**31 - 1

_UNITS_NS: Final = {
    "h": 3600 * NS_PER_S,
    "m": 60 * NS_PER_S,
    "s": NS_PER_S,
    "ms": NS_PER_MS,
    "us": NS_PER_US,
    "ns": 1,
}
_DURATION: Final = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)(h|m|s|ms|us|ns)", re.ASCII)
_INTEGER: Final = re.compile(r"-?\d{1,10}", re.ASCII)
_RANGE: Final = re.compile(r"(\d{1,10})(?:\.\.(\d{1,10}))?", re.ASCII)


def parse_duration(text: str) -> int:
    """Nanoseconds. Raises ValueError unless `text` is a number with a unit, whole in nanoseconds."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"must be a duration such as 500ms, 2s or 1m, got {text!r}")
    duration_ns = Fraction(match[1]) * _UNITS_NS[match[2]]
    if duration_ns.denominator != 1:
        raise ValueError(f"must be a whole number of nanoseconds, got {text!r}")
    if duration_ns > MAX_DURATION_NS:
        raise ValueError(f"must be at most {format_duration(MAX_DURATION_NS)}, got {text!r}")
    return int(duration_ns)


def format_duration(duration_ns: int) -> str:
    """In the largest unit that leaves a whole number."""
    if duration_ns == 0:
        return "0s"
    unit = next(unit for unit, size_ns in _UNITS_NS.items() if duration_ns % size_ns == 0)
    return f"{duration_ns // _UNITS_NS[unit]}{unit}"


def parse_probability(text: str) -> float:
    return _parse_part(text, "probability")


def parse_share(text: str) -> float:
    return _parse_part(text, "share")


def _parse_part(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise ValueError(f"must be a {what} above 0, up to 1, got {text!r}")
    return value


def format_float(value: float) -> str:
    return repr(value).removesuffix(".0")


def parse_integer(text: str, minimum: int = 0) -> int:
    if _INTEGER.fullmatch(text) is None or not minimum <= int(text) <= MAX_INTEGER:
        raise ValueError(f"must be a whole number from {minimum}, got {text!r}")
    return int(text)


@dataclass(frozen=True, slots=True)
class Ordinals:
    """Some of 1, 2, 3, ...: sorted ranges that neither touch nor overlap, ends included."""

    ranges: tuple[tuple[int, int], ...]

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int)
        return any(first <= number <= last for first, last in self.ranges)


def parse_ordinals(text: str) -> Ordinals:
    """`3`, `2..4`, or several of them with commas between."""
    ranges = sorted(_parse_range(part) for part in text.split(","))
    merged: list[tuple[int, int]] = []
    for first, last in ranges:
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return Ordinals(tuple(merged))


def _parse_range(text: str) -> tuple[int, int]:
    match = _RANGE.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= MAX_INTEGER:
        raise ValueError(f"counts from 1: a number, a range such as 2..4 or a list of them, got {text!r}")
    return first, last


def format_ordinals(ordinals: Ordinals) -> str:
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in ordinals.ranges)
