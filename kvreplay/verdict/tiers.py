"""What the tiers behind the GPU's pool did: sums over a trace's own rows."""

from typing import Final

import polars as pl

from kvreplay.checkers.frames import rows_of
from kvreplay.events import TIER_GAUGES
from kvreplay.ids import NS_PER_S
from kvreplay.verdict.model import Direction, Tiers

GPU: Final = "GPU"


def tiers(frame: pl.DataFrame, usage: pl.DataFrame) -> Tiers | None:
    """None where no instance has a CPU tier. `usage`: as `counts.usage_samples` makes it."""
    highest = _by_name(usage, pl.col("value").max().over("instance", "status"))
    medium = next((medium for medium, gauge in TIER_GAUGES.items() if f"num_{gauge}" in highest), None)
    if medium is None:
        return None
    gauge = TIER_GAUGES[medium]
    total = dict(usage.group_by("status", maintain_order=True).agg(pl.col("grown").sum()).rows())
    loads = _loads(frame)
    started = loads.filter(pl.col("kind") == "load.started")
    lost = int(started.select(pl.min_horizontal("num_tokens", "lost")).sum().item())
    by_tier = dict(
        started.group_by("tier", maintain_order=True)
        .agg(pl.col("num_tokens").sum())
        .sort("tier", maintain_order=True)
        .rows()
    )
    return Tiers(
        hit_tokens={GPU: total.get("hit_tokens", 0), **by_tier},
        saved_tokens=sum(by_tier.values()) - lost,
        medium=medium,
        cpu_chunks=highest[f"num_{gauge}"],
        peak_cpu_chunks=highest.get(gauge, 0),
        stored=_direction(total, "store", rows_of(frame, _kinds("store"), "kind").collect()),
        loaded=_direction(total, "load", loads),
        flushed_jobs=total.get("flushed_jobs", 0),
        refused_offers=total.get("refused_offers", 0),
        evicted_chunks=_evicted(frame),
    )


def _by_name(usage: pl.DataFrame, value: pl.Expr) -> dict[str, int]:
    """Per name the sum over instances of a value that each has once."""
    each = usage.select("instance", "status", result=value).unique(maintain_order=True)
    return dict(each.group_by("status", maintain_order=True).agg(pl.col("result").sum()).rows())


def _kinds(what: str) -> list[str]:
    return [f"{what}.{outcome}" for outcome in ("started", "finished", "failed")]


def _loads(frame: pl.DataFrame) -> pl.DataFrame:
    """Loads from a tier: kind, num_tokens, tier, lost: what a failure that follows took back, local hits included.

    What follows a load's start is about that load.
    """
    rows = rows_of(frame, _kinds("load"), "instance", "request_id", "kind", "num_tokens", "status").collect()
    source = pl.when(pl.col("kind") == "load.started").then(pl.col("status").fill_null(""))
    tier = source.forward_fill().over("instance", "request_id")
    has_failed = pl.col("kind").shift(-1).over("instance", "request_id") == "load.failed"
    lost = pl.when(has_failed).then(pl.col("num_tokens").shift(-1).over("instance", "request_id")).otherwise(0)
    return rows.select("kind", "num_tokens", tier=tier, lost=lost).filter(pl.col("tier") != "")


def _direction(total: dict[str, int], what: str, jobs: pl.DataFrame) -> Direction:
    count = dict(jobs.group_by("kind", maintain_order=True).len().rows())
    return Direction(
        bytes=total.get(f"{what}_bytes", 0),
        seconds=total.get(f"{what}_ns", 0) / NS_PER_S,
        started=count.get(f"{what}.started", 0),
        finished=count.get(f"{what}.finished", 0),
        failed=count.get(f"{what}.failed", 0),
    )


def _evicted(frame: pl.DataFrame) -> dict[str, dict[str, int]]:
    rows = rows_of(frame, ["block.evicted"], "status", "cause", "num_blocks").collect()
    found: dict[str, dict[str, int]] = {}
    of_tiers = rows.filter(pl.col("status").is_not_null())
    for tier, cause, count in (
        of_tiers.group_by("status", "cause", maintain_order=True)
        .agg(pl.col("num_blocks").sum())
        .sort("status", "cause", maintain_order=True)
        .rows()
    ):
        found.setdefault(tier, {})[cause] = count
    return found
