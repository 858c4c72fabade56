"""The workload of a scheduler vector: the engine's settings, what arrives, what the scripted connector does, and when.

The JSON form is read into records here, so that whatever drives a scheduler through a workload, ours or the real one,
reads the same settings with the same defaults. The defaults are the vectors' own, not vLLM's.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct, field

from kvreplay.conformance.vector import Json, UnsupportedVectorError
from kvreplay.connectors.scripted.connector import RequestScript, ScriptedConnector, StepEvents
from kvreplay.errors import ConfigError

MAX_PROMPT_TOKENS: Final = 10_000_000

Count: TypeAlias = Annotated[int, Meta(ge=0)]
Positive: TypeAlias = Annotated[int, Meta(ge=1)]
Token: TypeAlias = Annotated[int, Meta(ge=0)]
Place: TypeAlias = tuple[Count, Count]
"""(group, index) in a request's block table."""


def sampled_token(position: int) -> int:
    """What the scripted model says at this position of any request."""
    return (position * 7 + 13) % 1000


class PromptParts(Struct, frozen=True):
    """A prompt that is described rather than listed; exactly one of these."""

    ramp: tuple[Token, Count] | None = None
    """(first, n): n tokens, each one more than the last."""
    const: tuple[Token, Count] | None = None
    """(token, n): the same token n times."""
    cat: "list[Prompt] | None" = None
    """One prompt after the other."""


Prompt: TypeAlias = list[Token] | PromptParts


class External(Struct, frozen=True):
    """What of a prompt's KV is held outside, and how it is loaded."""

    tokens: Count = 0
    mode: Literal["total", "extra"] = "total"
    is_async: bool = field(name="async", default=False)
    defer: Count = 0
    times: Count | None = None


class Load(Struct, frozen=True):
    """How the request's loads go, in steps after the one that allocated the blocks."""

    recv_after: Count | None = None
    invalid: list[Place] = []
    invalid_after: Count | None = None
    failed_after: Count | None = None
    repeat: bool = False


class RequestSpec(Struct, frozen=True):
    id: str
    prompt: Prompt
    arrive: Count = 0
    max_tokens: Positive = 4
    priority: int = 0
    stop: list[Token] | None = None
    salt: str | None = None
    external: Count | External | None = None
    load: Load | None = None
    delay_free: bool | Literal["always"] = False
    send_after: Count | None = None
    accept: Annotated[list[Count], Meta(min_length=1)] | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(_tokens(self.prompt))

    @property
    def needs_connector(self) -> bool:
        return self.external not in (None, 0, External()) or bool(self.delay_free)

    @property
    def script(self) -> RequestScript:
        external = self.external if isinstance(self.external, External) else External(tokens=self.external or 0)
        load = self.load or Load()
        return RequestScript(
            tokens=external.tokens,
            mode=external.mode,
            is_async=external.is_async,
            defer=external.defer,
            times=external.times,
            recv_after=load.recv_after,
            invalid=tuple(load.invalid),
            invalid_after=load.invalid_after,
            failed_after=load.failed_after,
            repeat=load.repeat,
            delay_free=self.delay_free,
            send_after=self.send_after,
        )


class StepEvent(Struct, frozen=True):
    """What happens in one step: aborts and resets before schedule(), `abort_mid` after it, reports with its output."""

    step: Count
    finished_recving: list[str] = []
    finished_sending: list[str] = []
    failed_recving: list[str] = []
    invalid: list[tuple[str, Count, Count]] = []
    invalid_ids: list[Count] = []
    abort: list[str] = []
    abort_mid: list[str] = []
    reset_prefix_cache: bool = False
    reset_running: bool = False

    @property
    def reports(self) -> StepEvents:
        return StepEvents(
            finished_recving=tuple(self.finished_recving),
            finished_sending=tuple(self.finished_sending),
            failed_recving=tuple(self.failed_recving),
            invalid=tuple(self.invalid),
            invalid_ids=tuple(self.invalid_ids),
        )

    @property
    def needs_connector(self) -> bool:
        return self.reports != StepEvents()


