"""PROGRESS: an instance with unfinished requests schedules something, or waits for what will come."""

from typing import Final

import polars as pl

from kvreplay.checkers.finding import PROGRESS, Finding
from kvreplay.checkers.frames import client_ends, routes, rows_of
from kvreplay.connectors.mooncake.producer import NOT_READY
from kvreplay.events import DETAIL_RUN
from kvreplay.ids import NS_PER_S

DETAIL: Final = DETAIL_RUN
_LEG_LOST: Final = ("request.aborted", "request.failed", "request.rejected")


def check_progress(frame: pl.DataFrame) -> list[Finding]:
    return _check_stalls(frame) + _check_lost(frame) + _check_forgotten(frame)


def _check_stalls(frame: pl.DataFrame) -> list[Finding]:
    """One finding per instance on which requests are proven never to end."""
    stalls = (
        rows_of(frame, ["request.stalled"], "time_ns", "instance", "request_id")
        .group_by("instance", maintain_order=True)
        .agg(pl.col("time_ns").first(), pl.col("request_id").n_unique())
        .collect()
    )
    return [
        Finding(PROGRESS, time_ns, f"{count:,} unfinished and nothing open that could end them", instance)
        for instance, time_ns, count in stalls.rows()
    ]


def _check_lost(frame: pl.DataFrame) -> list[Finding]:
    """Requests that neither ended nor were proven stalled, on instances that live to the end.

    Whoever asks to abort a request before it was handed on has no end to wait for.
    """
    stalled = rows_of(frame, ["request.stalled"], "request_id")
    crashed = rows_of(frame, ["engine.crashed"], "instance")
    lost = (
        routes(frame)
        .join(client_ends(frame).select("request_id"), on="request_id", how="anti", maintain_order="left")
        .join(stalled, on="request_id", how="anti", maintain_order="left")
        .join(crashed, left_on="serving", right_on="instance", how="anti", maintain_order="left")
        .join(crashed, left_on="producer", right_on="instance", how="anti", maintain_order="left")
        .collect()
    )
    if lost.is_empty():
        return []
    end_ns = int(frame["time_ns"][-1])
    return [
        Finding(PROGRESS, end_ns, "never ended, and not proven stalled", serving, request_id)
        for request_id, serving in lost.select("request_id", "serving").rows()
    ]


def _check_forgotten(frame: pl.DataFrame) -> list[Finding]:
    """Pulls that waited to the end of a timeout for a producer whose own leg was aborted, failed or refused meanwhile.

    It had dropped what it knew of them, and told nobody who waited for it. Whose client is gone waits for nothing.
    """
    leg = ["request_id", "producer"]
    asked = rows_of(frame, ["pull.sent"], "time_ns", "request_id", "peer").rename({"peer": "producer"})
    dropped = rows_of(frame, _LEG_LOST, "time_ns", "request_id", "instance").rename({"instance": "producer"})
    given_up = (
        rows_of(frame, ["pull.settled"], "time_ns", "instance", "request_id", "peer", "cause")
        .filter(pl.col("cause") == NOT_READY)  # the peer's own words, which a recording has, too
        .rename({"peer": "producer"})
    )
    forgotten = (
        given_up.join(
            asked.group_by(leg, maintain_order=True).agg(asked_ns=pl.col("time_ns").first()),
            on=leg,
            maintain_order="left",
        )
        .join(
            dropped.group_by(leg, maintain_order=True).agg(dropped_ns=pl.col("time_ns").last()),
            on=leg,
            maintain_order="left",
        )
        .join(
            client_ends(frame).select("request_id", end_ns="time_ns"),
            on="request_id",
            how="left",
            maintain_order="left",
        )
        .filter(
            pl.col("dropped_ns").is_between("asked_ns", "time_ns"),
            pl.col("end_ns").is_null() | (pl.col("end_ns") >= pl.col("time_ns")),
        )
        .unique(["instance", "request_id"], keep="first", maintain_order=True)
        .collect()
    )
    return [
        Finding(
            PROGRESS,
            row["time_ns"],
            f"waited {(row['time_ns'] - row['dropped_ns']) / NS_PER_S:,.0f} s for blocks that {row['producer']} had "
            "given up",
            row["instance"],
            row["request_id"],
        )
        for row in forgotten.iter_rows(named=True)
    ]
