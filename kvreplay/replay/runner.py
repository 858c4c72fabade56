"""`run`: a trace in, a cluster played, a summary and perhaps a trace out."""

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvreplay.checkers.finding import RANK_AGREE, Finding
from kvreplay.checkers.frames import routes, rows_of
from kvreplay.checkers.output_equal import DigestsOf
from kvreplay.checkers.trace_checkers import check_trace
from kvreplay.errors import TraceError
from kvreplay.events import DETAIL_BLOCKS, DETAIL_RUN, Event
from kvreplay.faults.blame import Blame
from kvreplay.faults.plan import FaultPlan
from kvreplay.faults.record import FaultStatistics
from kvreplay.kv.content_index import ContentIndex
from kvreplay.kv.specs import block_bytes
from kvreplay.kv.torch_import import import_torch
from kvreplay.replay.cluster import Cluster, RunSettings, Watch, path_timers_ns
from kvreplay.replay.config import ReplayConfig, Role
from kvreplay.replay.config_load import LoadedConfig
from kvreplay.replay.presets import find_trace
from kvreplay.sim.envelope import RANK_REPORT
from kvreplay.trace.digest import file_digest
from kvreplay.trace.reader import Trace, read_trace
from kvreplay.trace.schema import MEMORY_SCHEMA, TraceMetadata, canonical_json, release_memory
from kvreplay.trace.workload import Workload, read_workload
from kvreplay.trace.writer import MemoryTrace, TraceWriter
from kvreplay.verdict.model import DEFAULT_FAIL_ON, InEffect, Summary
from kvreplay.verdict.summary import PlannedFault, RunFacts, summarise

Advance = Callable[[int, int], None]
"""(requests ended, virtual time in ns) → None."""
Progress = Callable[[int], AbstractContextManager[Advance]]
"""Number of requests → a context that shows how far they are."""

Transport: TypeAlias = Literal["virtual", "zmq"]
DEFAULT_TIME_SCALE: Final = 10.0
"""Virtual seconds in a real one, where time is real."""
_NO_FAULTS: Final = FaultPlan()
_JUDGED_COLUMNS: Final = tuple(
    name for name in MEMORY_SCHEMA.names if name not in ("prefix_hashes", "prefix_hash_tokens", "params", "priority")
)
"""What checkers and the summary look at; the rest would only fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What the user asked for."""

    trace: Path
    loaded: LoadedConfig
    plan: FaultPlan = _NO_FAULTS
    seed: int = 0
    limit: int | None = None
    detail: int = DETAIL_RUN
    output: Path | None = None
    baseline: bool = False
    fail_on: Sequence[str] = DEFAULT_FAIL_ON
    overdue_after_s: float = 10.0
    sets: Sequence[str] = ()
    behaviours: Sequence[str] = ()
    injected: Sequence[str] = ()
    plan_file: str | None = None
    transport: Transport = "virtual"
    time_scale: float = DEFAULT_TIME_SCALE
    single_steps: bool = False
    use_lockstep: bool = True


@dataclass(slots=True)
class RunResult:
    summary: Summary
    warnings: list[str] = field(default_factory=list)


def settle_imports(config: ReplayConfig) -> None:
    """For a process that is there for one run: import what that needs, and leave all of it to no garbage collection.

    Each would look at every object of torch, some 300,000, none of which is ever garbage.
    """
    if config.kv.check != "off":
        import_torch()
    gc.freeze()


def run_trace(options: RunOptions, trace: Trace, progress: Progress | None = None) -> RunResult:
    """Play the trace, and its faultless twin if `baseline`; write the output. The trace is read already, since its
    config may be the one to use."""
    workload = read_workload(trace, options.limit)
    release_memory()
    if not workload.arrivals:
        raise TraceError(f"{options.trace}: no request is left to replay")
    twin: Summary | None = None
    if options.baseline and options.plan:
        # First, since the output's summary holds the comparison.
        faultless = replace(options, plan=_NO_FAULTS, injected=(), plan_file=None, output=None)
        twin = _run_once(faultless, workload, progress)
    warnings = list(trace.warnings)
    return RunResult(_run_once(options, workload, progress, twin, warnings), warnings)


