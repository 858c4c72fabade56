"""A connector that answers from a script: which tokens are held outside, when a load ends, and how."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvreplay.engine.connector import KVConnectorOutput, PlainSchedulerHalf, RequestBlocks
from kvreplay.engine.request import Request, RequestStatus

TOTAL = "total"
EXTRA = "extra"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestScript:
    """What the connector says and does about one request.

    `tokens` leading prompt tokens are held outside (mode `total`), or that many beyond any local hit (`extra`).
    `defer` lookups are answered "ask later" first; after `times` loads nothing is offered any more. Steps of
    `recv_after`, `invalid_after`, `failed_after` count from the step that allocated the load, of `send_after` from
    the step that finished the request; `invalid` are (group, index) places in its block table.
    """

    tokens: int = 0
    mode: str = TOTAL
    is_async: bool = False
    defer: int = 0
    times: int | None = None
    recv_after: int | None = None
    invalid: tuple[tuple[int, int], ...] = ()
    invalid_after: int | None = None
    failed_after: int | None = None
    repeat: bool = False
    delay_free: str | bool = False
    send_after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvents:
    """Reports that ride on one step's output, whatever the requests' own scripts say."""

    finished_recving: tuple[str, ...] = ()
    finished_sending: tuple[str, ...] = ()
    failed_recving: tuple[str, ...] = ()
    invalid: tuple[tuple[str, int, int], ...] = ()
    invalid_ids: tuple[int, ...] = ()


class SchedulerView(Protocol):
    """What the script needs to see of the scheduler to resolve places and drop reports of forgotten requests."""

    requests: dict[str, Request]

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]: ...


class ScriptedConnector(PlainSchedulerHalf):
    """Scheduler side and workers in one: `step` is set by the driver before each step."""

    lookup_is_pure = False
    completes_failed_loads = False

    def __init__(
        self,
        scripts: Mapping[str, RequestScript],
        events: Mapping[int, list[StepEvents]],
        *,
        requires_kv_delivery: bool = False,
    ) -> None:
        self.requires_kv_delivery = requires_kv_delivery
        self.step = 0
        self.lookups: list[list[Any]] = []
        self.allocations: list[list[Any]] = []
        self._scripts = scripts
        self._events = events
        self._deferrals = {request_id: script.defer for request_id, script in scripts.items()}
        self._num_loads: dict[str, int] = {}
        self._pending: list[tuple[int, str, Any]] = []

    @property
    def has_pending(self) -> bool:
        """Whether a report is still to come from what has been started."""
        return bool(self._pending)

    # -- the scheduler's half ---------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None: ...

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        script = self._scripts[request.request_id]
        tokens = self._matched(request.request_id, script, num_computed_tokens)
        is_async = script.is_async and bool(tokens)
        self.lookups.append([request.request_id, num_computed_tokens, tokens, is_async])
        return tokens, is_async

    def _matched(self, request_id: str, script: RequestScript, num_computed_tokens: int) -> int | None:
        if not script.tokens and not script.defer:
            return 0
        if self._deferrals[request_id] > 0:
            self._deferrals[request_id] -= 1
            return None
        if script.times is not None and self._num_loads.get(request_id, 0) >= script.times:
            return 0
        if script.mode == EXTRA:
            return script.tokens
        return max(0, script.tokens - num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: RequestBlocks, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        request_id = request.request_id
        script = self._scripts[request_id]
        loads = self._num_loads[request_id] = self._num_loads.get(request_id, 0) + 1
        self.allocations.append([request_id, num_external_tokens, [list(ids) for ids in blocks.get_block_ids()]])
        if script.is_async and script.recv_after is not None:
            self._later(script.recv_after, "recv", request_id)
        if loads == 1 or script.repeat:
            if script.invalid:
                after = script.invalid_after
                if after is None:
                    after = (script.recv_after or 0) if script.is_async else 0
                self._later(after, "invalid", [(request_id, group, index) for group, index in script.invalid])
            if script.failed_after is not None:
                self._later(script.failed_after, "failed", request_id)

    def build_connector_meta(self, out: object) -> None:
        return None

    def request_finished(self, request: Request, blocks: RequestBlocks) -> bool:
        script = self._scripts[request.request_id]
        complete = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        if script.delay_free == "always" or (script.delay_free and complete):
            if script.send_after is not None:
                self._later(script.send_after, "send", request.request_id)
            return True
        return False

    def _later(self, steps: int, kind: str, what: object) -> None:
        self._pending.append((self.step + steps, kind, what))

    # -- the workers' half ------------------------------------------------------------------------------------

    def take_reports(self, view: SchedulerView) -> KVConnectorOutput | None:
        """What rides on this step's output, ids in order of arrival; None if there is nothing."""
        recving: dict[str, None] = {}
        sending: dict[str, None] = {}
        failed: dict[str, None] = {}
        invalid: dict[int, None] = {}
        places: list[tuple[str, int, int]] = []
        for event in self._events.get(self.step, ()):
            recving.update(dict.fromkeys(event.finished_recving))
            sending.update(dict.fromkeys(event.finished_sending))
            failed.update(dict.fromkeys(event.failed_recving))
            invalid.update(dict.fromkeys(event.invalid_ids))
            places += event.invalid
        due = [entry for entry in self._pending if entry[0] <= self.step]
        self._pending = [entry for entry in self._pending if entry[0] > self.step]
        for _, kind, what in due:
            if kind == "invalid":
                places += what
            elif kind == "send":
                sending[what] = None
            elif what in view.requests:  # a worker never reports what the scheduler has dropped
                (recving if kind == "recv" else failed)[what] = None
        for request_id, group, index in places:
            table = view.get_block_ids(request_id)[group]
            if index < len(table):
                invalid[table[index]] = None
        output = KVConnectorOutput(
            _by_arrival(sending, view), _by_arrival(recving, view), _by_arrival(failed, view), sorted(invalid)
        )
        return output or None


def _by_arrival(request_ids: Iterable[str], view: SchedulerView) -> list[str]:
    rank = {request_id: index for index, request_id in enumerate(view.requests)}
    return sorted(request_ids, key=lambda request_id: (rank.get(request_id, len(rank)), request_id))
