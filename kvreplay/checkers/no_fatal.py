"""NO-FATAL: a fault on one request kills no engine and takes no other request's output away."""

from typing import Final

import polars as pl

from kvreplay.checkers.finding import NO_FATAL, Finding
from kvreplay.checkers.frames import client_ends, rows_of
from kvreplay.events import DETAIL_RUN
from kvreplay.faults.catalogue import catalogue
from kvreplay.faults.registry import VERBS
from kvreplay.faults.verb import ActionVerb
from kvreplay.sim.catalogue import FaultRow

DETAIL: Final = DETAIL_RUN


def check_no_fatal(frame: pl.DataFrame) -> list[Finding]:
    """Without faults a failure is nobody's doing but the engine's, and counts as a failure only."""
    if rows_of(frame, ["fault.injected"], "seq").collect().is_empty():
        return _check_engines(frame)
    return _check_engines(frame) + [
        Finding(
            NO_FATAL,
            row["time_ns"],
            f"failed though no fault named it: {row['cause'] or 'no cause given'}",
            instance=row["instance"],
            request_id=row["request_id"],
        )
        for row in unfaulted_failures(frame).iter_rows(named=True)
    ]


def unfaulted_failures(frame: pl.DataFrame) -> pl.DataFrame:
    """The ends (as `client_ends`) of requests that failed though no fault named them.

    Left out: those served or fed by an instance whose engine died, or on which a fault acted as a whole: it names no
    request, or, as a crash does, only those that were there at that moment. Where a fault that names no request does
    not say where it acted, it may explain any failure.
    """
    faults = rows_of(frame, ["fault.injected"], "instance", "request_id", "status").collect()
    crashed = rows_of(frame, ["engine.crashed"], "instance").collect()["instance"]
    acted_on = faults.filter(is_of_whole_instance())["instance"]
    excused = pl.concat([crashed, acted_on]).to_list()
    named = faults["request_id"].drop_nulls().unique(maintain_order=True).to_list()
    victims = client_ends(frame).filter(
        pl.col("kind") == "request.failed",
        ~pl.col("request_id").is_in(named),
        ~pl.col("serving").is_in(excused).fill_null(value=False),
        ~pl.col("producer").is_in(excused).fill_null(value=False),
    )
    return victims.collect().clear() if acted_on.null_count() else victims.collect()


def is_of_whole_instance() -> pl.Expr:
    """Whether a `fault.injected` row is of a fault that does something to an instance, not to single requests."""
    return pl.col("request_id").is_null() | is_action_on_instance()


def is_action_on_instance() -> pl.Expr:
    """Whether a `fault.injected` row is of a fault that commands an instance, or keeps it from starting."""

    def acts_on_instance(row: FaultRow) -> bool:
        verb = VERBS[row.verb]
        return row.dies_of is not None or (isinstance(verb, ActionVerb) and not verb.acts_on_requests)

    return pl.col("status").is_in([name for name, row in catalogue().items() if acts_on_instance(row)])


def _check_engines(frame: pl.DataFrame) -> list[Finding]:
    crashes = rows_of(frame, ["engine.crashed"], "time_ns", "instance", "status", "cause").collect()
    return [
        Finding(NO_FATAL, row["time_ns"], f"the engine died: {row['status']}", instance=row["instance"])
        for row in crashes.iter_rows(named=True)
    ]
