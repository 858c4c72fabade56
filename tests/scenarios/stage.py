"""A small cluster on which stories are played: its config, its clients, and everything that then happens.

Numbers are round, so that a story's times can be worked out by hand: a step takes 10 ms whatever it does, a
message 1 ms, and bytes take no time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl

from kvreplay.behaviour import Behaviour, profile
from kvreplay.checkers.finding import Finding
from kvreplay.checkers.trace_checkers import check_trace, trace_checkers
from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.engine.config import CacheConfig, SchedulerConfig
from kvreplay.events import DETAIL_BLOCKS, DETAIL_RUN, KINDS, Event
from kvreplay.faults.plan import make_plan
from kvreplay.ids import NS_PER_MS
from kvreplay.kv.content_index import mix64
from kvreplay.kv.specs import KVCacheGroupSpec
from kvreplay.replay.cluster import Cluster, RunSettings
from kvreplay.replay.config import (
    ConnectorConfig,
    KvConfig,
    ModelConfig,
    Policy,
    ReplayConfig,
    Role,
    RoleConfig,
    TopologyConfig,
)
from kvreplay.replay.config_load import LoadedConfig, Origins
from kvreplay.replay.network import LinkTiming
from kvreplay.replay.runner import RunOptions, run_trace
from kvreplay.replay.timing import StepTiming
from kvreplay.trace.reader import read_trace
from kvreplay.trace.schema import MEMORY_SCHEMA, TraceMetadata
from kvreplay.trace.workload import Arrival, ClientAbort, Workload, write_workload
from kvreplay.verdict.model import Summary
from tests.list_sink import ListSink

BLOCK = 4
STEP_MS = 10
LINK_MS = 1
MAX_MODEL_LEN = 64
PREFIX_TOKENS = 4
"""Tokens per prefix hash: each block of a prompt has its own."""

TIMING = StepTiming(fixed_ns=STEP_MS * NS_PER_MS, per_prefill_token_ps=0, per_request_ns=0, per_kv_token_ps=0)
UNEVEN_TIMING = StepTiming(
    fixed_ns=7_000_001, per_prefill_token_ps=123_457_001, per_request_ns=10_007, per_kv_token_ps=1_003
)
"""Every step takes its own time, with fractions."""


Check = Literal["on", "off", "every-read"]
Sizes = tuple[int, int]

# -- the cluster ----------------------------------------------------------------------------------------------


def role(
    *,
    num_gpu_blocks: int = 33,
    timing: StepTiming = TIMING,
    enable_prefix_caching: bool = True,
    **scheduler: Any,  # noqa: ANN401 - fields of SchedulerConfig
) -> RoleConfig:
    settings: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 8, **scheduler}
    return RoleConfig(
        scheduler=SchedulerConfig(max_model_len=MAX_MODEL_LEN, **settings),
        cache=CacheConfig(num_gpu_blocks=num_gpu_blocks, enable_prefix_caching=enable_prefix_caching),
        timing=timing,
    )


def single(decode: RoleConfig | None = None, *, check: Check = "on") -> ReplayConfig:
    """One engine, E0."""
    return _cluster({"engine": decode or role()}, TopologyConfig(instances=1), ConnectorConfig(), check)


def pair(
    *,
    prefill: RoleConfig | None = None,
    decode: RoleConfig | None = None,
    check: Check = "on",
    ranks: tuple[Sizes, Sizes] = ((1, 1), (1, 1)),
    **mooncake: float | str,
) -> ReplayConfig:
    """One prefill and one decode instance, P0 and D0. `ranks`: tensor and pipeline parallel sizes of either."""
    connector = ConnectorConfig(kind="mooncake", options=MooncakeConfig(**mooncake))  # type: ignore[arg-type]
    roles: dict[Role, RoleConfig] = {"prefill": prefill or role(), "decode": decode or role()}
    (prefill_tp, prefill_pp), (decode_tp, decode_pp) = ranks
    topology = TopologyConfig(
        prefill=1,
        decode=1,
        prefill_tp=prefill_tp,
        prefill_pp=prefill_pp,
        decode_tp=decode_tp,
        decode_pp=decode_pp,
    )
    return _cluster(roles, topology, connector, check)


def _cluster(
    roles: dict[Role, RoleConfig], topology: TopologyConfig, connector: ConnectorConfig, check: Check
) -> ReplayConfig:
    return ReplayConfig(
        model=ModelConfig(
            name="tiny", groups=(KVCacheGroupSpec(block_size=BLOCK, bytes_per_token=1),), max_model_len=MAX_MODEL_LEN
        ),
        connector=connector,
        topology=topology,
        network=LinkTiming(latency_ns=LINK_MS * NS_PER_MS, bandwidth_bytes_per_s=10**15),
        kv=KvConfig(check=check),
        roles=roles,
    )


# -- the clients ----------------------------------------------------------------------------------------------


def prompt(chunks: Sequence[object], prompt_tokens: int, chunk_tokens: int = PREFIX_TOKENS) -> dict[str, Any]:
    """Chained prefix hashes of a prompt whose c-th chunk holds the text `chunks[c]`, as far as it is long.

    Two prompts share as many tokens as their chunks agree from the start; the last chunk may be partial.
    """
    count = -(-prompt_tokens // chunk_tokens)
    assert len(chunks) >= count, f"{count} chunks for {prompt_tokens} tokens"
    hashes, parent = [], 1
    for place, chunk in enumerate(chunks[:count]):
        length = min(chunk_tokens, prompt_tokens - place * chunk_tokens)
        parent = mix64(parent, *str(chunk).encode(), length)
        hashes.append(parent)
    return {
        "prompt_tokens": prompt_tokens,
        "prefix_hashes": np.array(hashes, np.uint64),
        "prefix_hash_tokens": chunk_tokens,
    }


def request(
    name: str,
    at_ms: float = 0,
    *,
    prompt_tokens: int = 8,
    output_tokens: int = 3,
    text: Sequence[object] | str = "",
    **params: Any,  # noqa: ANN401 - the arrival's params
) -> Arrival:
    """`text`: a chunk per character; nothing in common with anyone else without it."""
    chunks = text or [f"{name}{place}" for place in range(-(-prompt_tokens // PREFIX_TOKENS))]
    return Arrival(
        request_id=name,
        time_ns=round(at_ms * NS_PER_MS),
        output_tokens=output_tokens,
        params=params,
        **prompt(chunks, prompt_tokens),
    )


def workload(*arrivals: Arrival, aborts: Iterable[tuple[str, float]] = ()) -> Workload:
    """In order of time. `aborts`: (request, at which ms)."""
    by_time = sorted(arrivals, key=lambda arrival: arrival.time_ns)
    return Workload(tuple(by_time), tuple(ClientAbort(name, round(at * NS_PER_MS)) for name, at in aborts))


# -- the play -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Play:
    """A run that is over."""

    cluster: Cluster
    sink: ListSink
    behaviour: Behaviour = field(default_factory=lambda: profile("vllm-0.33"))

    @cached_property
    def events(self) -> list[Event]:
        """All of them, in the order of a trace; a cause is the place of its event in this list."""
        events = self.sink.events
        order = sorted(range(len(events)), key=lambda place: _order(events[place]))
        rank = {handle: place for place, handle in enumerate(order)}
        return [
            event._replace(cause_handle=rank[event.cause_handle]) if event.cause_handle is not None else event
            for event in (events[place] for place in order)
        ]

    def of(self, *kinds: str, instance: str | None = None, request_id: str | None = None) -> list[Event]:
        return [
            event
            for event in self.events
            if event.kind in kinds
            and (instance is None or event.instance == instance)
            and (request_id is None or event.request_id == request_id)
        ]

    def log(self, *kinds: str, instance: str | None = None, columns: Sequence[str] = ()) -> list[tuple[Any, ...]]:
        """(ms, kind, instance, request, ...) of each event, as the columns ask for."""
        return [
            (event.time_ns / NS_PER_MS, event.kind, event.instance, event.request_id)
            + tuple(getattr(event, column) for column in columns)
            for event in (self.of(*kinds, instance=instance) if kinds else self.events)
            if instance is None or event.instance == instance
        ]

    def story(self, *requests: str, detail: int = DETAIL_RUN) -> list[str]:
        """What happens, a line per event: ms, where, to whom, what, and its numbers and words.

        All events of this detail level but the usage samples; of these requests, if any are named.
        """
        return [
            _line(event)
            for event in self.events
            if KINDS[event.kind].detail <= detail
            and event.kind not in ("usage", "request.arrived")
            and (not requests or event.request_id in requests)
        ]

    def ends(self) -> dict[str | None, tuple[str, str | None, float]]:
        """Request → (last kind of end, instance, ms) as the client sees it."""
        served = {event.request_id: event.instance for event in self.of("request.routed")}
        kinds = ("request.finished", "request.failed", "request.aborted", "request.rejected", "request.stalled")
        return {
            event.request_id: (event.kind.removeprefix("request."), event.instance, event.time_ns / NS_PER_MS)
            for event in self.of(*kinds)
            if event.instance is not None and event.instance == served.get(event.request_id)
        }

    @property
    def violations(self) -> list[Event]:
        return self.of("violation")

    def broken_laws(self) -> list[Finding]:
        """What only the rows of blocks show."""
        empty = pl.DataFrame(MEMORY_SCHEMA.empty_table())
        rows = [
            {**event._asdict(), "prefix_hashes": None, "seq": seq, "cause_seq": event.cause_handle}
            for seq, event in enumerate(self.events)
        ]
        columns = {name: [row[name] for row in rows] for name in empty.columns}
        frame = pl.DataFrame(columns, schema=dict(empty.schema))
        of_blocks = {law.name for law in trace_checkers() if law.detail == DETAIL_BLOCKS}
        fences = self.behaviour["transfer_fence"] == "attempt"
        found = check_trace(frame, DETAIL_BLOCKS, fences_attempts=fences)
        return [finding for finding in found if finding.checker in of_blocks]

    def num_free(self, instance: str) -> int:
        (node,) = (node for node in self.cluster.nodes if node.name == instance)
        return node.instance.scheduler.pool.num_free


def _order(event: Event) -> tuple[int, str, int]:
    return event.time_ns, event.instance or "", -1 if event.step is None else event.step


_WORDS = {
    "peer": "peer",
    "num_tokens": "tokens",
    "num_blocks": "blocks",
    "status": "status",
    "cause": "cause",
    "block_ids": "ids",
}


def _line(event: Event) -> str:
    values = {word: getattr(event, column) for column, word in _WORDS.items()}
    return " ".join(
        [
            f"{round(event.time_ns / NS_PER_MS, 3):.12g}",
            event.instance or "-",
            event.request_id or "-",
            event.kind,
            *(f"{word}={value}" for word, value in values.items() if value is not None),
        ]
    )


def play(
    config: ReplayConfig,
    workload: Workload,
    *inject: str,
    behaviour: str = "vllm-0.33",
    recompute: bool = False,
    seed: int = 0,
    detail: int = DETAIL_BLOCKS,
    **settings: Any,  # noqa: ANN401 - fields of RunSettings
) -> Play:
    """Play the workload, with these faults. `behaviour`: a profile, and switches on top: `vllm-0.33 NAME=VALUE`."""
    sink = ListSink(detail)
    switched = in_effect(behaviour)
    cluster = Cluster(
        RunSettings(
            config=config,
            behaviour=switched,
            recompute=recompute,
            plan=make_plan(inject),
            seed=seed,
            **settings,
        ),
        workload,
        sink,
    )
    cluster.run()
    return Play(cluster, sink, switched)


def both_ways(
    config: ReplayConfig,
    workload: Workload,
    *inject: str,
    **settings: Any,  # noqa: ANN401 - as of `play`
) -> tuple[Play, Play]:
    """As it is played, and plainly: step by step, without lockstep."""
    quick, plain = (
        play(config, workload, *inject, single_steps=is_plain, use_lockstep=not is_plain, **settings)
        for is_plain in (False, True)
    )
    return quick, plain


def in_effect(behaviour: str) -> Behaviour:
    """A profile, and switches on top: `vllm-0.33 NAME=VALUE`."""
    name, *switches = behaviour.split()
    return reduce(Behaviour.with_switch, switches, profile(name))


def judge(
    folder: Path,
    config: ReplayConfig,
    workload: Workload,
    *inject: str,
    behaviour: str = "vllm-0.33",
    policy: Policy = "fail",
    **options: Any,  # noqa: ANN401 - fields of RunOptions
) -> Summary:
    """What a run of the workload comes to, as `kvreplay run` tells it. `behaviour`: as `play` has it."""
    path = folder / "workload.parquet"
    write_workload(path, workload, TraceMetadata(source={"tool": "test"}))
    loaded = LoadedConfig(
        config=config,
        config_name="tiny",
        behaviour=in_effect(behaviour),
        policy=policy,
        origins=Origins(config="test", profile="test", policy="test"),
    )
    settings = RunOptions(trace=path, loaded=loaded, plan=make_plan(inject), injected=inject, **options)
    return run_trace(settings, read_trace(path)).summary
