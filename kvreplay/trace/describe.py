"""What is in a trace: the numbers behind `kvreplay info`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvreplay.errors import TraceError
from kvreplay.ids import NS_PER_S
from kvreplay.kv.content_index import ContentIndex
from kvreplay.trace.percentiles import nearest_rank
from kvreplay.trace.reader import Trace
from kvreplay.trace.workload import Arrival, Workload, read_workload

_PERCENTS = (50, 90, 99)


def describe(trace: Trace) -> dict[str, Any]:
    """The document that `info --json` prints; keys are only ever added."""
    metadata = trace.metadata
    notes = list(trace.warnings)
    workload = _workload(trace, notes)
    return {
        "file": str(trace.path),
        "schema_version": metadata.schema_version,
        "kvreplay_version": metadata.kvreplay_version,
        "source": dict(metadata.source),
        "t0_unix_ns": metadata.t0_unix_ns,
        "fingerprint": trace.fingerprint(),
        "span_s": _span_s(trace),
        "workload": describe_workload(workload),
        "instances": _instances(trace),
        "config": metadata.config,
        "seed": metadata.seed,
        "faults": metadata.faults,
        "profile": metadata.profile,
        "verdict": _verdict(trace),
        "events": trace.kind_counts,
        "notes": notes,
    }


def _workload(trace: Trace, notes: list[str]) -> Workload:
    """What can be replayed. Nothing in a damaged recording keeps the rest from being described."""
    try:
        return read_workload(trace)
    except TraceError as error:
        notes.append(f"cannot be replayed: {str(error).removeprefix(f'{trace.path}: ')}")
        return Workload(())


def describe_workload(workload: Workload) -> dict[str, Any]:
    """Requests, tokens and what they share."""
    arrivals = workload.arrivals
    prompts = np.array([arrival.prompt_tokens for arrival in arrivals], np.int64)
    outputs = np.array([arrival.output_tokens for arrival in arrivals], np.int64)
    span_s = (arrivals[-1].time_ns - arrivals[0].time_ns) / NS_PER_S if arrivals else 0.0
    shared = shared_prompt_tokens(arrivals)
    sessions = [arrival.params["session"] for arrival in arrivals if "session" in arrival.params]
    return {
        "requests": len(arrivals),
        "client_aborts": len(workload.aborts),
        "sessions": len(set(map(str, sessions))),
        "arrival_span_s": span_s,
        "requests_per_s": len(arrivals) / span_s if span_s else None,
        "prompt_tokens": _distribution(prompts),
        "output_tokens": _distribution(outputs),
        "prefix_hash_tokens": sorted({arrival.prefix_hash_tokens for arrival in arrivals if _has_hashes(arrival)}),
        "shared_prompt_tokens": shared,
        "prefix_sharing": shared / int(prompts.sum()) if len(prompts) else None,
    }


def _has_hashes(arrival: Arrival) -> bool:
    """Not a prompt that is one chunk: it says nothing about how fine the hashes are."""
    return arrival.prompt_tokens > arrival.prefix_hash_tokens


def _distribution(tokens: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, int | None]:
    if not len(tokens):
        return {"total": 0, **{f"p{percent}": None for percent in _PERCENTS}, "max": None}
    import polars as pl

    values = pl.Series(tokens)
    percentiles = {f"p{percent}": int(nearest_rank(values, percent) or 0) for percent in _PERCENTS}
    return {"total": int(tokens.sum()), **percentiles, "max": int(tokens.max())}


def shared_prompt_tokens(arrivals: Sequence[Arrival]) -> int:
    """Prompt tokens that an endless cache shared by all would already hold when the request arrives.

    Taken in order of arrival, each request with its whole output in the cache before the next.
    """
    index = ContentIndex(arrivals, hash_block_size=1)
    covered_end = [0] * index.num_segments
    shared = 0
    for request, arrival in enumerate(arrivals):
        content = index.content(request)
        ids, starts = content.segment_ids.tolist(), content.segment_starts.tolist()
        ends = [*starts[1:], content.num_tokens]
        is_prefix = True
        for segment, start, end in zip(ids, starts, ends, strict=True):
            covered = covered_end[segment]
            if is_prefix and start < arrival.prompt_tokens:
                shared += max(min(covered, end) - start, 0)
                is_prefix = covered >= end
            if covered < end:
                covered_end[segment] = end
    return shared


def _span_s(trace: Trace) -> float:
    times = trace.rows(tuple(trace.kind_counts), ["time_ns"])["time_ns"]
    return (times[-1].as_py() - times[0].as_py()) / NS_PER_S if len(times) else 0.0


def _instances(trace: Trace) -> list[dict[str, Any]]:
    """Every engine instance, its events (rows of the file) and the requests that ended on it."""
    import polars as pl

    rows = trace.rows(tuple(trace.kind_counts), ["instance", "kind"])
    frame = pl.DataFrame(pl.from_arrow(rows)).filter(pl.col("instance").is_not_null())
    grouped = frame.group_by("instance", maintain_order=True).agg(
        pl.len().alias("events"),
        (pl.col("kind") == "request.finished").sum().alias("finished"),
        (pl.col("kind") == "engine.crashed").sum().alias("crashes"),
    )
    return [
        {"id": row["instance"], "events": row["events"], "finished": row["finished"], "crashes": row["crashes"]}
        for row in grouped.sort("instance", maintain_order=True).to_dicts()
    ]


def _verdict(trace: Trace) -> str | None:
    summaries = trace.rows(["run.summary"], ["status"])["status"]
    verdict: str | None = summaries[-1].as_py() if len(summaries) else None
    return verdict
