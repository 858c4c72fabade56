"""FENCE: no block that an older owner's transfer still reads or writes is given to a new owner."""

from typing import Final

import polars as pl

from kvreplay.checkers.finding import FENCE, Finding
from kvreplay.checkers.frames import rows_of
from kvreplay.events import DETAIL_BLOCKS
from kvreplay.ids import NULL_BLOCK_ID

DETAIL: Final = DETAIL_BLOCKS

_NEVER: Final = (1 << 63) - 1


def check_fence(frame: pl.DataFrame) -> list[Finding]:
    """Each allocation of a block is held against the transfers of the request that had the block before."""
    in_flight = _transfers(frame).rename({"request_id": "previous"})
    breaches = (
        _handovers(frame)
        .join(in_flight, on=["instance", "previous"], maintain_order="left")
        .filter(pl.col("seq").is_between("start_seq", "end_seq", closed="none"))
        .unique(["seq", "block_ids"], keep="first", maintain_order=True)
        .collect()
    )
    return [
        Finding(
            FENCE,
            row["time_ns"],
            f"given to {row['request_id']} while a transfer of {row['previous']} {row['act']} it",
            instance=row["instance"],
            request_id=row["previous"],
            block_id=row["block_ids"],
            group=row["group"],
            transfer_id=row["transfer_id"],
        )
        for row in breaches.iter_rows(named=True)
    ]


def _handovers(frame: pl.DataFrame) -> pl.LazyFrame:
    """Blocks given to a request after another one had them: `previous` is the one that had, or gave back, last."""
    columns = ("seq", "time_ns", "kind", "instance", "request_id", "group", "block_ids")
    return (
        rows_of(frame, ["block.allocated", "block.freed"], *columns)
        .explode("block_ids")
        .with_columns(previous=pl.col("request_id").shift(1).over("instance", "block_ids"))
        .filter(
            pl.col("kind") == "block.allocated",
            pl.col("block_ids") != NULL_BLOCK_ID,
            pl.col("previous") != pl.col("request_id"),
        )
    )


def _transfers(frame: pl.DataFrame) -> pl.LazyFrame:
    """Spans of `seq` in which a producer's write is in flight: it reads there, and writes at its peer.

    Where a request is asked for twice, several of its writes are in flight at a time: the first that is over counts as
    the end of the first that began, which covers the same time.
    """
    columns = ("seq", "kind", "instance", "peer", "request_id", "transfer_id")
    key = ["instance", "peer", "request_id", "transfer_id"]
    is_start = pl.col("kind") == "send.started"
    spans = (
        rows_of(frame, ["send.started", "send.finished"], *columns)
        .with_columns(
            place=pl.when(is_start).then(is_start.cum_sum().over(key)).otherwise((~is_start).cum_sum().over(key))
        )
        .group_by(*key, "place", maintain_order=True)
        .agg(start_seq=pl.col("seq").filter(is_start).first(), end_seq=pl.col("seq").filter(~is_start).first())
        .filter(pl.col("start_seq").is_not_null())
        .with_columns(pl.col("end_seq").fill_null(_NEVER))
    )
    shared = ("request_id", "transfer_id", "start_seq", "end_seq")
    return pl.concat(
        [
            spans.select("instance", *shared, act=pl.lit("reads")),
            spans.select(pl.col("peer").alias("instance"), *shared, act=pl.lit("writes")),
        ]
    )
