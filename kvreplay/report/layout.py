"""Pieces that every section of a terminal report is made of: titles, lines and plain tables."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from kvreplay.report.words import safe

Section: TypeAlias = Iterator[RenderableType]
"""A title and what is under it; nothing at all where there is nothing to say."""

INDENT = 2
WIDE = 120
"""From this many columns on, tables show what is only nice to know."""


class Column(NamedTuple):
    """`fold` columns give way when the line is too long, and lose nothing; all others keep their width."""

    title: str
    align: Literal["left", "right"] = "left"
    fold: bool = False


class Line(Text):
    """Text that is printed on one line however long it is, so that it can be copied, or found with grep."""

    def __init__(self, text: str, style: str = "", indent: int = 0) -> None:
        super().__init__(" " * indent + safe(text), style=style)


class Trimmed:
    """A renderable without the blanks at the ends of its lines."""

    def __init__(self, renderable: RenderableType) -> None:
        self.renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in console.render_lines(self.renderable, options, pad=False):
            yield from _without_trailing_blanks(line)
            yield Segment.line()


def _without_trailing_blanks(line: Sequence[Segment]) -> Iterator[Segment]:
    end = len(line)
    while end and not line[end - 1].text.strip():
        end -= 1
    yield from line[: max(end - 1, 0)]
    if end:
        last = line[end - 1]
        yield Segment(last.text.rstrip(), last.style, last.control)


def print_sections(console: Console, sections: Iterable[Section]) -> None:
    """Print the parts of each section that has any, with an empty line between sections."""
    is_first = True
    for section in sections:
        is_start = not is_first
        for part in section:
            if is_start:
                console.print()
            is_start = is_first = False
            console.print(part, highlight=False, soft_wrap=isinstance(part, Line))


def title(text: str, rest: str = "") -> Text:
    """`Requests  12,031 in all`: what follows, and its sum."""
    head = Text(text, style="bold")
    return head.append(f"  {safe(rest)}", style="not bold") if rest else head


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> Trimmed:
    """Columns aligned by blanks; titles only if one is given. Cells are foreign text and taken as they are."""
    grid = Table(
        box=None,
        show_header=any(column.title for column in columns),
        header_style="dim",
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    grid.add_column("", width=0, no_wrap=True)
    for column in columns:
        grid.add_column(
            Text(column.title),
            justify=column.align,
            no_wrap=not column.fold,
            overflow="fold",
        )
    for row in rows:
        grid.add_row("", *(Text(safe(cell)) for cell in row))
    return Trimmed(grid)


def more(num_left_out: int, what: str) -> Line:
    """The end of a list that was cut."""
    return Line(f"... and {num_left_out:,} more {what}; --json lists all", style="dim", indent=INDENT)
