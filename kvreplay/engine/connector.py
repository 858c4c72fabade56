"""The connector protocol: the engine owns the interface that it calls.

Method names are vLLM's (vllm/distributed/kv_transfer/kv_connector/v1/base.py). One scheduler-side object lives in
the scheduler, one worker-side object in every rank; they talk through metadata (scheduler → workers, every step)
and `KVConnectorOutput` (workers → scheduler, every step).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvreplay.engine.request import Request

if TYPE_CHECKING:
    from kvreplay.engine.output import SchedulerOutput


@dataclass(slots=True)
class KVConnectorOutput:
    """What the workers report with one step's output (vllm/v1/outputs.py). Lists, in order of reporting."""

    finished_sending: list[str] = field(default_factory=list)
    finished_recving: list[str] = field(default_factory=list)
    failed_recving: list[str] = field(default_factory=list)
    invalid_block_ids: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.finished_sending or self.finished_recving or self.failed_recving or self.invalid_block_ids)


class RequestBlocks(Protocol):
    """A request's blocks, as the scheduler shows them to its connector. One inner list per KV cache group."""

    def get_block_ids(self) -> tuple[Sequence[int], ...]: ...

    def get_unhashed_block_ids_all_groups(self) -> tuple[Sequence[int], ...]:
        """Per group: leading null blocks dropped, then those without a hash (and not null)."""
        ...