def _run_once(
    options: RunOptions,
    workload: Workload,
    progress: Progress | None,
    twin: Summary | None = None,
    warnings: list[str] | None = None,
) -> Summary:
    metadata = _metadata(options)
    with _sink(options, metadata) as sink, _progress(progress, workload) as advance:
        played = _play(options, workload, sink, advance)
        if warnings is not None:
            warnings += played.warnings
        gc.collect()  # the pools and buffers of the cluster, which is a knot of references
        summary = _summarise(options, played, workload, sink)
        if twin is not None:
            summary = summary.with_baseline(twin)
        sink.emit(Event("run.summary", played.end_ns, status=summary.verdict, cause=summary.to_json()))
    return summary


class _Played(NamedTuple):
    """What is left of a cluster once its course is in the sink."""

    end_ns: int
    roles: dict[str, Role]
    statistics: list[FaultStatistics]
    content_index: ContentIndex
    blame: Blame
    warnings: tuple[str, ...] = ()


def _play(options: RunOptions, workload: Workload, sink: MemoryTrace, advance: Advance) -> _Played:
    if options.transport == "zmq":
        return _play_remotely(options, workload, sink, advance)
    cluster = Cluster(_settings(options), workload, sink)
    cluster.run(_watch(sink, advance))
    advance(len(workload.arrivals), cluster.loop.now_ns)
    return _Played(
        cluster.loop.now_ns, cluster.roles, cluster.injector.statistics(), cluster.index, cluster.injector.blame
    )


def _play_remotely(options: RunOptions, workload: Workload, sink: MemoryTrace, advance: Advance) -> _Played:
    """In processes of their own, over sockets."""
    # Imported where processes are started: nobody else needs sockets.
    from kvreplay.replay.remote.supervisor import RemoteCluster

    cluster = RemoteCluster(
        _settings(options), workload, sink, trace=options.trace, limit=options.limit, scale=options.time_scale
    )
    cluster.run(_watch(sink, advance))
    advance(len(workload.arrivals), cluster.end_ns)
    return _Played(
        cluster.end_ns, cluster.roles, cluster.statistics(), cluster.index, cluster.injector.blame, cluster.warnings
    )


def _watch(sink: MemoryTrace, advance: Advance) -> Watch:
    def watch(num_ended: int, reported_ns: int) -> None:
        sink.advance(reported_ns)
        advance(num_ended, reported_ns)

    return watch


def _sink(options: RunOptions, metadata: TraceMetadata) -> AbstractContextManager[MemoryTrace]:
    if options.output is None:
        return nullcontext(MemoryTrace(metadata, options.detail))
    return TraceWriter(options.output, metadata, options.detail)


def _progress(progress: Progress | None, workload: Workload) -> AbstractContextManager[Advance]:
    if progress is None:
        return nullcontext(lambda num_ended, virtual_ns: None)
    return progress(len(workload.arrivals))


def _settings(options: RunOptions) -> RunSettings:
    return RunSettings(
        config=options.loaded.config,
        behaviour=options.loaded.behaviour,
        recompute=options.loaded.policy == "recompute",
        plan=options.plan,
        seed=options.seed,
        single_steps=options.single_steps,
        use_lockstep=options.use_lockstep,
    )


def _metadata(options: RunOptions) -> TraceMetadata:
    loaded = options.loaded
    return TraceMetadata(
        source={
            "tool": "kvreplay run",
            "options": {
                "policy": loaded.policy,
                "limit": options.limit,
                "behaviours": list(options.behaviours),
            },
            "inputs": [file_digest(options.trace)],
        },
        config=loaded.config.to_document(),
        seed=options.seed,
        faults=[fault.spec for fault in options.plan],
        profile=loaded.behaviour.profile,
    )


