"""Lines and tables: within any width, without losing or breaking a word."""

import io

from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from kvreplay.report.layout import Column, Line, Rows, print_part

WORDS = st.text("abcé木=:.", min_size=1, max_size=12)
TEXTS = st.lists(WORDS, max_size=6).map(" ".join)


def printed(part: Line | Rows, width: int) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width)
    print_part(console, part)
    return out.getvalue().splitlines()


def columns_of(line: str) -> int:
    return sum(2 if character == "木" else 1 for character in line)


@given(text=TEXTS, width=st.integers(20, 60), indent=st.integers(0, 4))
@example(text=": : ::::::::木木木木", width=20, indent=3)
def test_a_line_goes_on_further_in_and_loses_no_word(text: str, width: int, indent: int) -> None:
    lines = printed(Line(text, indent=indent), width)
    assert " ".join(lines).split() == text.split()
    # A word that no line has room for stays where it is, whole.
    overlong = {word for word in text.split() if columns_of(word) > width - indent - 2}
    assert all(columns_of(line) <= width or overlong & set(line.split()) for line in lines)


@given(
    rows=st.lists(st.tuples(TEXTS, TEXTS, WORDS, TEXTS), min_size=1, max_size=4),
    folds=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    width=st.integers(30, 90),
)
def test_a_table_keeps_every_word_and_the_width(
    rows: list[tuple[str, ...]], folds: tuple[bool, ...], width: int
) -> None:
    """No column of what must stay whole here is wider than a line: it may only fold or go on in the next one."""
    columns = [Column(f"c{place}", "right" if place == 2 else "left", fold) for place, fold in enumerate(folds)]
    lines = printed(Rows(columns, rows), width)
    shown = sorted(" ".join(lines).split())
    assert shown == sorted(
        [*(column.title for column in columns), *(word for row in rows for word in " ".join(row).split())]
    )
    unfolded = [columns_of(row[place]) for row in rows for place in range(4) if not folds[place]]
    words = [columns_of(word) for row in rows for cell in row for word in cell.split()]
    assert all(columns_of(line) <= max(width, 6 + max([*unfolded, *words], default=0)) for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_what_does_not_fit_goes_on_in_the_next_line_with_its_columns_aligned() -> None:
    columns = [Column("request", fold=True), Column("status"), Column("since", "right"), Column("blocks", "right")]
    rows = [("r1", "WAITING_FOR_REMOTE_KVS", "0.059 s", "206"), ("r2", "RUNNING", "100.370 s", "1,073")]
    assert printed(Rows(columns, rows), 36) == [
        "  request  status",
        "          since  blocks",
        "  r1       WAITING_FOR_REMOTE_KVS",
        "        0.059 s     206",
        "  r2       RUNNING",
        "      100.370 s   1,073",
    ]


def test_numbers_are_not_broken_but_settings_are() -> None:
    assert printed(Line("slow:p=0.25,nth=1,3,delay=3s after 12,031 requests in all", indent=2), 24) == [
        "  slow:p=0.25,nth=1,3,",
        "    delay=3s after",
        "    12,031 requests in",
        "    all",
    ]
