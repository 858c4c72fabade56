"""What was computed again, evicted and loaded, and how busy each instance was: sums over a trace's own rows."""

from collections.abc import Mapping
from typing import Final

import polars as pl

from kvreplay.checkers.frames import rows_of
from kvreplay.ids import NS_PER_S
from kvreplay.verdict.model import Evicted, Instance, Loads, Recomputed, Series, Speculative

COUNTERS: Final = (
    *("steps", "busy_ns", "computed_tokens", "loaded_tokens", "preemptions"),
    *("drafts", "draft_tokens", "accepted_tokens"),
    *("hit_tokens", "store_bytes", "store_ns", "load_bytes", "load_ns", "flushed_jobs", "refused_offers"),
)
GAUGES: Final = ("blocks", "running", "queued", "deferred")

OVERLOADED_UTILISATION: Final = 0.95
MIN_QUEUED_SAMPLES: Final = 3
MAX_SERIES_POINTS: Final = 360


def recomputed(frame: pl.DataFrame) -> Recomputed:
    rows = rows_of(frame, ["tokens.recomputed"], "instance", "cause", "num_tokens").collect()
    by_cause = _sums(rows, "cause", "num_tokens")
    return Recomputed(
        total=sum(by_cause.values()),
        by_cause=by_cause,
        by_instance=_nested_sums(rows, "instance", "cause", "num_tokens"),
    )


def evicted(frame: pl.DataFrame) -> Evicted:
    rows = (
        rows_of(frame, ["block.evicted"], "instance", "cause", "group", "num_blocks", "status")
        .filter(pl.col("status").is_null())  # of the GPU's pool
        .with_columns(pl.col("group").fill_null(0).cast(pl.String))
        .collect()
    )
    by_cause = _sums(rows, "cause", "num_blocks")
    return Evicted(
        total=sum(by_cause.values()),
        by_cause=by_cause,
        by_group=_sums(rows, "group", "num_blocks"),
        by_group_and_cause=_nested_sums(rows, "group", "cause", "num_blocks"),
        by_instance=_nested_sums(rows, "instance", "cause", "num_blocks"),
    )


def loads(frame: pl.DataFrame) -> Loads:
    kinds = ["load.started", "load.finished", "load.failed", "pull.sent", "pull.settled"]
    leg = ("instance", "request_id")
    rows = rows_of(frame, kinds, "kind", *leg, "num_tokens", "status", "cause", "cause_seq").collect()
    count = dict(rows.group_by("kind", maintain_order=True).len().rows())
    # Asked again, it follows from a reply; given up before it could be asked, it follows from nothing.
    again = rows.filter(pl.col("kind") == "pull.sent", pl.col("cause_seq").is_not_null()).height
    unsent = rows.filter(pl.col("kind") == "pull.settled", pl.col("cause_seq").is_null()).height
    tokens = _sums(rows, "kind", "num_tokens")
    # The parts of a load may fail one after the other: it has failed once, for the first reason.
    number = (pl.col("kind") == "load.started").cum_sum().over(leg)
    failed = rows.with_columns(number=number).filter(pl.col("kind") == "load.failed")
    failed = failed.unique([*leg, "number"], keep="first", maintain_order=True)
    failed_pulls = rows.filter(pl.col("kind") == "pull.settled", pl.col("status") == "failed")
    return Loads(
        started=count.get("load.started", 0),
        finished=count.get("load.finished", 0),
        failed=failed.height,
        finished_tokens=tokens.get("load.finished", 0),
        failed_tokens=tokens.get("load.failed", 0),
        failed_by_cause=_lengths(failed, "cause"),
        pulls_sent=count.get("pull.sent", 0) - again,
        pulls_settled=count.get("pull.settled", 0) - unsent,
        pulls_unsent=unsent,
        pulls_failed_by_cause=_lengths(failed_pulls, "cause"),
    )