def _summarise(options: RunOptions, played: _Played, workload: Workload, sink: MemoryTrace) -> Summary:
    frame = sink.frame(_JUDGED_COLUMNS)
    findings = check_trace(frame, DETAIL_RUN, _digests(played.content_index, workload))
    # No rows: the rows of level run are the same at every level.
    fences = options.loaded.behaviour["transfer_fence"] == "attempt"
    of_blocks = _of_blocks(sink, findings, fences_attempts=fences) if sink.detail >= DETAIL_BLOCKS else []
    if findings:
        pairs = {row[0]: row[1:] for row in routes(frame).select("request_id", "producer", "serving").collect().rows()}
        for finding in findings:
            handle = _fault_behind(finding, played.blame, pairs.get(finding.request_id, ()))
            sink.emit(finding.to_event(handle, found_ns=played.end_ns))
        frame = sink.frame(_JUDGED_COLUMNS)
    facts = RunFacts(
        fingerprint=sink.fingerprint(),
        in_effect=in_effect(options),
        roles=dict(played.roles),
        faults=[
            PlannedFault(spec=fault.spec, name=fault.name, fired=statistics.fired)
            for fault, statistics in zip(options.plan, played.statistics, strict=True)
        ],
        block_bytes=block_bytes(options.loaded.config.model.groups),
        path_timers_ns=path_timers_ns(options.loaded.config),
    )
    return summarise(frame, facts, of_blocks)


def _of_blocks(sink: MemoryTrace, known: Sequence[Finding], *, fences_attempts: bool) -> list[Finding]:
    """What only the rows of blocks show."""
    frame = sink.block_frame(_JUDGED_COLUMNS)
    last_fault = dict(rows_of(frame, ["fault.injected"], "request_id", "seq").collect().rows())
    return [
        finding._replace(cause_seq=last_fault.get(finding.request_id))
        for finding in check_trace(frame, DETAIL_BLOCKS, fences_attempts=fences_attempts)
        if finding not in known
    ]


def _fault_behind(finding: Finding, blame: Blame, pair: Iterable[str | None]) -> int | None:
    """The handle of the fault that is most likely behind what a checker has found in the trace: one that named the
    request, else one that has harmed an instance of its pair for good."""
    if finding.request_id is None:
        return None
    handle = blame.of_request(finding.request_id, (RANK_REPORT,) if finding.checker == RANK_AGREE else ())
    return handle if handle is not None else blame.lasting_at([name for name in pair if name is not None])


def _digests(index: ContentIndex, workload: Workload) -> DigestsOf:
    places = {arrival.request_id: place for place, arrival in enumerate(workload.arrivals)}

    def digests(request_ids: Sequence[str], num_tokens: NDArray[np.int64]) -> NDArray[np.uint64]:
        requests = np.fromiter((places[request_id] for request_id in request_ids), np.int64, len(request_ids))
        return index.output_digests(requests, num_tokens)

    return digests


def in_effect(options: RunOptions) -> InEffect:
    loaded = options.loaded
    return InEffect(
        trace=options.trace.name,
        config=loaded.config_name,
        config_origin=loaded.origins.config,
        profile=loaded.behaviour.profile,
        profile_origin=loaded.origins.profile,
        policy=loaded.policy,
        policy_origin=loaded.origins.policy,
        seed=options.seed,
        limit=options.limit,
        injected=list(options.injected),
        plan=options.plan_file,
        settings=list(options.sets),
        behaviours=list(options.behaviours),
        fail_on=tuple(options.fail_on),
        overdue_after_s=options.overdue_after_s,
        transport=options.transport,
        time_scale=options.time_scale if options.transport == "zmq" else None,
    )


def open_trace(name_or_path: str) -> tuple[Path, Trace]:
    path = find_trace(name_or_path)
    return path, read_trace(path)


def trace_config(trace: Trace) -> str | None:
    """The config that the trace was made with, as JSON, or None."""
    config: Any = trace.metadata.config
    if config is None:
        return None
    return canonical_json(config)
