"""How numbers and foreign text are written in a report."""

from collections.abc import Mapping
from typing import Final

OUTCOMES: Final = ("finished", "failed", "aborted", "rejected", "stalled", "unfinished")
"""What becomes of requests, in the order of a report: they add up to all of them."""
ALWAYS_SHOWN: Final = ("finished", "failed", "stalled")
"""Of these: in a table even if there are none."""


def number(value: float) -> str:
    return f"{value:,.0f}"


def percent(value: float) -> str:
    return "< 0.1 %" if 0 < value < 0.0005 else f"{100 * value:.1f} %"


def size(num_bytes: float) -> str:
    """Three digits that matter, in the largest unit of which there is one: `512 B`, `3.28 MB`, `1,234 GB`."""
    for unit, in_bytes in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= 0.9995 * in_bytes:
            return f"{_three_digits(num_bytes / in_bytes)} {unit}"
    return f"{num_bytes:,.0f} B"


def share(part: float, whole: float) -> str:
    return percent(part / whole) if whole else "-"


def duration(seconds: float | None) -> str:
    """Three or four digits that matter: `491 us`, `8.25 ms`, `12.4 s`, `3,601 s`."""
    if seconds is None:
        return "-"
    if seconds == 0:
        return "0 s"
    if seconds < 0.0009995:
        return f"{_three_digits(seconds * 1e6)} us"
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1000)} ms"
    return f"{seconds:,.1f} s" if 99.95 <= seconds < 1000 else f"{_three_digits(seconds)} s"


def _three_digits(value: float) -> str:
    return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def instant(seconds: float) -> str:
    """A moment of the run, as exact as it takes to find it in the trace."""
    return f"{seconds:,.3f} s"


def listed(counts: Mapping[str, int]) -> str:
    """`240 failed, 3 stalled`; the most first."""
    return ", ".join(f"{count:,} {name}" for name, count in by_size(counts))


def causes(counts: Mapping[str, int], most: int = 4) -> str:
    """`kv load failure (240), timeout (12)`, no more than `most` of them; a single one without its count."""
    named = {name or "without a cause": count for name, count in counts.items()}
    if len(named) == 1:
        return "".join(counts)
    ordered = by_size(named)
    parts = [f"{name} ({count:,})" for name, count in ordered[:most]]
    rest = sum(count for _, count in ordered[most:])
    return ", ".join([*parts, f"{len(ordered) - most:,} other causes ({rest:,})"] if rest else parts)


def by_size(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """The most first; by name where there are as many."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def safe(text: str) -> str:
    """`text` on one line and without anything that a terminal would obey: a trace may come from anywhere."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
