"""A line of blocks that shows one value over time."""

from collections.abc import Sequence
from typing import Final

_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_ASCII: Final = " .:-=+*#@"


def columns(times: Sequence[float], values: Sequence[int], end: float, width: int) -> list[int]:
    """The highest value in each of `width` equal slices of [0, end]; where none was taken, the last one holds.

    Where there are fewer values than that, they stand side by side: a line is no longer than what is known.
    """
    if len(values) <= width:
        return list(values)
    highest: list[int | None] = [None] * width
    for time, value in zip(times, values, strict=True):
        place = min(int(time / end * width), width - 1) if end > 0 else 0
        highest[place] = max(value, highest[place] or 0)
    filled: list[int] = []
    for found in highest:
        filled.append(found if found is not None else filled[-1] if filled else 0)
    return filled


def sparkline(values: Sequence[int], top: int, *, ascii_only: bool = False) -> str:
    """One character per value, in eighths of `top`; only 0 is blank."""
    glyphs = _ASCII if ascii_only else _BLOCKS
    levels = len(glyphs) - 1
    return "".join(glyphs[min(levels, -(-value * levels // top)) if top > 0 else 0] for value in values)
