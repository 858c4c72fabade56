"""NO-FATAL: a fault on one request kills no engine and takes no other request's output away."""

from typing import Final

import polars as pl

from kvreplay.checkers.finding import NO_FATAL, Finding
from kvreplay.checkers.frames import client_ends, rows_of
from kvreplay.events import DETAIL_RUN

DETAIL: Final = DETAIL_RUN


def check_no_fatal(frame: pl.DataFrame) -> list[Finding]:
    return _check_engines(frame) + _check_bystanders(frame)


def _check_engines(frame: pl.DataFrame) -> list[Finding]:
    crashes = rows_of(frame, ["engine.crashed"], "time_ns", "instance", "status", "cause").collect()
    return [
        Finding(NO_FATAL, row["time_ns"], f"the engine died: {row['status']}", instance=row["instance"])
        for row in crashes.iter_rows(named=True)
    ]


def _check_bystanders(frame: pl.DataFrame) -> list[Finding]:
    """Requests that failed though no fault named them.

    Left alone: those served or fed by an instance whose engine died, or on which a fault acted that names no
    request (a crash of the whole instance).
    """
    faults = rows_of(frame, ["fault.injected"], "instance", "request_id").collect()
    if faults.is_empty():
        return []
    crashed = rows_of(frame, ["engine.crashed"], "instance").collect()["instance"]
    acted_on = faults.filter(pl.col("request_id").is_null())["instance"]
    if acted_on.null_count():
        return []
    excused = pl.concat([crashed, acted_on]).to_list()
    named = faults["request_id"].drop_nulls().unique().to_list()
    victims = (
        client_ends(frame)
        .filter(
            pl.col("kind") == "request.failed",
            ~pl.col("request_id").is_in(named),
            ~pl.col("serving").is_in(excused).fill_null(value=False),
            ~pl.col("producer").is_in(excused).fill_null(value=False),
        )
        .collect()
    )
    return [
        Finding(
            NO_FATAL,
            row["time_ns"],
            f"failed though no fault named it: {row['cause'] or 'no cause given'}",
            instance=row["instance"],
            request_id=row["request_id"],
        )
        for row in victims.iter_rows(named=True)
    ]
