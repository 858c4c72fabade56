"""PROGRESS: an instance with unfinished requests schedules something, or waits for what will come."""

from typing import Final

import polars as pl

from kvreplay.checkers.finding import PROGRESS, Finding
from kvreplay.checkers.frames import client_ends, routes, rows_of
from kvreplay.events import DETAIL_RUN

DETAIL: Final = DETAIL_RUN


def check_progress(frame: pl.DataFrame) -> list[Finding]:
    return _check_stalls(frame) + _check_lost(frame)


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
        .join(client_ends(frame).select("request_id"), on="request_id", how="anti")
        .join(stalled, on="request_id", how="anti")
        .join(crashed, left_on="serving", right_on="instance", how="anti")
        .join(crashed, left_on="producer", right_on="instance", how="anti")
        .collect()
    )
    if lost.is_empty():
        return []
    end_ns = int(frame["time_ns"][-1])
    return [
        Finding(PROGRESS, end_ns, "never ended, and not proven stalled", serving, request_id)
        for request_id, serving in lost.select("request_id", "serving").rows()
    ]
