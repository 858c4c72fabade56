"""A scheduler vector's workload with KV buffers and checkers on: what went wrong in it, and in which blocks.

A scripted load writes right contents, but garbage where its script says that a loaded block is invalid, or that the
whole load failed; what a step's events call invalid is a report and nothing more. An asynchronous load lands when it
is reported as finished, the last moment at which it may.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvreplay.behaviour import DEFAULT_PROFILE, Behaviour
from kvreplay.behaviour import profile as profile_named
from kvreplay.checkers.conservation import check_conservation, check_drained, snapshot_of
from kvreplay.checkers.finding import AGREE, CONTENT, FENCE, NO_FATAL, NULL_BLOCK, PROGRESS
from kvreplay.conformance.finding import VectorFinding
from kvreplay.conformance.scheduler_vectors import Driver, reason_unsupported
from kvreplay.conformance.vector import Json, UnsupportedVectorError
from kvreplay.conformance.workload import Workload, read_workload, sampled_token
from kvreplay.engine.agreement import beyond_known
from kvreplay.engine.connector import KVConnectorOutput
from kvreplay.engine.output import RequestOutput, SchedulerOutput, Share
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.engine.suspects import WrongBlock
from kvreplay.engine.worker import WorkerModel
from kvreplay.events import DETAIL_RUN, Event
from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.buffers import KVBuffers
from kvreplay.kv.content import WordArray
from kvreplay.kv.content_index import TokenContent, TokenIndex, mix64
from kvreplay.kv.managers.base import KVGroupManager
from kvreplay.kv.prefix_cache import BlockIds
from kvreplay.kv.specs import MAMBA

_GARBAGE = 0xBAD


def check_workload(document: Json, behaviour: Behaviour | None = None) -> list[VectorFinding]:
    """Everything found, in order. Raises UnsupportedVectorError, and ConfigError for what no one could run."""
    workload = read_workload(document)
    reason = reason_unsupported(workload)
    if reason is not None:
        raise UnsupportedVectorError(reason)
    return CheckedDriver(workload, behaviour or profile_named(DEFAULT_PROFILE)).check()


class _ForeseenContent(TokenContent):
    """Knows what the scripted sampler will sample: with overlapping steps a step computes what the one before it, whose
    output nobody has seen, has sampled."""

    __slots__ = ("_ahead",)

    def __init__(self, index: TokenIndex, prompt: list[int], salt: str | None = None) -> None:
        self._ahead: list[int] = []
        super().__init__(index, prompt, salt)

    def append(self, token: int) -> None:
        super().append(token)
        self._ahead.clear()

    def fingerprints(self, start: int, end: int) -> WordArray:
        while self.num_tokens + len(self._ahead) < end:
            known = self._ahead or self._words
            token = sampled_token(self.num_tokens + len(self._ahead))
            self._ahead.append(mix64(known[-1], token))
        return np.array([*self._words, *self._ahead][start:end], np.uint64)


@dataclass(slots=True, eq=False)
class _Load:
    """Tokens [start, end) of a request come from outside, into these tables as they were then."""

    request: Request
    start: int
    end: int
    tables: list[BlockIds]
    bad: dict[int, None] = field(default_factory=dict)
    """Blocks that do not get what they should."""


class CheckedDriver(Driver):
    detail = DETAIL_RUN
    """As a sink: what is said of failed loads is enough."""

    def __init__(self, workload: Workload, behaviour: Behaviour) -> None:
        super().__init__(workload, behaviour)
        self.findings: list[VectorFinding] = []
        self.buffers = KVBuffers(self.kv.pool.num_blocks, self.kv.groups)
        self.model = WorkerModel(self.scheduler, self.buffers)
        self._loads: dict[str, list[_Load]] = {}
        """Asynchronous ones that have not landed, by request."""
        self._num_loads: dict[str, int] = {}
        self._told: list[list[Json]] = []
        self._num_told = 0
        """Of this step's allocations, those whose loads have been seen."""
        self._step = 0
        self._null_blocks: dict[tuple[str, int], None] = {}
        self._disagreed: dict[str, None] = {}
        self._verifies = behaviour["transfer_integrity"] == "checksum"
        self._fences = behaviour["transfer_fence"] == "attempt"
        self._refused: dict[int, list[int]] = {}
        """Step → blocks whose checksums were wrong in it."""
        self._specs = {spec.id: spec for spec in workload.requests}
        self.log.sink = self

    def check(self) -> list[VectorFinding]:
        last: dict[str, Json] = {}
        for step in self.run():
            self._check_pool()
            last = step
        if "error" in last:
            error = last["error"]
            detail = f"the engine died in {error['where']}: {error['type']}: {error['msg']}"
            self._found(NO_FATAL, detail)
        elif "stalled" in last:
            for request_id in last["stalled"]:
                request = self.requests[request_id]
                if not request.status.is_finished:  # else its connector keeps its blocks
                    self._found(PROGRESS, f"{request.status.name}, and nothing open that could end it", request_id)
        elif not self.requests:  # it has not been cut short
            for finding in check_drained(snapshot_of(self.kv), "", 0):
                self._found(finding.checker, finding.detail, finding.request_id, finding.block_id)
        return self.findings

    def _found(
        self,
        checker: str,
        detail: str,
        request_id: str | None = None,
        block_id: int | None = None,
        group: int | None = None,
    ) -> None:
        self.findings.append(VectorFinding(self._step, checker, detail, request_id, block_id, group))

    # -- EventSink --------------------------------------------------------------------------------------------

    def emit(self, event: Event) -> int:
        if event.kind == "load.failed" and event.block_ids is not None and NULL_BLOCK_ID in list(event.block_ids):
            self._null_block("named by a failed load", event.request_id or "", event.group or 0)
        return -1

    # -- Driver -----------------------------------------------------------------------------------------------

    def make_content(self, prompt: list[int], salt: str | None) -> TokenContent:
        return _ForeseenContent(self.index, prompt, salt)

    def execute(self, out: SchedulerOutput) -> None:
        self._step = self.record["k"]
        self.model.prepare(out)
        for load in self._started_loads(out):
            self._land(load, out)
        self.model.execute(out)

    def before_update(self, out: SchedulerOutput, reports: KVConnectorOutput | None) -> KVConnectorOutput | None:
        self._check_agreement(out)
        if reports is not None:
            self._finish_loads(out, reports)
        refused = self._refused.pop(out.step, [])
        if refused:
            reports = reports or KVConnectorOutput()
            reports.invalid_block_ids = sorted({*reports.invalid_block_ids, *refused})
        return reports

    def _finish_loads(self, out: SchedulerOutput, reports: KVConnectorOutput) -> None:
        for request_id in reports.failed_recving:
            for load in self._loads.get(request_id, ())[:1]:
                load.bad.update(dict.fromkeys(np.concatenate(load.tables).tolist()))
        for request_id in reports.finished_recving:
            loads = self._loads.get(request_id)
            if loads:
                load = loads.pop(0)
                if not self._fences or self._is_open(load):
                    self._announce(load)
                    self._land(load, out)

    def after_update(self, out: SchedulerOutput, outputs: list[RequestOutput]) -> None:
        if self.connector is not None:
            for load in self._parked_loads():  # some that waited for this step
                self._loads.setdefault(load.request.request_id, []).append(load)
        emitted = [output.request.request_id for output in outputs if output.token_ids]
        for wrong in self.model.commit(out.step, emitted, self.scheduler.skipped):
            self._wrong_block(wrong)
        late, self.model.late_writes = self.model.late_writes, []
        for write in late:
            if write.owner is not None:
                self._found(
                    FENCE, "a load lands in a block of another request", write.owner, write.block_id, write.group
                )
        if self.scheduler.speculation is not None:
            for share in out.shares:
                self._settle_drafts(share)

    # -- findings ---------------------------------------------------------------------------------------------

    def _wrong_block(self, wrong: WrongBlock) -> None:
        if wrong.block_id == NULL_BLOCK_ID:
            self._null_block("written to" if wrong.is_write else "read", wrong.request_id, wrong.group)
            return
        detail = f"read wrong contents from position {wrong.position} on"
        self._found(CONTENT, detail, wrong.request_id, wrong.block_id, wrong.group)

    def _null_block(self, act: str, request_id: str, group: int) -> None:
        if (request_id, group) not in self._null_blocks:
            self._null_blocks[request_id, group] = None
            self._found(NULL_BLOCK, f"the null block was {act}", request_id, NULL_BLOCK_ID, group)

    def _check_agreement(self, out: SchedulerOutput) -> None:
        for share in beyond_known(out, self.scheduler):
            request = share.request
            if request.request_id not in self._disagreed:
                self._disagreed[request.request_id] = None
                detail = f"computes up to token {share.end} of {request.num_tokens}"
                self._found(AGREE, detail, request.request_id)

    def _check_pool(self) -> None:
        if self.in_flight or self.scheduler.fences.num_waiting_blocks or self.findings:
            return
        for finding in check_conservation(snapshot_of(self.kv), "", 0):
            self._found(finding.checker, finding.detail, finding.request_id, finding.block_id)

    # -- loads ------------------------------------------------------------------------------------------------

    def _started_loads(self, out: SchedulerOutput) -> Iterator[_Load]:
        """Of this step: synchronous ones, which its forward pass waits for. Others are put aside."""
        if self.connector is None:
            return
        for share in out.shares:
            if share.num_external_tokens:
                start = share.num_local_tokens
                yield self._load(share.request, start, start + share.num_external_tokens)
        for load in self._parked_loads():
            self._loads.setdefault(load.request.request_id, []).append(load)

    def _parked_loads(self) -> Iterator[_Load]:
        assert self.connector is not None
        allocations = self.connector.allocations
        if allocations is not self._told:
            self._told, self._num_told = allocations, 0
        first, self._num_told = self._num_told, len(allocations)
        for request_id, num_external, _ in allocations[first:]:
            request = self.requests.get(request_id)
            if request is not None and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                end = request.num_computed_tokens
                yield self._load(request, end - num_external, end)

    def _load(self, request: Request, start: int, end: int) -> _Load:
        tables = [ids.copy() for ids in self.kv.block_arrays(request.request_id)]
        load = _Load(request, start, end, tables)
        for group, index in self._bad_places(request.request_id):
            if index < len(tables[group]):
                load.bad[int(tables[group][index])] = None
        return load

    def _bad_places(self, request_id: str) -> Sequence[tuple[int, int]]:
        """Places in the request's tables that the script will call invalid after this load."""
        count = self._num_loads[request_id] = self._num_loads.get(request_id, 0) + 1
        script = self._specs[request_id].script
        return script.invalid if count == 1 or script.repeat else ()

    def _land(self, load: _Load, out: SchedulerOutput) -> None:
        """Only what was loaded can be bad: what the script says of other blocks is a report and nothing more."""
        for manager, table in zip(self.kv.managers, load.tables, strict=True):
            start = self._first_loaded(manager, table, load)
            if start >= load.end:
                continue
            self.buffers.write(table, load.request.content, manager.group, start, load.end)
            for block_id in self._loaded_blocks(manager, table, start, load.end):
                if block_id in load.bad:
                    rows = self.buffers.read_blocks(manager.group, [block_id])
                    garbage = np.full_like(rows, mix64(_GARBAGE, block_id, load.end))
                    self.buffers.write_blocks(manager.group, [block_id], garbage)
                    if self._verifies:
                        self._refused.setdefault(out.step, []).append(block_id)

    def _announce(self, load: _Load) -> None:
        for group, blocks in self._targets(load):
            self.model.note_landing(group, blocks, provenance=None)

    def _is_open(self, load: _Load) -> bool:
        return all(self.model.is_loading(blocks) for _, blocks in self._targets(load))

    def _targets(self, load: _Load) -> Iterator[tuple[int, BlockIds]]:
        for manager, table in zip(self.kv.managers, load.tables, strict=True):
            start = self._first_loaded(manager, table, load)
            if start < load.end:
                yield manager.group, np.array(self._loaded_blocks(manager, table, start, load.end), np.int64)

    def _first_loaded(self, manager: KVGroupManager, table: BlockIds, load: _Load) -> int:
        """A load brings what prefix caches hold, from where the window has blocks on."""
        if not manager.spec.prefix_cacheable:
            return load.end
        first = load.start // manager.block_size
        if manager.spec.kind == MAMBA:
            return load.end - 1 if table[(load.end - 1) // manager.block_size] else load.end
        real = table[first:].nonzero()[0]
        return max(load.start, (first + int(real[0])) * manager.block_size) if len(real) else load.end

    def _loaded_blocks(self, manager: KVGroupManager, table: BlockIds, start: int, end: int) -> list[int]:
        first, last = self.buffers.rows_of(manager.group).places(start, end)
        blocks: list[int] = table[first:last].tolist()
        return blocks

    # -- drafts -----------------------------------------------------------------------------------------------

    def _settle_drafts(self, share: Share) -> None:
        """States stand for what was accepted: after that, and at block boundaries before it."""
        request = share.request
        if not share.num_drafts or self.requests.get(request.request_id) is not request:
            return
        end = min(request.num_computed_tokens, share.end)
        for manager, table in zip(self.kv.managers, self.kv.block_arrays(request.request_id), strict=True):
            if manager.spec.kind != MAMBA or end <= share.start:
                continue
            size = manager.block_size
            boundaries = range((share.start // size + 1) * size, end, size)
            for num_tokens in (*boundaries, end):
                index = (num_tokens - 1) // size
                if index < len(table) and table[index]:
                    self.buffers.write(table, request.content, manager.group, num_tokens - 1, num_tokens, request.taint)
