"""The summary of a run as typed data: what `--json` prints, a trace stores and every report shows.

The keys are an interface: they are only ever added to, and a new one has a default, so that summaries in
older traces still read. Times are in seconds of virtual time unless the name says otherwise.
"""

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from kvreplay.errors import TraceError
from kvreplay.verdict.exit_status import ExitStatus

Word: TypeAlias = Literal["passed", "violated", "stalled", "crashed"]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]

DEFAULT_FAIL_ON: Final = ("crashed", "stalled", "violated")


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by what became of them for their client.

    `total` is the sum of finished, failed, aborted, rejected, stalled and unfinished.
    """

    total: int
    finished: int
    failed: int
    aborted: int
    rejected: int
    stalled: int
    """Proven never to end while the faults last: `lost` + `held_up`."""
    overdue: int
    lost: int = 0
    """Stalled, and healing did not end them either."""
    held_up: int = 0
    """Stalled, but ended once the faults were taken away."""
    unfinished: int = 0
    """Neither ended nor proven stalled: lost on the way, or with a dead engine."""
    failed_unfaulted: int = 0
    """Failed though no fault named them, nor acted on their instances as a whole."""
    rejected_unfaulted: int = 0
    """Rejected though no fault named them, nor took their instance down."""


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests came to one outcome (failed, aborted, rejected) for one cause."""

    outcome: str
    cause: str
    count: int


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is proven never to end on one instance."""

    request_id: str
    instance: str | None
    status: str
    since_s: float
    waiting_on: str
    blocks_held: int
    block_seconds: float
    """Blocks held, times the time from `since_s` to the proof."""
    peer: str | None = None
    transfer_id: str | None = None
    fault: str | None = None
    """The last fault that named the request."""
    ended: str | None = None
    """What it came to after healing; None: lost for good."""
    implied: dict[str, int] = {}
    """Findings that the stall implies, by checker; they count nowhere else."""


class Overdue(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    instance: str | None
    since_s: float
    parked_s: float


class CircularWait(msgspec.Struct, frozen=True, kw_only=True):
    """A producer kept one request until its consumer had room for it, which had reserved that for another, which the
    producer had no room for. Only a timeout ends that."""

    producer: str
    consumer: str
    kept: str
    """The request that was computed and not asked for."""
    reserved: str
    """The one that was asked for and not computed."""
    since_s: float
    until_s: float


class Recomputed(msgspec.Struct, frozen=True, kw_only=True):
    total: int
    by_cause: dict[str, int]
    by_instance: dict[str, dict[str, int]] = {}


class Evicted(msgspec.Struct, frozen=True, kw_only=True):
    total: int
    by_cause: dict[str, int]
    by_group: dict[str, int]
    by_group_and_cause: dict[str, dict[str, int]] = {}
    by_instance: dict[str, dict[str, int]] = {}


class Loads(msgspec.Struct, frozen=True, kw_only=True):
    """External loads, as the scheduler saw them."""

    started: int = 0
    finished: int = 0
    failed: int = 0
    finished_tokens: int = 0
    failed_tokens: int = 0
    failed_by_cause: dict[str, int] = {}
    pulls_sent: int = 0
    pulls_settled: int = 0
    pulls_unsent: int = 0
    pulls_failed_by_cause: dict[str, int] = {}


class Transfers(msgspec.Struct, frozen=True, kw_only=True):
    """What producers wrote into consumers' memory: a write per request, rank and peer."""

    started: int = 0
    finished: int = 0
    failed: int = 0
    failed_by_cause: dict[str, int] = {}
    expired: int = 0
    """Blocks that nobody asked for in time and that their producer took back: no write, and no failure of one."""
    bytes: int = 0
    """In whole blocks of the pool, as far as they arrived."""
    seconds: float = 0.0
    """While there was any write."""
    bytes_per_s: float | None = None
    """All of them together, over `seconds`; None where that is 0."""
    bytes_per_s_each: float | None = None
    """One of them, on average over the time that it takes."""


