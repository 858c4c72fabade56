"""What producers wrote into consumers' memory, how fast, and what nobody came for: sums over a trace's own rows.

Writes overlap. Together they bring so much in the time in which there was any of them; their bytes over the sum of
their times is what one of them gets (vllm#48224 printed that as the throughput).
"""

import polars as pl

from kvreplay.checkers.frames import rows_of
from kvreplay.ids import NS_PER_S
from kvreplay.verdict.model import Transfers


def transfers(frame: pl.DataFrame, block_bytes: int) -> Transfers | None:
    """None where nothing was to be transferred. `block_bytes`: of a block, over all ranks."""
    sends = rows_of(
        frame,
        ["send.started", "send.finished", "send.expired"],
        *("seq", "cause_seq", "time_ns", "kind", "instance", "request_id", "num_blocks", "status", "cause"),
    ).collect()
    if sends.is_empty():
        return None
    started = sends.filter(pl.col("kind") == "send.started")
    finished = sends.filter(pl.col("kind") == "send.finished")
    good = finished.filter(pl.col("status") == "ok")
    spans = (
        good.join(started.select(cause_seq="seq", start_ns="time_ns"), on="cause_seq", maintain_order="left")
        # Each rank writes its part of each block.
        .with_columns(num_bytes=pl.col("num_blocks") * block_bytes / pl.len().over("instance", "request_id"))
        .sort("start_ns", maintain_order=True)
    )
    num_bytes = int(spans["num_bytes"].sum())
    each_ns = int((spans["time_ns"] - spans["start_ns"]).sum())
    any_ns = _covered_ns(spans)
    failed = finished.filter(pl.col("status") != "ok")
    causes = (
        failed.group_by(pl.col("cause").fill_null(""), maintain_order=True)
        .len()
        .sort("cause", maintain_order=True)
        .rows()
    )
    return Transfers(
        started=len(started),
        finished=len(good),
        failed=len(failed),
        failed_by_cause=dict(causes),
        expired=len(sends) - len(started) - len(finished),
        bytes=num_bytes,
        seconds=any_ns / NS_PER_S,
        bytes_per_s=_rate(num_bytes, any_ns),
        bytes_per_s_each=_rate(num_bytes, each_ns),
    )


def _covered_ns(spans: pl.DataFrame) -> int:
    """How long there was at least one."""
    before = pl.col("time_ns").cum_max().shift(1).fill_null(0)
    from_ns = pl.max_horizontal("start_ns", before)
    return int(spans.select((pl.col("time_ns") - from_ns).clip(0).sum()).item())


def _rate(num_bytes: int, span_ns: int) -> float | None:
    return round(num_bytes * NS_PER_S / span_ns, 3) if span_ns else None
