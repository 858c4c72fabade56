"""What happened: the words shared by the engine, the trace and the checkers.

An `Event` is one row of a trace (schema version 1). `EventSink.emit` takes it; nothing here knows Parquet.
Kinds are a closed vocabulary. What `num_tokens`, `num_blocks`, `status` and the rest mean is fixed per kind,
in `KINDS`.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

SCHEMA_VERSION: Final = 1

DETAIL_RUN: Final = 0
"""Events that every trace has; only these enter the fingerprint."""
DETAIL_STEPS: Final = 1
DETAIL_BLOCKS: Final = 2
DETAIL_LEVELS: Final = {"run": DETAIL_RUN, "steps": DETAIL_STEPS, "blocks": DETAIL_BLOCKS}


class Event(NamedTuple):
    """One thing that happened, at one instant. Unused columns are None."""

    kind: str
    time_ns: int
    instance: str | None = None
    step: int | None = None
    request_id: str | None = None
    transfer_id: str | None = None
    peer: str | None = None
    rank: int | None = None
    group: int | None = None
    block_ids: Sequence[int] | None = None
    num_tokens: int | None = None
    num_blocks: int | None = None
    status: str | None = None
    cause: str | None = None
    cause_handle: int | None = None
    """Handle of the event that caused this one, as `emit` returned it; the trace turns it into `cause_seq`."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    priority: int | None = None
    prefix_hashes: Sequence[int] | None = None
    prefix_hash_tokens: int | None = None
    output_hash: int | None = None
    params: str | None = None


class EventSink(Protocol):
    """Where events go."""

    detail: int

    def emit(self, event: Event) -> int:
        """Take one event; returns a handle that a later event can name as its cause.

        Events of one instance come in the order in which they happened, but an instance may report a stretch of
        its past after another instance has reported a later moment. (time_ns, instance, step, arrival) orders all.
        """
        ...


class KindSpec(NamedTuple):
    detail: int
    meaning: str


_RUN, _STEPS, _BLOCKS = DETAIL_RUN, DETAIL_STEPS, DETAIL_BLOCKS