class Direction(msgspec.Struct, frozen=True, kw_only=True):
    """Copies one way between the GPU's pool and the CPU tier, over all ranks; jobs are stores, and requests' loads."""

    bytes: int = 0
    seconds: float = 0.0
    """While its copies ran."""
    started: int = 0
    finished: int = 0
    failed: int = 0


class Tiers(msgspec.Struct, frozen=True, kw_only=True):
    """The tiers behind the GPU's pool, over all instances."""

    hit_tokens: dict[str, int] = {}
    """Tier (GPU, CPU, STORAGE) → tokens that admissions found there; a load counts for the slowest tier it needed."""
    saved_tokens: int = 0
    """Loaded from a tier instead of being computed."""
    medium: str = "CPU"
    """Of the tier next to the GPU: CPU, or STORAGE where that is a disk."""
    cpu_chunks: int = 0
    """That tier's."""
    peak_cpu_chunks: int = 0
    stored: Direction = Direction()
    loaded: Direction = Direction()
    flushed_jobs: int = 0
    """Copies that a step waited for, because their blocks were given away or taken back."""
    refused_offers: int = 0
    """Offers of chunks for which the CPU tier had no room; each is made again."""
    evicted_chunks: dict[str, dict[str, int]] = {}
    """Tier → cause → chunks."""