class SchedulerConnector(Protocol):
    """The scheduler's half."""

    requires_kv_delivery: bool
    """A preempted request's output in flight is dropped instead of delivered (producers)."""

    @property
    def lookup_is_pure(self) -> bool:
        """`get_num_new_matched_tokens` answers the same until something is delivered to this instance or
        `lookup_version` grows, so that the scheduler may skip asking again while nothing has changed."""
        ...

    @property
    def lookup_version(self) -> int:
        """Grows whenever a lookup may be answered otherwise than before though nothing was delivered."""
        ...

    @property
    def needs_every_step(self) -> bool:
        """Steps must not be skipped, and each block that a step gives out must be told."""
        ...

    follows_windows: bool
    """It must see every step of a request whose blocks do not all stay with it."""
    completes_failed_loads: bool
    """A load that is reported as failed is also reported as finished, once nothing of it can arrive any more."""

    def on_new_request(self, request: Request) -> None: ...

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens available beyond `num_computed_tokens`, and whether they load asynchronously.

        None: ask again in the next step. The flag must be False if the count is 0.
        """
        ...

    def update_state_after_alloc(self, request: Request, blocks: RequestBlocks, num_external_tokens: int) -> None:
        """Called for every admission; decide on `num_external_tokens`, not on whether there are blocks.

        An asynchronous load sees two calls: at its start, and with 0 when it is admitted to run.
        """
        ...

    def needs_share(self, request_id: str) -> bool:
        """Whether the request must be shown in each of its steps, also while it only decodes."""
        ...

    def note_allocated(self, block_ids: Sequence[int]) -> None:
        """Blocks given out in this step to requests that have no share in it."""
        ...

    def note_uneventful(self) -> None:
        """Steps are over that were not built: requests have done nothing but decode, and taken blocks for it."""
        ...

    def build_connector_meta(self, out: "SchedulerOutput") -> Any:  # noqa: ANN401 - opaque to the engine
        """The step's metadata for the workers, or None if there is nothing to say.

        Exactly once per schedule(), before its shares count as computed.
        """
        ...

    def is_going_in_circles(self, request_id: str) -> bool:
        """Whether the request's lookups keep the connector busy without ever being decided."""
        ...

    def is_asked_in_vain(self, request_id: str, *, is_idle: bool) -> bool:
        """Whether the last lookup has the same answer until `lookup_version` grows, and asking again changes nothing.

        `is_idle`: nobody runs, and the prefix cache stays as it is.
        """
        ...

    def peer_of(self, request: Request) -> str | None:
        """The instance that is to send the request's KV, by what the request's parameters say; None: no other one."""
        ...

    def get_load_source(self, request_id: str) -> str | None:
        """The tier from which the request's last load comes; None where there are no tiers."""
        ...

    def loads_every_group(self, request_id: str) -> bool:
        """Whether the request's load brings all of its own blocks, also those that no prefix cache could hold.

        Asked once tokens have been offered (vLLM: get_loaded_kv_cache_group_ids).
        """
        ...

    def leaves_drafter_out(self, request_id: str) -> bool:
        """Whether the request's load brings nothing of the groups that are the drafter's alone."""
        ...

    def note_invalid(self, request: Request, num_tokens: int) -> None:
        """What the request has computed behind its first `num_tokens` tokens is wrong, also what is being stored."""
        ...

    def request_finished(self, request: Request, blocks: RequestBlocks) -> bool:
        """Before the request's blocks are freed; `blocks` are those that cover its computed tokens.

        True: the connector frees them, by `finished_sending`.
        """
        ...

    def update_connector_output(self, output: KVConnectorOutput) -> None: ...

    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping although it has no request."""
        ...

    def has_pending_block_frees(self) -> bool:
        """Some transfer will give blocks back soon: the scheduler then does not preempt."""
        ...

    def reset_cache(self) -> bool: ...


class PlainSchedulerHalf:
    """What a connector answers that has no say in how the engine steps (vLLM: KVConnectorBase_V1's defaults)."""

    lookup_version = 0
    needs_every_step = False
    completes_failed_loads = True
    follows_windows = False

    def needs_share(self, request_id: str) -> bool:
        return False

    def note_allocated(self, block_ids: Sequence[int]) -> None: ...

    def note_uneventful(self) -> None: ...

    def is_going_in_circles(self, request_id: str) -> bool:
        return False

    def is_asked_in_vain(self, request_id: str, *, is_idle: bool) -> bool:
        return False

    def peer_of(self, request: Request) -> str | None:
        return None

    def get_load_source(self, request_id: str) -> str | None:
        return None

    def loads_every_group(self, request_id: str) -> bool:
        return False

    def leaves_drafter_out(self, request_id: str) -> bool:
        return False

    def note_invalid(self, request: Request, num_tokens: int) -> None: ...

    def update_connector_output(self, output: KVConnectorOutput) -> None: ...

    def has_pending_push_work(self) -> bool:
        return False

    def has_pending_block_frees(self) -> bool:
        return False

    def reset_cache(self) -> bool:
        return True


class WorkerConnector(Protocol):
    """One rank's half. It acts on its own between steps, when messages and timers reach it."""

    def handle_preemptions(self, metadata: Any) -> None:  # noqa: ANN401
        """Before the step does anything to blocks: finish what still needs the old contents of some of them."""
        ...

    def start_load_kv(self, metadata: Any, compute_until_ns: int) -> int:  # noqa: ANN401
        """Start what the scheduler's half asked for in this step; `metadata` as its half built it (not None).

        `compute_until_ns`: when the step's forward pass is over if nothing delays it. Returns until when the connector
        holds up the step: an instant that is past if it does not, FOREVER_NS for good.
        """
        ...

    def get_finished(self, finished_req_ids: Sequence[str]) -> KVConnectorOutput | None:
        """What has accumulated since the last call, or None. Called at the end of each step, empty ones too."""
        ...

    def has_report(self) -> bool:
        """Whether `get_finished` would return something: a parked instance wakes for it."""
        ...

    def gives_back(self) -> bool:
        """Whether some of it lets go of blocks that an ended request still holds: who goes in circles may get on."""
        ...


class EngineWorkers(WorkerConnector, Protocol):
    """All ranks' halves, as an engine has them."""

    def failure_reason(self, request_id: str) -> str | None:
        """Why a load of this request failed; asked once."""
        ...

    def shutdown(self) -> None:
        """The process dies: nothing is heard, sent or timed any more."""
        ...
