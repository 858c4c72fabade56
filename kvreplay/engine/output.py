"""What one step schedules and what it brings back (vLLM: v1/core/sched/output.py, v1/outputs.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvreplay.engine.connector import KVConnectorOutput
from kvreplay.engine.request import Request
from kvreplay.kv.managers.mamba import BoundaryState
from kvreplay.kv.prefix_cache import BlockIds


@dataclass(slots=True, eq=False)
class Share:
    """A request's share of one step: `num_tokens` from position `start` on, the last `num_drafts` of them drafts."""

    request: Request
    start: int
    num_tokens: int
    admitted: bool
    """Whether it was admitted in this very step."""
    was_preempted: bool
    new_blocks: tuple[BlockIds, ...]
    """Blocks taken for it in this step, per group."""
    num_local_tokens: int = 0
    num_external_tokens: int = 0
    num_drafts: int = 0
    samples: bool = True
    """Whether the step samples a token for it: it does not end inside what is known."""
    is_stale: bool = False
    """The request was preempted while the step was in flight."""
    num_rejected: int = 0
    """Of its drafts; known when the step runs."""
    num_rolled_back: int = 0
    """Drafts of its request that had been found wrong when it was scheduled; what has been since lies before it."""
    drafter_start: int | None = None
    """From here on to `start` the drafter computes what a load has not brought for it."""
    tables: Sequence[BlockIds] | None = None
    """Its block tables when it was scheduled, where the step may run when the request has them no more."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def computed(self) -> tuple[int, int, int]:
        """Where it really computes: from, up to which its tokens are right, and its end."""
        start = self.start - self.request.num_rolled_back + self.num_rolled_back
        end = start + self.num_tokens
        return start, end - self.num_rejected, end


@dataclass(slots=True)
class SchedulerOutput:
    """One step. Requests that decode in lockstep are not in `shares`: they have one token each."""

    step: int
    shares: list[Share] = field(default_factory=list)
    num_lockstep: int = 0
    preempted: list[str] = field(default_factory=list)
    finished_req_ids: list[str] = field(default_factory=list)
    """Finished since the last schedule(), told to the workers."""
    has_sync_kv_loads: bool = False
    prefill_scheduled: bool = False
    """Whether a running request computes a chunk of its prompt."""
    skip_drafts: bool = False
    """Nobody could use the drafts that the step would propose."""
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(from, to): copied before the step writes."""
    blocks_to_zero: list[int] = field(default_factory=list)
    boundary_states: dict[str, list[BoundaryState]] = field(default_factory=dict)
    """Mamba states that a connector may save, by request."""
    kv_connector_metadata: Any = None
    total_num_scheduled_tokens: int = 0
    num_drafter_tokens: int = 0
    """Tokens that the drafter computes because a load has not brought them."""
    num_prefill_tokens: int = 0
    """Tokens of shares that are not a single decode token."""
    num_decodes: int = 0
    num_kv_tokens: int = 0
    """Tokens of context that decoding requests read."""
    num_accepted: Mapping[str, int] = field(default_factory=dict)
    """Request → drafts of its share that are right; known when the step runs."""
    made_progress: bool = False
    """Whether anything changed: a share, an admission into a load, a preemption, something to tell."""


class RequestOutput(NamedTuple):
    """What a client sees of one request after a step."""

    request: Request
    token_ids: list[int]
    finish_reason: str | None
    output_hash: int = 0
    """Of all that it has sampled, once it has finished."""


@dataclass(slots=True)
class ModelRunnerOutput:
    kv_connector_output: KVConnectorOutput | None = None
    num_accepted: Mapping[str, int] = field(default_factory=dict)
    """Request → drafts of its share that were right."""