class GroupSpec(Struct, frozen=True):
    """One KV cache group; `type` is full, swa, mla, swa_mla, chunked_local, mamba or ring."""

    type: str = "full"
    block_size: Positive | None = None
    sliding_window: Positive | None = None
    chunk: Positive | None = None
    mode: str = "none"
    tokens_per_state: Positive = 1
    bounded_replay: bool = False
    spec_blocks: Count = 0
    extra_retained: Count = 0
    eagle: bool = False
    layers: Positive = 1
    head_size: Positive = 16


class Speculation(Struct, frozen=True):
    """Speculative decoding; the i-th verification of a request accepts `accept[i % len]` drafts, by default all."""

    tokens: Positive
    method: str = "eagle"
    accept: Annotated[list[Count], Meta(min_length=1)] | None = None
    mtp_layers: Positive = 1
    disable_block_drop: bool = False
    disable_lookahead_hashes: bool = False
    parallel_drafting: bool = False


class EngineSpec(Struct, frozen=True):
    """Settings under vLLM's names. `num_gpu_blocks` includes block 0, the null block."""

    num_gpu_blocks: Annotated[int, Meta(ge=2, le=10_000_000)]
    block_size: Positive = 16
    hash_block_size: Positive | None = None
    max_num_batched_tokens: Positive = 64
    max_num_scheduled_tokens: Positive | None = None
    max_num_seqs: Positive = 16
    max_num_active_seqs: Positive | None = None
    max_model_len: Positive = 1024
    long_prefill_token_threshold: Count = 0
    long_prefill_token_threshold_adaptive: bool = False
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduler_reserve_full_isl: bool = True
    watermark: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    policy: Literal["fcfs", "priority"] = "fcfs"
    prefill_schedule_interval: Positive = 1
    async_scheduling: bool = False
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    connector: bool | None = None
    requires_kv_delivery: bool = False
    divergent_hits: bool = False
    mamba_cache_mode: str = "none"
    retention_interval: Count | None = None
    hisparse_host_blocks: Count | None = None
    spec: Speculation | None = None
    groups: list[GroupSpec] = []


class Workload(Struct, frozen=True):
    engine: EngineSpec
    requests: list[RequestSpec]
    events: list[StepEvent] = []
    name: str = ""
    note: str = ""
    max_steps: Positive = 300
    idle_limit: Positive = 8

    @property
    def groups(self) -> list[GroupSpec]:
        return self.engine.groups or [GroupSpec()]

    @property
    def arrivals_by_step(self) -> dict[int, list[RequestSpec]]:
        by_step: dict[int, list[RequestSpec]] = {}
        for request in self.requests:
            by_step.setdefault(request.arrive, []).append(request)
        return by_step

    @property
    def events_by_step(self) -> dict[int, list[StepEvent]]:
        by_step: dict[int, list[StepEvent]] = {}
        for event in self.events:
            by_step.setdefault(event.step, []).append(event)
        return by_step

    @property
    def last_step(self) -> int:
        """The last one in which something arrives or happens of itself."""
        return max([0, *(request.arrive for request in self.requests), *(event.step for event in self.events)])

    @property
    def has_connector(self) -> bool:
        """As the engine's `connector` says; where it says nothing: whether anything needs one."""
        if self.engine.connector is not None:
            return self.engine.connector
        wanted = any(request.needs_connector for request in self.requests)
        return wanted or any(event.needs_connector for event in self.events)

    def scripted_connector(self) -> ScriptedConnector | None:
        if not self.has_connector:
            return None
        return ScriptedConnector(
            {request.id: request.script for request in self.requests},
            {step: [event.reports for event in events] for step, events in self.events_by_step.items()},
            requires_kv_delivery=self.engine.requires_kv_delivery,
        )


