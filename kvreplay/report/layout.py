"""Pieces that every section of a terminal report is made of: titles, lines and plain tables.

All of them keep to the console's width, and break between words only (or between the settings of a fault): a word that
is longer than a line, such as a path, stays whole, so that it can be copied and found with grep.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from kvreplay.report.words import safe

Section: TypeAlias = Iterator[RenderableType]
"""A title and what is under it; nothing at all where there is nothing to say."""

INDENT = 2
WIDE = 120
"""From this many columns on, tables show what is only nice to know."""
_GAP: Final = 2
_HANG: Final = 2
"""What goes on in the next line is so much further in."""

_BREAK: Final = re.compile(r"(?<!\d) +| +(?=\d)|(?<=,)(?=[^\s\d])|(?<=\|)(?=[^\s|])")
"""Blanks, which go, but none after a number, which belongs to what follows; and within `a=1,b=2` or `a|b`, but not
within `12,031`."""


class Column(NamedTuple):
    """`fold` columns give way when the line is too long, and lose nothing; all others keep their width."""

    title: str
    align: Literal["left", "right"] = "left"
    fold: bool = False


class Line:
    """Text in one line where it fits; else it goes on further in."""

    def __init__(self, text: str | Text, style: str = "", indent: int = 0) -> None:
        self._text = _text(text, style)
        self._indent = indent

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        indent = self._indent
        for part in broken(self._text, options.max_width - indent, _HANG) or [Text("")]:
            yield _whole(Text(" " * indent), part)
            indent = self._indent + _HANG


class Rows:
    """Cells in columns that are aligned by blanks; titles only if one is given.

    What does not fit beside each other, even with all that may fold folded, goes on in the next line, further in.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        rows: Sequence[Sequence[str | Text]],
        *,
        indent: int = INDENT,
        gap: int = _GAP,
    ) -> None:
        self._columns = columns
        self._lines = [[_text(cell) for cell in row] for row in rows]
        if any(column.title for column in columns):
            self._lines.insert(0, [Text(column.title, style="dim") for column in columns])
        self._indent = indent
        self._gap = gap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bands = list(self._bands(options.max_width))
        for line in self._lines:
            for start, widths in bands:
                yield from self._in_columns(line, start, widths)

    def _bands(self, width: int) -> Iterator[tuple[int, list[int]]]:
        """Which columns stand beside each other: the first of them, and how wide each is."""
        least = [self._least(place) for place in range(len(self._columns))]
        start = 0
        while start < len(least):
            room = width - self._indent_of(start)
            end = start + 1
            while end < len(least) and self._span(least[start : end + 1]) <= room:
                end += 1
            yield start, self._widths(start, least[start:end], room)
            start = end

    def _indent_of(self, start: int) -> int:
        return self._indent + (2 * _HANG if start else 0)

    def _span(self, widths: Sequence[int]) -> int:
        return sum(widths) + self._gap * (len(widths) - 1)

    def _least(self, place: int) -> int:
        cells = [line[place] for line in self._lines]
        if not self._columns[place].fold:
            return max((cell.cell_len for cell in cells), default=0)
        return max((cell_len(cell.plain[start:end]) for cell in cells for start, end in _words(cell.plain)), default=0)

    def _widths(self, start: int, least: Sequence[int], room: int) -> list[int]:
        """The widest gives way first, as far as its longest word lets it."""
        cells = [max((line[start + place].cell_len for line in self._lines), default=0) for place in range(len(least))]
        widths = [min(cell, max(words, room)) for cell, words in zip(cells, least, strict=True)]
        while self._span(widths) > room and widths != list(least):
            _, widest = max((width, place) for place, width in enumerate(widths) if width > least[place])
            widths[widest] -= 1
        return widths

    def _in_columns(self, line: Sequence[Text], start: int, widths: Sequence[int]) -> Iterator[Text]:
        folded = [broken(line[start + place], width) for place, width in enumerate(widths)]
        for height in range(max(1, *map(len, folded))):
            parts = [Text(" " * self._indent_of(start))]
            for place, (lines, width) in enumerate(zip(folded, widths, strict=True)):
                text = lines[height] if height < len(lines) else Text("")
                blanks = Text(" " * (width - text.cell_len))
                gap = Text(" " * self._gap)
                parts += [blanks, text, gap] if self._columns[start + place].align == "right" else [text, blanks, gap]
            yield _whole(*parts)


def _text(text: str | Text, style: str = "") -> Text:
    return text if isinstance(text, Text) else Text(safe(text), style=style)


def _words(plain: str) -> Iterator[tuple[int, int]]:
    """Start and end of what stays whole; blanks are in none of them."""
    start = 0
    for match in _BREAK.finditer(plain):
        if match.start() > start:
            yield start, match.start()
        start = match.end()
    if start < len(plain):
        yield start, len(plain)


def broken(text: Text, width: int, hang: int = 0) -> list[Text]:
    """`text` in lines of `width` at most, but that a longer word stays whole, where it is; all but the first have
    `hang` columns less. None where there is nothing but blanks."""
    lines: list[tuple[int, int]] = []
    for start, end in _words(text.plain):
        room = width - (hang if lines[1:] else 0)
        fits_nowhere = cell_len(text.plain[start:end]) > width - hang
        if lines and (fits_nowhere or cell_len(text.plain[lines[-1][0] : end]) <= room):
            lines[-1] = (lines[-1][0], end)
        else:
            lines.append((start, end))
    return [text[start:end] for start, end in lines]


def _whole(*parts: Text) -> Text:
    """A line without blanks at its end."""
    line = Text.assemble(*parts, no_wrap=True, overflow="ignore")
    line.rstrip()
    return line


def print_sections(console: Console, sections: Iterable[Section]) -> None:
    """Print the parts of each section that has any, with an empty line between sections."""
    is_first = True
    for section in sections:
        is_start = not is_first
        for part in section:
            if is_start:
                print_part(console, "")
            is_start = is_first = False
            print_part(console, part)


def print_part(console: Console, part: RenderableType) -> None:
    """A part breaks its lines itself; what it left longer than the console is wide is not to be broken or cut."""
    console.print(part, highlight=False, no_wrap=True, overflow="ignore", crop=False)


def title(text: str, rest: str = "") -> Line:
    """`Requests  12,031 in all`: what follows, and its sum."""
    head = Text(text, style="bold")
    return Line(head.append(f"  {safe(rest)}", style="not bold") if rest else head)


def verbatim(text: str, indent: int = 0) -> Text:
    """One line, however long: what must be taken as it is."""
    return Text(" " * indent + safe(text))


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> Rows:
    """Cells are foreign text and taken as they are."""
    return Rows(columns, rows)


def more(num_left_out: int, what: str) -> Line:
    """The end of a list that was cut."""
    return Line(f"... and {num_left_out:,} more {what}; --json lists all", style="dim", indent=INDENT)
