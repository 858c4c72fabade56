"""EXACTLY-ONCE: a request ends once on an instance, then does nothing there; no block is freed twice."""

from typing import Final

import polars as pl

from kvreplay.checkers.finding import EXACTLY_ONCE, Finding
from kvreplay.checkers.frames import rows_of
from kvreplay.events import DETAIL_RUN, TERMINAL_KINDS
from kvreplay.ids import NULL_BLOCK_ID

DETAIL: Final = DETAIL_RUN
"""With `--detail blocks` it sees blocks that are freed twice, too."""

_LIFE: Final = (
    "request.parked",
    "request.promoted",
    "request.preempted",
    "request.first_token",
    "tokens.recomputed",
)
_COLUMNS: Final = ("seq", "time_ns", "kind", "instance", "request_id")


def check_exactly_once(frame: pl.DataFrame) -> list[Finding]:
    return _check_ends(frame) + _check_frees(frame)


def _check_ends(frame: pl.DataFrame) -> list[Finding]:
    """A late signal of a transfer may follow the end; a change of the request's own state may not."""
    key = ["request_id", "instance"]
    rows = rows_of(frame, (*TERMINAL_KINDS, *_LIFE), *_COLUMNS).filter(pl.col("instance").is_not_null())
    is_end = pl.col("kind").is_in(list(TERMINAL_KINDS))
    ends = rows.filter(is_end).unique(key, keep="first", maintain_order=True)
    late = (
        rows.join(ends.select(*key, end_seq="seq", end_kind="kind"), on=key, maintain_order="left")
        .filter(pl.col("seq") > pl.col("end_seq"))
        .collect()
    )
    return [
        Finding(
            EXACTLY_ONCE,
            row["time_ns"],
            f"{row['kind']} after {row['end_kind']}",
            instance=row["instance"],
            request_id=row["request_id"],
        )
        for row in late.iter_rows(named=True)
    ]


def _check_frees(frame: pl.DataFrame) -> list[Finding]:
    """Between two times that it is given blocks, a request gives each block back once.

    Blocks that come by a prefix hit are not in the trace, but every admission brings new ones, too, to some group.
    """
    table = ["instance", "request_id", "group"]
    life = (pl.col("kind") == "block.allocated").cum_sum().over("instance", "request_id")
    rows = (
        rows_of(frame, ["block.allocated", "block.freed"], "group", "block_ids", *_COLUMNS)
        .with_columns(life=life)
        .filter(pl.col("kind") == "block.freed")
        .explode("block_ids")
        .filter(pl.col("block_ids") != NULL_BLOCK_ID)
        .filter(~pl.struct(*table, "life", "block_ids").is_first_distinct())
        .collect()
    )
    return [
        Finding(
            EXACTLY_ONCE,
            row["time_ns"],
            "given back twice by the same request",
            instance=row["instance"],
            request_id=row["request_id"],
            block_id=row["block_ids"],
            group=row["group"],
        )
        for row in rows.iter_rows(named=True)
    ]