def speculative(frame: pl.DataFrame, usage: pl.DataFrame) -> Speculative | None:
    """None where no instance speculates."""
    by_name: dict[str, int] = dict(usage.group_by("status", maintain_order=True).agg(pl.col("grown").sum()).rows())
    if "drafts" not in by_name:
        return None
    drafts, drafted, accepted = (by_name[name] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    again = rows_of(frame, ["draft.recomputed"], "request_id", "num_tokens").collect()
    tokens, requests = int(again["num_tokens"].sum()), again["request_id"].n_unique()
    return Speculative(
        num_drafts=drafts,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        draft_acceptance_rate=round(accepted / drafted, 6) if drafted else None,
        mean_acceptance_length=round(1 + accepted / drafts, 6) if drafts else None,
        num_recomputed_tokens=tokens,
        num_recomputed_requests=requests,
        recomputed_tokens_per_request=round(tokens / requests, 6) if requests else None,
    )


def _sums(rows: pl.DataFrame, key: str, value: str) -> dict[str, int]:
    return dict(
        rows.group_by(pl.col(key).fill_null(""), maintain_order=True)
        .agg(pl.col(value).sum())
        .sort(key, maintain_order=True)
        .rows()
    )


def _lengths(rows: pl.DataFrame, key: str) -> dict[str, int]:
    return dict(
        rows.group_by(pl.col(key).fill_null(""), maintain_order=True).len().sort(key, maintain_order=True).rows()
    )


def _nested_sums(rows: pl.DataFrame, outer: str, inner: str, value: str) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    keys = [pl.col(outer).fill_null(""), pl.col(inner).fill_null("")]
    for first, second, total in (
        rows.group_by(keys, maintain_order=True).agg(pl.col(value).sum()).sort(outer, inner, maintain_order=True).rows()
    ):
        nested.setdefault(first, {})[second] = total
    return nested


# -- usage ----------------------------------------------------------------------------------------------------


def usage_samples(frame: pl.DataFrame) -> pl.DataFrame:
    """time_ns, instance, status, value; `grown` is what a counter gained since its last sample.

    A restarted instance counts from 0 again: then all of the new value is gain. One status is derived here: what is
    `queued` waits for capacity, which the deferred among the waiting do not.
    """
    gain = pl.col("value").diff().over("instance", "status")
    grown = pl.when(gain.is_null() | (gain < 0)).then(pl.col("value")).otherwise(gain)
    samples = rows_of(frame, ["usage"], "time_ns", "instance", "status", "num_tokens").rename({"num_tokens": "value"})
    waiting = pl.col("value").filter(pl.col("status") == "waiting").sum()
    deferred = pl.col("value").filter(pl.col("status") == "deferred").sum()
    queued = (
        samples.filter(pl.col("status").is_in(["waiting", "deferred"]))
        .group_by("time_ns", "instance", maintain_order=True)
        .agg(status=pl.lit("queued"), value=(waiting - deferred).clip(0))
    )
    return (
        pl.concat([samples, queued.select("time_ns", "instance", "status", "value")])
        .with_columns(grown=pl.when(pl.col("status").is_in(list(COUNTERS))).then(grown))
        .collect()
    )


def instances(
    frame: pl.DataFrame, usage: pl.DataFrame, roles: Mapping[str, str], virtual_ns: int, arrivals_ns: tuple[int, int]
) -> list[Instance]:
    """In the order of `roles`; an instance that only the trace knows comes last, without a role.

    `arrivals_ns`: when the first and the last request arrive.
    """
    busy_until = _busy_until(frame, usage)
    total = _pivot(usage, pl.col("grown").sum())
    highest = _pivot(usage, pl.col("value").max())
    arriving = usage.filter(pl.col("time_ns") <= arrivals_ns[1])
    names = dict.fromkeys([*roles, *usage["instance"].drop_nulls().unique(maintain_order=True)])
    return [
        Instance(
            id=name,
            role=roles.get(name, ""),
            steps=total.get((name, "steps"), 0),
            peak_blocks=max(highest.get((name, "peak_blocks"), 0), highest.get((name, "blocks"), 0)),
            preemptions=total.get((name, "preemptions"), 0),
            utilisation=round(total.get((name, "busy_ns"), 0) / virtual_ns, 6) if virtual_ns else 0.0,
            busy=_busy(total.get((name, "busy_ns"), 0), busy_until.get(name)),
            busy_until_s=busy_until[name] / NS_PER_S if name in busy_until else None,
            num_gpu_blocks=highest.get((name, "num_gpu_blocks"), 0),
            computed_tokens=total.get((name, "computed_tokens"), 0),
            loaded_tokens=total.get((name, "loaded_tokens"), 0),
            peak_running=highest.get((name, "running"), 0),
            peak_queued=highest.get((name, "queued"), 0),
            peak_deferred=highest.get((name, "deferred"), 0),
            overloaded=_overload(arriving.filter(pl.col("instance") == name), roles.get(name, ""), arrivals_ns[0]),
        )
        for name in names
    ]


def _busy_until(frame: pl.DataFrame, usage: pl.DataFrame) -> dict[str, int]:
    """Instance → ns (`Instance.busy_until_s`); those that never computed are missing."""
    samples = usage.filter(pl.col("status") == "busy_ns").with_columns(
        before_ns=pl.col("time_ns").shift(1).over("instance").fill_null(0)
    )
    last = (
        samples.filter(pl.col("grown") > 0)
        .group_by("instance", maintain_order=True)
        .agg(pl.col("time_ns", "before_ns", "grown").last())
    )
    signs = (
        rows_of(frame, ["request.first_token", "request.finished"], "instance", "time_ns")
        .rename({"time_ns": "sign_ns"})
        .collect()
        .join(last, on="instance", maintain_order="left")
        .filter(pl.col("sign_ns") > pl.col("before_ns"), pl.col("sign_ns") <= pl.col("time_ns"))
        .group_by("instance", maintain_order=True)
        .agg(pl.col("sign_ns").max())
    )
    # What it computed since the sample before takes it at least so far, whatever came of it.
    at_least = pl.max_horizontal("sign_ns", pl.col("before_ns") + pl.col("grown"))
    until = pl.when(pl.col("sign_ns").is_null()).then("time_ns").otherwise(at_least)
    return dict(last.join(signs, on="instance", how="left", maintain_order="left").select("instance", until).rows())


def _busy(busy_ns: int, until_ns: int | None) -> float | None:
    return None if not until_ns else round(min(busy_ns / until_ns, 1.0), 6)


def _pivot(usage: pl.DataFrame, value: pl.Expr) -> dict[tuple[str, str], int]:
    rows = usage.group_by("instance", "status", maintain_order=True).agg(value.alias("result")).rows()
    return {(instance, status): result for instance, status, result in rows if result is not None}


def _overload(arriving: pl.DataFrame, role: str, first_ns: int) -> str | None:
    """The rule is stated at `Instance.overloaded`. Arrivals begin at `first_ns`."""
    if arriving.is_empty():
        return None
    span_ns = _last_ns(arriving["time_ns"]) - first_ns
    busy = arriving.filter(pl.col("status") == "busy_ns")["grown"].sum() / max(span_ns, 1)
    if role == "prefill" and busy > OVERLOADED_UTILISATION:
        return f"computed {100 * min(busy, 1.0):.0f} % of the time"
    late = arriving.filter(pl.col("status") == "queued", (pl.col("time_ns") - first_ns) * 2 >= span_ns)["value"]
    if len(late) >= MIN_QUEUED_SAMPLES and int(late.min()) > 0:  # type: ignore[arg-type]
        return "its queue never emptied"
    return None


def _last_ns(time_ns: pl.Series) -> int:
    last = time_ns.max()
    assert isinstance(last, int)
    return last


def series(usage: pl.DataFrame, roles: Mapping[str, str]) -> list[Series]:
    """Pool use and queues over time per role, at most `MAX_SERIES_POINTS` points."""
    gauges = usage.filter(pl.col("status").is_in(list(GAUGES)), pl.col("instance").is_not_null())
    if gauges.is_empty():
        return []
    capacity = _pivot(usage.filter(pl.col("status") == "num_gpu_blocks"), pl.col("value").max())
    role_of = {name: roles.get(name, "") for name in gauges["instance"].unique(maintain_order=True)}
    filled = _filled(gauges.with_columns(point=_points(gauges["time_ns"])))
    table = (
        filled.with_columns(role=pl.col("instance").replace_strict(role_of, return_dtype=pl.String))
        .group_by("role", "status", "point", maintain_order=True)
        .agg(pl.col("value").sum())
        .sort("point", maintain_order=True)
    )
    found: list[Series] = []
    for role in dict.fromkeys([role for role in roles.values() if role in role_of.values()] + [*role_of.values()]):
        members = [name for name, its_role in role_of.items() if its_role == role]
        here = table.filter(pl.col("role") == role)
        lines = {gauge: here.filter(pl.col("status") == gauge) for gauge in GAUGES}
        values = {gauge: line["value"].to_list() for gauge, line in lines.items()}
        found.append(
            Series(
                role=role,
                num_instances=len(members),
                capacity_blocks=sum(capacity.get((name, "num_gpu_blocks"), 0) for name in members),
                time_s=[ns / NS_PER_S for ns in here["point"].unique(maintain_order=True).to_list()],
                **values,
            )
        )
    return found


def _points(time_ns: pl.Series) -> pl.Series:
    """The instant under which a sample is shown: its own, or the end of its slice if there would be too many."""
    if time_ns.n_unique() <= MAX_SERIES_POINTS:
        return time_ns
    slice_ns = _last_ns(time_ns) // MAX_SERIES_POINTS + 1
    return (time_ns // slice_ns + 1) * slice_ns


def _filled(gauges: pl.DataFrame) -> pl.DataFrame:
    """Every gauge of every instance at every point: where no sample was taken, the last one holds."""
    highest = gauges.group_by("instance", "status", "point", maintain_order=True).agg(
        pl.col("value").max(), last=pl.col("value").last()
    )
    lines = (
        highest.select("instance")
        .unique(maintain_order=True)
        .join(pl.DataFrame({"status": GAUGES}), how="cross", maintain_order="left")
    )
    grid = (
        highest.select("point")
        .unique(maintain_order=True)
        .sort("point", maintain_order=True)
        .join(lines, how="cross", maintain_order="left")
    )
    last = pl.col("last").forward_fill().over("instance", "status", order_by="point")
    return grid.join(highest, on=["instance", "status", "point"], how="left", maintain_order="left").with_columns(
        value=pl.coalesce("value", last.fill_null(0))
    )
