"""FENCE: no block that an older owner's transfer still reads or writes is given to a new owner."""

from typing import Final

import polars as pl

from kvreplay.checkers.finding import FENCE, Finding
from kvreplay.checkers.frames import rows_of
from kvreplay.events import DETAIL_BLOCKS
from kvreplay.faults.catalogue import catalogue
from kvreplay.ids import NULL_BLOCK_ID

DETAIL: Final = DETAIL_BLOCKS

_KILLING: Final = [name for name, row in catalogue().items() if row.verb in ("crash", "restart")]
"""Faults that end a process."""
_NEVER: Final = (1 << 63) - 1


def check_fence(frame: pl.DataFrame, *, fences_attempts: bool = False) -> list[Finding]:
    """Each allocation of a block is held against the transfers of the request that had the block before.

    `fences_attempts`: nothing lands of a pull that is settled (the switch transfer_fence).
    """
    in_flight = _of_admissions(frame, _transfers(frame, fences_attempts=fences_attempts)).rename(
        {"request_id": "previous"}
    )
    breaches = (
        _handovers(frame)
        .join(in_flight, on=["instance", "previous"], maintain_order="left")
        .filter(pl.col("seq").is_between("start_seq", "end_seq", closed="none"))
        .filter(pl.coalesce(pl.col("returned_seq") > pl.col("admitted_seq"), True))
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
    """Blocks given to a request after another one had them: `previous` is the one that had, or gave back, last.

    `returned_seq`: when it gave the block back, if it did. What a window has left behind is in no transfer.
    """
    columns = ("seq", "time_ns", "kind", "instance", "request_id", "group", "block_ids", "cause")
    return (
        rows_of(frame, ["block.allocated", "block.freed"], *columns)
        .explode("block_ids")
        .with_columns(
            previous=pl.col("request_id").shift(1).over("instance", "block_ids"),
            left_behind=pl.col("cause").shift(1).over("instance", "block_ids"),
            returned_seq=pl.when(pl.col("kind") == "block.freed")
            .then(pl.col("seq"))
            .shift(1)
            .over("instance", "block_ids"),
        )
        .filter(
            pl.col("kind") == "block.allocated",
            pl.col("block_ids") != NULL_BLOCK_ID,
            pl.col("previous") != pl.col("request_id"),
            pl.col("left_behind").is_null(),
        )
    )


def _of_admissions(frame: pl.DataFrame, transfers: pl.LazyFrame) -> pl.LazyFrame:
    """`admitted_seq`: when the request was last given blocks before its transfer began. What it had given back by then
    was of an earlier admission."""
    given = (
        rows_of(frame, ["block.allocated"], "seq", "instance", "request_id")
        .rename({"seq": "admitted_seq"})
        .sort("admitted_seq", maintain_order=True)
    )
    return transfers.sort("start_seq", maintain_order=True).join_asof(
        given,
        left_on="start_seq",
        right_on="admitted_seq",
        by=["instance", "request_id"],
        strategy="backward",
        check_sortedness=False,  # both are; polars cannot see it of groups
    )


def _transfers(frame: pl.DataFrame, *, fences_attempts: bool) -> pl.LazyFrame:
    """Spans of `seq` in which a producer's write is in flight: it reads there, and writes at its peer.

    Where a request is asked for twice, several of its writes are in flight at a time: the first that is over counts as
    the end of the first that began, which covers the same time. Without an end it is in flight for ever, or until one
    of the two is gone.
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
        .sort("start_seq", maintain_order=True)
    )
    deaths = _deaths(frame)
    at_source = _until_death(spans, deaths, "instance")
    at_target = _until_death(at_source, deaths, "peer")
    if fences_attempts:
        at_target = _until_settled(at_target, frame)
    shared = ("request_id", "transfer_id", "start_seq", "end_seq")
    return pl.concat(
        [
            at_source.select("instance", *shared, act=pl.lit("reads")),
            at_target.select(pl.col("peer").alias("instance"), *shared, act=pl.lit("writes")),
        ]
    )


def _until_settled(spans: pl.LazyFrame, frame: pl.DataFrame) -> pl.LazyFrame:
    """No span goes on when the last of the consumer's pulls with that producer is over for the request. One that asks
    for no blocks, since they have been given up, only tells the producer so."""
    key = ["instance", "peer", "request_id", "rank"]
    pulls = rows_of(frame, ["pull.sent", "pull.settled"], "seq", "kind", *key, "num_blocks")
    sent = (
        pulls.filter(pl.col("kind") == "pull.sent")
        .sort("seq", maintain_order=True)
        .select(*key, "num_blocks", sent_seq="seq")
    )
    settled = (
        pulls.filter(pl.col("kind") == "pull.settled")
        .drop("num_blocks")
        .sort("seq", maintain_order=True)
        .join_asof(
            sent,
            left_on="seq",
            right_on="sent_seq",
            by=key,
            strategy="backward",
            check_sortedness=False,  # both are; polars cannot see it of groups
        )
        .filter(pl.col("num_blocks").ne_missing(0))
        .group_by(peer="instance", instance="peer", request_id="request_id", maintain_order=True)
        .agg(settled_seq=pl.col("seq").max())
    )
    return (
        spans.join(settled, on=["peer", "instance", "request_id"], how="left", maintain_order="left")
        .with_columns(end_seq=pl.min_horizontal("end_seq", "settled_seq"))
        .drop("settled_seq")
    )


def _deaths(frame: pl.DataFrame) -> pl.LazyFrame:
    """Where an instance's process is gone: it writes nothing any more, and its blocks are nobody's."""
    return (
        rows_of(frame, ["engine.crashed", "fault.injected"], "seq", "kind", "instance", "status")
        .filter((pl.col("kind") == "engine.crashed") | pl.col("status").is_in(_KILLING))
        .select(dead=pl.col("instance"), death_seq=pl.col("seq"))
        .sort("death_seq", maintain_order=True)
    )


def _until_death(spans: pl.LazyFrame, deaths: pl.LazyFrame, whose: str) -> pl.LazyFrame:
    """No span goes on when the process of `whose` instance is gone."""
    return (
        spans.join_asof(
            deaths,
            left_on="start_seq",
            right_on="death_seq",
            by_left=whose,
            by_right="dead",
            strategy="forward",
            check_sortedness=False,  # both are; polars cannot see it of groups
        )
        .with_columns(end_seq=pl.min_horizontal("end_seq", "death_seq"))
        .drop("death_seq")
    )
