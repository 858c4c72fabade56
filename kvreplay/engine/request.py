"""A request inside one engine instance (vLLM: v1/request.py)."""

from enum import IntEnum
from typing import Any, Final

from kvreplay.kv.content import Content

UNDECIDED: Final = (None, False)
"""A connector's answer to a lookup: ask again."""


class RequestStatus(IntEnum):
    """vLLM's statuses in vLLM's order; everything after PREEMPTED is finished."""

    WAITING = 1
    WAITING_FOR_REMOTE_KVS = 3
    RUNNING = 5
    PREEMPTED = 6
    FINISHED_STOPPED = 7
    FINISHED_LENGTH_CAPPED = 8
    FINISHED_ABORTED = 9
    FINISHED_IGNORED = 10
    FINISHED_ERROR = 11

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED

    @property
    def is_parked(self) -> bool:
        return self is RequestStatus.WAITING_FOR_REMOTE_KVS


class Request:
    """One request's counters. `num_tokens` = prompt + output tokens so far; `num_computed_tokens` as vLLM's.

    While a request decodes in lockstep (`lockstep_since` is not None) its counters stand still and are derived
    from the step number; `Lockstep.settle` brings them up to date.
    """

    __slots__ = (
        "admitted_at",
        "arrival_ns",
        "arrival_order",
        "attempts",
        "clean_until",
        "content",
        "drafter_start",
        "drop_stale_output",
        "evicted_end",
        "failed_load_end",
        "failed_load_handle",
        "first_token_ns",
        "full_hit_end",
        "has_loaded_all",
        "is_loading",
        "is_never_loaded",
        "is_prefill_chunk",
        "kv_transfer_params",
        "last_scheduled_seq",
        "load_error",
        "lockstep_keys",
        "lockstep_order",
        "lockstep_since",
        "lookup_answer",
        "lookup_count",
        "lost_computed_end",
        "lost_computed_handle",
        "max_tokens",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_external_tokens",
        "num_in_flight_tokens",
        "num_output_placeholders",
        "num_output_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_rolled_back",
        "num_stale_output_tokens",
        "num_tokens",
        "output_taint",
        "parked_since_ns",
        "priority",
        "recompute_end",
        "request_id",
        "shared_prefix_boundary",
        "skip_reading_prefix_cache",
        "status",
        "stop_token_ids",
        "taint",
        "tainted_by",
        "transfer_id",
        "windows_written_until",
        "written_until",
    )

    def __init__(
        self,
        request_id: str,
        content: Content,
        *,
        num_prompt_tokens: int,
        max_tokens: int,
        arrival_ns: int = 0,
        priority: int = 0,
        stop_token_ids: tuple[int, ...] = (),
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> None:
        assert num_prompt_tokens > 0, request_id
        assert max_tokens > 0, request_id
        self.request_id = request_id
        self.content = content
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.arrival_ns = arrival_ns
        self.priority = priority
        self.stop_token_ids = stop_token_ids
        self.kv_transfer_params = kv_transfer_params
        self.transfer_id: str | None = (kv_transfer_params or {}).get("transfer_id")
        self.skip_reading_prefix_cache = False
        self.is_never_loaded = False
        """Its connector has lost a load without a word of its end: it is not asked again."""

        self.status = RequestStatus.WAITING
        self.num_tokens = num_prompt_tokens
        self.num_output_tokens = 0
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_external_tokens = 0
        """Tokens that its last external load was for."""
        self.num_preemptions = 0
        self.drafter_start: int | None = None
        """From here on its last load has brought nothing for the drafter, which computes that in its next step."""
        self.admitted_at = 0
        """Tokens that were there, hit or loaded, when it was last admitted to run: what comes after is computed."""
        self.is_prefill_chunk = False
        self.num_draft_tokens = 0
        """Drafts proposed for its next step."""
        self.num_rolled_back = 0
        """Drafts that have been found wrong."""
        self.num_output_placeholders = 0
        """With overlapping steps: tokens that steps in flight will sample, drafts included."""
        self.num_stale_output_tokens = 0
        """Tokens of steps that were in flight when it was preempted."""
        self.drop_stale_output = False
        """What they bring is dropped, not delivered."""
        self.last_scheduled_seq = 0
        """The last step with tokens that it was scheduled in, where frees wait for steps in flight."""
        self.shared_prefix_boundary = 0
        """Where its last lookup left a prefix that others share, but not every group holds; 0 for none."""
        self.arrival_order = 0
        """Place among the instance's requests, by arrival."""
        self.lockstep_since: int | None = None
        """Step from which on it advances by one token a step, or None."""
        self.lockstep_keys: Any = None
        """A memoryview of its content's block keys, while it is in lockstep."""
        self.lockstep_order = 0
        """Place in the running list, by admission."""

        # What the worker knows of its contents.
        self.is_loading = False
        """A connector may write into its blocks."""
        self.has_loaded_all = False
        """A load has brought what its blocks hold, of every group."""
        self.clean_until = 0
        """Positions below have been verified, or written by the request itself from verified contents."""
        self.written_until = 0
        self.windows_written_until = 0
        """The same in groups with a window, where that may come later."""
        self.taint = 0
        """0, or a digest of what wrong contents it has read: everything it writes from then on is wrong too."""

        self.tainted_by: Any = None
        """Where that began (engine.suspects.Origin)."""
        self.output_taint = 0
        """0, or its taint when it first sampled a token from wrong contents: its output is wrong from then on."""

        self.attempts = 0
        """Times that it was parked or preempted since it last sampled a token."""

        # What the accounts remember.
        self.first_token_ns: int | None = None
        self.parked_since_ns = 0
        self.failed_load_end = 0
        """Tokens below this were promised by a load that failed."""
        self.failed_load_handle: int | None = None
        self.lost_computed_end = 0
        """Tokens below this had been computed when the request was preempted."""
        self.lost_computed_handle: int | None = None
        self.evicted_end = 0
        """Tokens below this could have been hit if no block had been evicted."""
        self.full_hit_end = 0
        """Tokens below this were there, but the last token must be computed to sample from it."""
        self.recompute_end = 0
        """The largest of the four: from here on nothing is computed twice."""
        self.load_error: str | None = None
        """What the connector says of a failed load."""
        self.lookup_answer: object = None
        self.lookup_count = 0

    def forget_taint(self) -> None:
        """What it has read wrong is computed again, and so is what it wrote after that."""
        self.taint = 0
        self.tainted_by = None
        self.clean_until = 0  # what it is left with is looked at once more

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens})"
