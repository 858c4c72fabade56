"""What became of each request, from a trace's rows: ends, stalls, waits and latencies."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import polars as pl

from kvreplay.checkers.frames import client_ends, routes, rows_of
from kvreplay.events import CONNECTION_REFUSED, PREFILL_FAILED, TERMINAL_KINDS
from kvreplay.ids import NS_PER_S
from kvreplay.trace.percentiles import nearest_rank
from kvreplay.verdict.model import Latency, Overdue, Percentiles, Reason, Requests, Stall

_LEG: Final = ["request_id", "instance"]
_SECONDS: Final = 1.0 / NS_PER_S


class Outcomes(NamedTuple):
    requests: pl.DataFrame
    """One row per client request: request_id, arrived_ns, serving, producer, outcome, cause, end_ns, first_token_ns,
    output_tokens."""
    stalls: list[Stall]
    overdue: list[Overdue]


def outcomes(frame: pl.DataFrame, overdue_beyond_ns: int) -> Outcomes:
    """`overdue_beyond_ns`: parked for longer than that and ended later is overdue."""
    stalled, parked, requests = pl.collect_all(
        [_stalled_legs(frame), _parked_legs(frame, overdue_beyond_ns), _requests(frame)]
    )
    return Outcomes(_with_outcome(requests, stalled), _stalls(stalled), _overdue(parked))


def _requests(frame: pl.DataFrame) -> pl.LazyFrame:
    arrived = (
        rows_of(frame, ["request.arrived"], "request_id", "time_ns", "instance")
        .filter(pl.col("instance").is_null())
        .select("request_id", arrived_ns="time_ns")
        .unique("request_id", keep="first", maintain_order=True)
    )
    ends = client_ends(frame).select("request_id", "cause", end_ns="time_ns", end="kind", output_tokens="num_tokens")
    first = (
        rows_of(frame, ["request.first_token"], *_LEG, "time_ns")
        .unique(_LEG, keep="first", maintain_order=True)
        .select("request_id", serving="instance", first_token_ns="time_ns")
    )
    return (
        arrived.join(routes(frame), on="request_id", how="left", maintain_order="left")
        .join(first, on=["request_id", "serving"], how="left", maintain_order="left")
        .join(ends, on="request_id", how="left", maintain_order="left")
    )


def _stalled_legs(frame: pl.DataFrame) -> pl.LazyFrame:
    """The last proof per request and instance, what the leg came to after it, and the fault behind it: the one that
    the proof names, else the last that named the request."""
    columns = ("time_ns", *_LEG, "status", "cause", "num_tokens", "num_blocks", "peer", "transfer_id", "cause_seq")
    ends = (
        rows_of(frame, TERMINAL_KINDS, "kind", *_LEG)
        .unique(_LEG, keep="first", maintain_order=True)
        .select(*_LEG, ended=pl.col("kind").str.strip_prefix("request."))
    )
    fired = rows_of(frame, ["fault.injected"], "seq", "request_id", "cause")
    named = fired.select("request_id", last_fault="cause").unique("request_id", keep="last", maintain_order=True)
    causes = fired.select(cause_seq="seq", cause_fault="cause")
    return (
        rows_of(frame, ["request.stalled"], *columns)
        .unique(_LEG, keep="last", maintain_order=True)
        .join(ends, on=_LEG, how="left", maintain_order="left")
        .join(named, on="request_id", how="left", maintain_order="left")
        .join(causes, on="cause_seq", how="left", maintain_order="left")
        .with_columns(fault=pl.coalesce("cause_fault", "last_fault"))
        .join(routes(frame), on="request_id", how="left", maintain_order="left")
    )


def _parked_legs(frame: pl.DataFrame, beyond_ns: int) -> pl.LazyFrame:
    """Waits that lasted longer than `beyond_ns` and ended, each with the row that ended it."""
    ending = ("request.promoted", "request.stalled", *TERMINAL_KINDS)
    until = pl.col("time_ns").shift(-1).over(_LEG)
    ended_by = pl.col("kind").shift(-1).over(_LEG)
    return (
        rows_of(frame, ["request.parked", *ending], "time_ns", "kind", *_LEG)
        .with_columns(parked_ns=until - pl.col("time_ns"), ended_by=ended_by)
        .filter(
            pl.col("kind") == "request.parked",
            pl.col("parked_ns") > beyond_ns,
            pl.col("ended_by") != "request.stalled",
        )
    )


def _with_outcome(requests: pl.DataFrame, stalled: pl.DataFrame) -> pl.DataFrame:
    """A request is stalled if its serving leg is, or another leg is and no end is known; what healing ended was
    stalled all the same, for the faults would have held it for ever."""
    serving = stalled.filter(pl.col("serving").is_null() | (pl.col("instance") == pl.col("serving")))
    any_leg = pl.col("request_id").is_in(stalled["request_id"].implode())
    serving_leg = pl.col("request_id").is_in(serving["request_id"].implode())
    ended = pl.col("end").str.strip_prefix("request.").fill_null("unfinished")
    is_stalled = serving_leg | (any_leg & pl.col("end").is_null())
    return requests.with_columns(outcome=pl.when(is_stalled).then(pl.lit("stalled")).otherwise(ended))


def _stalls(stalled: pl.DataFrame) -> list[Stall]:
    return [
        Stall(
            request_id=row["request_id"],
            instance=row["instance"],
            status=row["status"] or "",
            since_s=row["num_tokens"] / NS_PER_S,
            waiting_on=row["cause"] or "",
            blocks_held=row["num_blocks"],
            block_seconds=row["num_blocks"] * (row["time_ns"] - row["num_tokens"]) / NS_PER_S,
            peer=row["peer"],
            transfer_id=row["transfer_id"],
            fault=row["fault"],
            ended=row["ended"],
        )
        for row in _with_numbers(stalled).iter_rows(named=True)
    ]


def _with_numbers(stalled: pl.DataFrame) -> pl.DataFrame:
    """By age; where the row leaves it open, a stall holds nothing and is as old as its proof."""
    return stalled.with_columns(
        pl.col("num_blocks").fill_null(0), pl.col("num_tokens").fill_null(pl.col("time_ns"))
    ).sort("num_tokens", maintain_order=True)


def _overdue(parked: pl.DataFrame) -> list[Overdue]:
    return [
        Overdue(
            request_id=row["request_id"],
            instance=row["instance"],
            since_s=row["time_ns"] / NS_PER_S,
            parked_s=row["parked_ns"] / NS_PER_S,
        )
        for row in parked.iter_rows(named=True)
    ]


def count_requests(found: Outcomes, unfaulted: pl.Series, explained: Collection[str]) -> Requests:
    """`unfaulted`: the requests whose failure no fault explains; `explained`: those that one has named or harmed."""
    table = found.requests
    counts = dict(table.group_by("outcome", maintain_order=True).len().rows())
    stalled = table.filter(pl.col("outcome") == "stalled")["request_id"]
    lost = {stall.request_id for stall in found.stalls if stall.ended is None}
    num_lost = sum(name in lost for name in stalled)
    failed = table.filter(pl.col("outcome") == "failed")["request_id"]
    failed_by_nobody = set(unfaulted)
    rejected = table.filter(pl.col("outcome") == "rejected")["request_id"]
    return Requests(
        total=table.height,
        finished=counts.get("finished", 0),
        failed=counts.get("failed", 0),
        aborted=counts.get("aborted", 0),
        rejected=counts.get("rejected", 0),
        stalled=len(stalled),
        overdue=len({wait.request_id for wait in found.overdue} - set(stalled)),
        lost=num_lost,
        held_up=len(stalled) - num_lost,
        unfinished=counts.get("unfinished", 0),
        failed_unfaulted=sum(name in failed_by_nobody and name not in explained for name in failed),
        rejected_unfaulted=sum(name not in explained for name in rejected),
    )


def count_reasons(requests: pl.DataFrame) -> list[Reason]:
    """Why requests failed, were aborted or rejected, the most frequent first."""
    rows = (
        requests.filter(pl.col("outcome").is_in(["failed", "aborted", "rejected"]))
        .group_by("outcome", pl.col("cause").fill_null(""), maintain_order=True)
        .len()
        .sort("len", "outcome", "cause", descending=[True, False, False], maintain_order=True)
        .rows()
    )
    return [Reason(outcome=outcome, cause=cause, count=count) for outcome, cause, count in rows]


def outcomes_of(requests: pl.DataFrame, names: Sequence[str]) -> Mapping[str, int]:
    rows = (
        requests.filter(pl.col("request_id").is_in(list(names)))
        .group_by("outcome", maintain_order=True)
        .len()
        .sort("outcome", maintain_order=True)
        .rows()
    )
    return dict(rows)


def followers(
    requests: pl.DataFrame, acted: pl.DataFrame, named: pl.Series, held_up: Collection[str] = ()
) -> list[str]:
    """Requests that came to harm no earlier than a fault acted on the instance which served or fed them (`acted`: its
    rows), or that it is known to have harmed or `held_up`; less the `named`: what harmed those is known."""
    is_harmed = pl.col("outcome").is_in(["failed", "stalled", "unfinished"]) | (
        (pl.col("outcome") == "rejected") & pl.col("cause").is_in([CONNECTION_REFUSED, PREFILL_FAILED])
    )
    harmed = requests.filter(is_harmed, ~pl.col("request_id").is_in(named.implode()))
    since = acted.drop_nulls("instance").group_by("instance", maintain_order=True).agg(since_ns=pl.col("time_ns").min())
    legs = pl.concat([harmed.select("request_id", "end_ns", instance=at) for at in ("serving", "producer")])
    later = legs.join(since, on="instance", maintain_order="left").filter(
        pl.col("end_ns").is_null() | (pl.col("end_ns") >= pl.col("since_ns"))
    )
    behind = harmed.filter(pl.col("request_id").is_in(list(held_up)))
    return pl.concat([later["request_id"], behind["request_id"]]).unique(maintain_order=True).to_list()


def latency(requests: pl.DataFrame) -> Latency:
    """TTFT counts to the first token on the serving instance; tpot needs two tokens."""
    answered = requests.filter(pl.col("outcome") != "stalled")
    finished = answered.filter(pl.col("outcome") == "finished")
    between = (pl.col("end_ns") - pl.col("first_token_ns")) / (pl.col("output_tokens") - 1)
    return Latency(
        ttft=_percentiles(answered, pl.col("first_token_ns") - pl.col("arrived_ns")),
        tpot=_percentiles(finished.filter(pl.col("output_tokens") > 1), between),
        e2e=_percentiles(finished, pl.col("end_ns") - pl.col("arrived_ns")),
    )


def _percentiles(requests: pl.DataFrame, nanoseconds: pl.Expr) -> Percentiles:
    values = requests.select(value=nanoseconds)["value"].drop_nulls()
    points: dict[str, Any] = {}
    for percent in (50, 90, 99):
        value = nearest_rank(values, percent)
        points[f"p{percent}"] = None if value is None else round(value * _SECONDS, 9)
    return Percentiles(**points, count=len(values))