def read_workload(document: Json) -> Workload:
    """Raises ConfigError for what is wrong, UnsupportedVectorError for a key that no one here knows."""
    try:
        workload = msgspec.convert(document, Workload)
    except msgspec.ValidationError as error:
        raise ConfigError(f"workload: {_worded(error)}") from error
    for complaint in _complaints(workload):
        raise ConfigError(f"workload: {complaint}")
    for key in _unknown_keys(document, Workload, "workload"):
        raise UnsupportedVectorError(f"{key} is not known here")
    return workload


def _worded(error: msgspec.ValidationError) -> str:
    """`requests[0].id: expected str, got int`."""
    message, _, path = str(error).replace("`", "").partition(" - at $.")
    message = message[:1].lower() + message[1:]
    return f"{path}: {message}" if path else message


_NEEDED: Final = {"swa": "sliding_window", "swa_mla": "sliding_window", "chunked_local": "chunk"}


def _complaints(workload: Workload) -> Iterator[str]:
    for index, group in enumerate(workload.groups):
        needed = _NEEDED.get(group.type)
        if needed is not None and getattr(group, needed) is None:
            yield f"engine.groups[{index}]: {group.type} needs {needed}"
    seen: set[str] = set()
    num_groups = len(workload.groups)
    for index, request in enumerate(workload.requests):
        if request.id in seen:
            yield f"requests[{index}].id: {request.id!r} is there twice"
        seen.add(request.id)
        length = _length(request.prompt)
        if length is None:
            yield f"requests[{index}].prompt: expected exactly one of ramp, const and cat"
        elif not 0 < length <= MAX_PROMPT_TOKENS:
            yield f"requests[{index}].prompt: must have 1 to {MAX_PROMPT_TOKENS} tokens, got {length}"
        if any(group >= num_groups for group, _ in request.script.invalid):
            yield f"requests[{index}].load.invalid: there are {num_groups} groups, counted from 0"
    for index, event in enumerate(workload.events):
        if any(group >= num_groups for _, group, _ in event.invalid):
            yield f"events[{index}].invalid: there are {num_groups} groups, counted from 0"
        if any(block_id >= workload.engine.num_gpu_blocks for block_id in event.invalid_ids):
            yield f"events[{index}].invalid_ids: there are {workload.engine.num_gpu_blocks} blocks, counted from 0"


def _length(prompt: Prompt) -> int | None:
    """Tokens of a prompt, without listing them; None if it is none."""
    if isinstance(prompt, list):
        return len(prompt)
    given = [part for part in (prompt.ramp, prompt.const, prompt.cat) if part is not None]
    if len(given) != 1:
        return None
    if prompt.cat is None:
        return (prompt.ramp or prompt.const or (0, 0))[1]
    lengths = [_length(part) for part in prompt.cat]
    return None if None in lengths else sum(length or 0 for length in lengths)


def _tokens(prompt: Prompt) -> Iterator[int]:
    if isinstance(prompt, list):
        yield from prompt
    elif prompt.ramp is not None:
        first, length = prompt.ramp
        yield from ((first + index) % 30000 for index in range(length))
    elif prompt.const is not None:
        token, length = prompt.const
        yield from (token for _ in range(length))
    else:
        for part in prompt.cat or ():
            yield from _tokens(part)


_PARTS: Final[Mapping[type[Struct], Mapping[str, type[Struct]]]] = {
    Workload: {"engine": EngineSpec, "requests": RequestSpec, "events": StepEvent},
    EngineSpec: {"spec": Speculation, "groups": GroupSpec},
    RequestSpec: {"external": External, "load": Load},
}


def _unknown_keys(document: Json, record: type[Struct], where: str) -> Iterator[str]:
    """Keys that a record of this type does not read: to run without them would be to run something else."""
    if isinstance(document, list):
        for index, item in enumerate(document):
            yield from _unknown_keys(item, record, f"{where}[{index}]")
    elif isinstance(document, dict):
        for key, value in document.items():
            if key not in record.__struct_encode_fields__:
                yield f"{where}.{key}"
            elif key in _PARTS.get(record, {}):
                yield from _unknown_keys(value, _PARTS[record][key], f"{where}.{key}")
