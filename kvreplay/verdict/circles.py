"""Two instances of a pair that wait for each other (sglang#31473).

A producer keeps what it has computed of one request until its consumer has room for it; the consumer keeps room for
another, which the producer has no room to compute. Only a timeout of one of them ends it.
"""

import polars as pl

from kvreplay.checkers.frames import client_ends, routes, rows_of
from kvreplay.ids import NS_PER_S
from kvreplay.verdict.model import CircularWait

_COLUMNS = ("time_ns", "kind", "instance", "request_id", "peer", "num_blocks")


def circular_waits(frame: pl.DataFrame, least_ns: int) -> list[CircularWait]:
    """Those that lasted so long at least, in order of time."""
    rows = rows_of(frame, ["pull.sent", "pull.settled", "send.started", "send.expired"], *_COLUMNS).collect()
    first = rows.unique(["kind", "instance", "request_id"], keep="first", maintain_order=True)
    sent = first.filter(pl.col("kind") == "pull.sent", pl.col("num_blocks") > 0)
    settled = first.filter(pl.col("kind") == "pull.settled").select("instance", "request_id", until_ns="time_ns")
    waited = (
        sent.select("instance", "request_id", producer="peer", since_ns="time_ns")
        .join(settled, on=["instance", "request_id"], how="left", maintain_order="left")
        .with_columns(pl.col("until_ns").fill_null(_end_ns(frame)))
        .filter(pl.col("until_ns") - pl.col("since_ns") >= least_ns)
    )
    if waited.is_empty():
        return []
    computed = rows_of(frame, ["request.first_token", "request.finished"], *_COLUMNS).collect()
    begun = computed.unique(["instance", "request_id"], keep="first", maintain_order=True).select(
        "request_id", producer="instance", first_ns="time_ns"
    )
    reserved = waited.join(begun, on=["request_id", "producer"], how="left", maintain_order="left").filter(
        pl.col("first_ns").is_null() | (pl.col("first_ns") >= pl.col("until_ns"))
    )
    released = first.filter(pl.col("kind").str.starts_with("send.")).group_by(
        "instance", "request_id", maintain_order=True
    )
    kept = (
        computed.filter(pl.col("kind") == "request.finished")
        .select("request_id", producer="instance", kept_ns="time_ns")
        .join(routes(frame).collect(), on=["request_id", "producer"], maintain_order="left")
        .join(
            released.agg(released_ns=pl.col("time_ns").min()).rename({"instance": "producer"}),
            on=["producer", "request_id"],
            how="left",
            maintain_order="left",
        )
        .join(
            sent.select("request_id", serving="instance", asked_ns="time_ns"),
            on=["request_id", "serving"],
            how="left",
            maintain_order="left",
        )
        .join(
            client_ends(frame).select("request_id", end_ns="time_ns").collect(),
            on="request_id",
            how="left",
            maintain_order="left",
        )
        # Nobody came for it while it was kept, though its client was there.
        .with_columns(
            wanted_ns=pl.min_horizontal(pl.col("asked_ns", "released_ns", "end_ns").fill_null(_end_ns(frame)))
        )
        .filter(pl.col("wanted_ns") - pl.col("kept_ns") >= least_ns)
    )
    pairs = (
        reserved.join(
            kept,
            left_on=["producer", "instance"],
            right_on=["producer", "serving"],
            suffix="_kept",
            maintain_order="left",
        )
        .with_columns(
            begin=pl.max_horizontal("since_ns", "kept_ns"),
            end=pl.min_horizontal("until_ns", "wanted_ns"),
        )
        .filter(
            pl.col("request_id") != pl.col("request_id_kept"),
            pl.col("end") - pl.col("begin") >= least_ns,
        )
        .sort("begin", "request_id", "request_id_kept", maintain_order=True)
    )
    return [
        CircularWait(
            producer=row["producer"],
            consumer=row["instance"],
            kept=row["request_id_kept"],
            reserved=row["request_id"],
            since_s=row["begin"] / NS_PER_S,
            until_s=row["end"] / NS_PER_S,
        )
        for row in pairs.iter_rows(named=True)
    ]


def _end_ns(frame: pl.DataFrame) -> int:
    return int(frame["time_ns"][-1]) if frame.height else 0