KINDS: Final[dict[str, KindSpec]] = {
    "request.arrived": KindSpec(
        _RUN,
        "a client sends a request (instance null); prompt_tokens, output_tokens, priority, prefix_hashes, "
        "prefix_hash_tokens, params",
    ),
    "request.routed": KindSpec(
        _RUN,
        "the proxy hands it on: instance = the one that serves the client (D of a pair), peer = the "
        "producer of the pair or null, transfer_id",
    ),
    "request.parked": KindSpec(
        _RUN, "enters WAITING_FOR_REMOTE_KVS; num_tokens = tokens promised by the connector, num_blocks = blocks held"
    ),
    "request.promoted": KindSpec(
        _RUN, "leaves WAITING_FOR_REMOTE_KVS; num_tokens = computed tokens it keeps, status = ok | failed"
    ),
    "request.preempted": KindSpec(
        _RUN, "loses its blocks to another; num_tokens = computed tokens lost, num_blocks = blocks given back"
    ),
    "request.first_token": KindSpec(_RUN, "its first output token on this instance is ready"),
    "request.finished": KindSpec(
        _RUN,
        "ends with its full output on this instance; num_tokens = output tokens, status = length | stop, "
        "output_hash = digest of the output",
    ),
    "request.failed": KindSpec(
        _RUN, "ends with FINISHED_ERROR on this instance; num_tokens = output tokens so far, cause"
    ),
    "request.aborted": KindSpec(
        _RUN, "instance null: a client asks for it; else: the instance has carried it out, num_tokens = output tokens"
    ),
    "request.rejected": KindSpec(_RUN, "refused before it was queued; cause"),
    "request.stalled": KindSpec(
        _RUN,
        "proven never to end; status = request status, num_tokens = ns instant since when, num_blocks = blocks "
        "held, cause = what it waits on, peer, transfer_id, cause_seq = the fault",
    ),
    "lookup": KindSpec(
        _RUN,
        "the connector's answer for a queued request, when it changed; num_tokens = external tokens, null = ask "
        "again later, status = sync | async | none, num_blocks = times the previous answer was given",
    ),
    "load.started": KindSpec(
        _RUN,
        "an external load begins; num_tokens, num_blocks = to be written, status = the tier that it comes from (the "
        "slowest of them) or null",
    ),
    "load.finished": KindSpec(_RUN, "reported complete by every worker; num_tokens external tokens"),
    "load.failed": KindSpec(
        _RUN,
        "the scheduler learns that it failed; num_tokens = tokens lost, status = request | blocks, block_ids, cause",
    ),
    "store.started": KindSpec(_RUN, "a copy out of the GPU pool is ordered; num_blocks, transfer_id"),
    "store.finished": KindSpec(_RUN, "that copy is acknowledged; num_blocks"),
    "store.failed": KindSpec(_RUN, "that copy failed; num_blocks, cause"),
    "pull.sent": KindSpec(
        _RUN,
        "a consumer asks a producer (peer) for a request's blocks; transfer_id, num_blocks, rank = peer i of k; "
        "the event that caused it: the reply after which it asks again",
    ),
    "pull.replied": KindSpec(
        _RUN,
        "a reply reaches the consumer and names (or covers) this request; status = FINISH | CONTINUE | ERROR | "
        "LAYOUT_MISS, cause = err_msg",
    ),
    "pull.settled": KindSpec(
        _RUN,
        "the pull with this peer is over for this request; status = ok | failed, cause; the event that caused it: the "
        "last that was sent or replied; none where the peer could not be asked at all, num_blocks for how many",
    ),
    "send.started": KindSpec(_RUN, "a producer starts to write to a consumer (peer); transfer_id, num_blocks"),
    "send.finished": KindSpec(_RUN, "the write returned; status = ok | failed, cause, num_blocks"),
    "send.expired": KindSpec(_RUN, "the producer gives up on being asked; transfer_id, num_blocks freed"),
    "bootstrap.queried": KindSpec(_RUN, "a consumer asks the bootstrap server of peer; num_tokens = attempt, from 1"),
    "bootstrap.answered": KindSpec(_RUN, "its answer, or what stands for it; status = ok | failed, cause"),
    "tokens.recomputed": KindSpec(
        _RUN,
        "num_tokens computed in this step although they had been there for a hit or were promised; cause = "
        "load-failure | preemption | eviction | full-hit-last-token, cause_seq = the load.failed or request.preempted",
    ),
    "draft.recomputed": KindSpec(
        _RUN,
        "num_tokens of a prompt that the drafter computes in this step, because a load has left out the blocks that "
        "are its alone; not among tokens.recomputed",
    ),
    "block.evicted": KindSpec(
        _RUN,
        "cached blocks that lost their hash since the last such row; num_blocks, group, cause = capacity | "
        "load-failure | reset | injected, status = null, or the tier whose chunks they are",
    ),
    "fault.injected": KindSpec(
        _RUN,
        "a fault fired; one row per request it names; status = fault name, cause = its spec, instance = where it "
        "acts, peer, transfer_id",
    ),
    "violation": KindSpec(
        _RUN,
        "a law is broken; status = checker, cause = detail, request_id, block_ids, group, transfer_id, "
        "cause_seq = the fault; num_tokens = ns at which it was broken, if it was found only at the end of the run",
    ),
    "engine.crashed": KindSpec(_RUN, "the replayed engine died; status = exception, cause = its message"),
    "usage": KindSpec(
        _RUN,
        "sampled every 10 s of virtual time and at the end, but no more where an instance's values have been the same "
        "for ten minutes; status names the value in num_tokens: gauges "
        "running, waiting, deferred, blocks (in use), peak_blocks; counters steps, busy_ns, computed_tokens, "
        "loaded_tokens, preemptions; constants num_gpu_blocks. With speculative decoding also the counters drafts "
        "(verified shares of steps), draft_tokens, accepted_tokens. With a CPU tier also cpu_chunks (in use), "
        "num_cpu_chunks, or disk_chunks and num_disk_chunks, and the counters hit_tokens (found in the GPU's prefix "
        "cache), store_bytes, store_ns, load_bytes, load_ns, flushed_jobs, refused_offers",
    ),
    "run.summary": KindSpec(
        _RUN, "the verdict; status = verdict, cause = JSON as `run --json` prints it, no wall clock"
    ),
    "step": KindSpec(
        _STEPS, "one scheduler step; num_tokens = scheduled tokens, num_blocks = requests in it, status = ns it takes"
    ),
    "request.scheduled": KindSpec(
        _STEPS,
        "a request's share of a step; num_tokens = tokens, num_blocks = computed before, status = of the drafts among "
        "them those that are right, and how many there are (2/3), or null",
    ),
    "block.allocated": KindSpec(_BLOCKS, "block_ids given to request_id, in order; group"),
    "block.cached": KindSpec(_BLOCKS, "block_ids enter the prefix cache; group"),
    "block.freed": KindSpec(
        _BLOCKS, "block_ids given back by request_id, in order; group, cause = null, or window: it goes on without them"
    ),
    "block.invalidated": KindSpec(_BLOCKS, "block_ids reported as failed to load; group"),
}

TERMINAL_KINDS: Final = ("request.finished", "request.failed", "request.aborted", "request.rejected")
"""The kinds that end a request on the instance they name (`request.rejected` also without one)."""
CONNECTION_REFUSED: Final = "connection refused"
"""Cause of a `request.rejected`: nobody listened at the instance."""
PREFILL_FAILED: Final = "prefill failed"
"""Another: its producer's leg has ended without a result, before the consumer's was sent."""
TIER_GAUGES: Final = {"CPU": "cpu_chunks", "STORAGE": "disk_chunks"}
"""Medium of the tier next to the GPU → the `usage` of what it holds; `num_` before it: of what it could hold."""
