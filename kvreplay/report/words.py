"""How numbers and foreign text are written in a report."""

from collections.abc import Mapping


def number(value: float) -> str:
    return f"{value:,.0f}"


def percent(value: float) -> str:
    return "< 0.1 %" if 0 < value < 0.0005 else f"{100 * value:.1f} %"


def share(part: float, whole: float) -> str:
    return percent(part / whole) if whole else "-"


def duration(seconds: float | None) -> str:
    """Three or four digits that matter: `491 us`, `8.25 ms`, `12.4 s`, `3,601 s`."""
    if seconds is None:
        return "-"
    if 0 < seconds < 0.0009995:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else "1.00 s"
    digits = 2 if seconds < 10 else 1 if seconds < 1000 else 0
    return f"{seconds:,.{digits}f} s"


def instant(seconds: float) -> str:
    """A moment of the run, as exact as it takes to find it in the trace."""
    return f"{seconds:,.3f} s"


def listed(counts: Mapping[str, int], most: int = 4) -> str:
    """`240 failed, 3 stalled`; the most first, and no more than `most` of them."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    parts = [f"{count:,} {name or 'without a cause'}" for name, count in ordered[:most]]
    rest = sum(count for _, count in ordered[most:])
    return ", ".join([*parts, f"{rest:,} for {len(ordered) - most:,} other causes"] if rest else parts)


def safe(text: str) -> str:
    """`text` on one line and without anything that a terminal would obey: a trace may come from anywhere."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