class Speculative(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding over all instances, under the names of vLLM's log line."""

    num_drafts: int = 0
    """Verifications: one for each request and step that has drafts, placeholders of a padded decode included."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_acceptance_rate: float | None = None
    """Accepted of the drafted tokens; None where there were none."""
    mean_acceptance_length: float | None = None
    """Tokens that a verification brings, the one that is always right included; None where there was none."""
    num_recomputed_tokens: int = 0
    """Of prompts that a load brought without the drafter's own blocks: computed by the drafter alone."""
    num_recomputed_requests: int = 0
    """How many requests that was for."""
    recomputed_tokens_per_request: float | None = None
    """None where there was none."""


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    checker: str
    time_s: float
    instance: str | None
    request_id: str | None
    block_id: int | None
    group: int | None
    transfer_id: str | None
    detail: str
    fault: str | None
    implied: dict[str, int] = {}


class FaultCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often one fault of the plan fired, and what became of the requests that it named."""

    spec: str
    fired: int
    requests: int
    name: str = ""
    outcomes: dict[str, int] = {}
    followed: dict[str, int] = {}
    """What became of requests that no fault named, and that came to harm (failed, rejected, stalled, unfinished) by
    this one: served or fed, no earlier than it acted, by an instance on which it acted as a whole, or whose engine then
    died of it; or held up by it."""
    fired_late: int = 0
    """Of an action on whole instances: how often it acted when every request had ended, which tests nothing."""
    acted_on: list[str] = []
    """Of such an action: the instances that it hit."""

    @property
    def has_tested(self) -> bool:
        """Whether it acted while there was anything that it could have harmed."""
        return self.fired > self.fired_late


class Crash(msgspec.Struct, frozen=True, kw_only=True):
    instance: str | None
    time_s: float
    step: int | None
    exception: str
    message: str
    fault: str | None = None
    """The last fault before it that acted there, or named a request that was served or fed there."""
    implied: dict[str, int] = {}


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Nearest rank: the measured value at index round(q * (count - 1)). None where nothing was measured."""

    p50: float | None
    p90: float | None
    p99: float | None
    count: int = 0


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Of requests that did not stall. ttft: of those with a first token; tpot, e2e: of those that finished."""

    ttft: Percentiles
    tpot: Percentiles
    e2e: Percentiles


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    role: str
    steps: int
    peak_blocks: int
    preemptions: int
    utilisation: float
    """Share of the virtual time in which it computed."""
    busy: float | None = None
    """Share of the time up to `busy_until_s` in which it computed; None if it never did."""
    busy_until_s: float | None = None
    """About when it computed last: an end or a first token there, or as far as its work takes it if that is later, if
    one lies between the sample of its usage that shows the last of its work and the one before; else that sample. What
    comes after is a wait for timers only."""
    num_gpu_blocks: int = 0
    computed_tokens: int = 0
    loaded_tokens: int = 0
    peak_running: int = 0
    peak_queued: int = 0
    peak_deferred: int = 0
    overloaded: str | None = None
    """Why it counts as overloaded, or None. Judged over the time in which requests arrive: it had requests queued
    at every sample of its second half (of three or more), or, if it only prefills, computed for more than 95 % of it.
    One that decodes computes whenever anybody is there, which says nothing."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges over time, summed over the instances of one role; each point is the highest of its samples."""

    role: str
    num_instances: int
    capacity_blocks: Count
    time_s: list[Annotated[float, msgspec.Meta(ge=0)]]
    blocks: list[Count]
    running: list[Count]
    queued: list[Count]
    """Waiting for capacity: those waiting less the deferred, which wait for their connector."""
    deferred: list[Count]

    def __post_init__(self) -> None:
        lengths = {len(line) for line in (self.time_s, self.blocks, self.running, self.queued, self.deferred)}
        if len(lengths) != 1 or not self.time_s:
            raise ValueError(f"series of {self.role}: lines of one and the same length expected")


class InEffect(msgspec.Struct, frozen=True, kw_only=True):
    """What a run was played with.

    An origin is the flag that set the value (`--config`), or says in words where it came from. Names are without
    folders, so that a trace does not depend on where it lies.
    """

    trace: str
    config: str
    config_origin: str
    profile: str
    profile_origin: str
    policy: str
    policy_origin: str
    seed: int = 0
    limit: int | None = None
    injected: list[str] = []
    plan: str | None = None
    settings: list[str] = []
    """`--set KEY=VALUE`."""
    behaviours: list[str] = []
    """`--behaviour NAME=VALUE`."""
    fail_on: tuple[str, ...] = DEFAULT_FAIL_ON
    overdue_after_s: float = 10.0
    transport: str = "virtual"
    time_scale: float | None = None
    """`--time-scale`; None in virtual time."""


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The same run without its faults."""

    fingerprint: str
    virtual_seconds: float
    requests: Requests
    recomputed_tokens: Recomputed
    computed_tokens: int
    loaded_tokens: int
    evicted_blocks: Evicted
    latency_s: Latency


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    verdict: Word
    exit_status: ExitStatus
    fingerprint: str
    seed: int
    profile: str
    virtual_seconds: float
    wall_seconds: float | None
    requests: Requests
    stalled: list[Stall]
    recomputed_tokens: Recomputed
    computed_tokens: int
    loaded_tokens: int
    evicted_blocks: Evicted
    violations: list[Violation]
    faults: list[FaultCount]
    crashes: list[Crash]
    latency_s: Latency
    instances: list[Instance]
    reason: str = ""
    reasons: list[Reason] = []
    overdue: list[Overdue] = []
    circular_waits: list[CircularWait] = []
    """Of ten seconds or more (`overdue_after_s`)."""
    loads: Loads = Loads()
    transfers: Transfers | None = None
    """None where nothing was to be transferred."""
    tiers: Tiers | None = None
    """None where there is no tier behind the GPU's pool."""
    speculative: Speculative | None = None
    """None where no instance speculates."""
    series: list[Series] = []
    in_effect: InEffect | None = None
    baseline: Baseline | None = None

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    def with_wall_seconds(self, wall_seconds: float | None) -> "Summary":
        return msgspec.structs.replace(self, wall_seconds=wall_seconds)

    def with_baseline(self, twin: "Summary") -> "Summary":
        """This run beside its faultless twin."""
        names = [field.name for field in msgspec.structs.fields(Baseline)]
        values: dict[str, Any] = {name: getattr(twin, name) for name in names}
        return msgspec.structs.replace(self, baseline=Baseline(**values))


def summary_from_json(text: str) -> Summary:
    """Read what `to_json` wrote, by this version or an older one. Raises TraceError on anything else."""
    try:
        return msgspec.json.decode(text, type=Summary)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TraceError(f"run.summary: not a summary that this version can read: {error}") from error
