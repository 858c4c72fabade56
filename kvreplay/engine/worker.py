"""The worker model: executes a step against the KV buffers, and finds what was read wrong.

Order within a step: all writes, then all reads. A request's positions are verified once, when they enter its table
(a prefix hit, a finished load); what it then writes itself is right as long as what it read was. Blocks that someone
else writes while they are in use are verified again. A decoding request's words are written when it stops decoding,
or earlier if anybody could see them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvreplay.engine.output import SchedulerOutput, Share
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.engine.scheduler import Scheduler
from kvreplay.kv.block_pool import BlockIds
from kvreplay.kv.buffers import KVBuffers
from kvreplay.kv.content import WordArray
from kvreplay.kv.memory import BlockIds as AnyBlockIds
from kvreplay.kv.memory import Provenance

_NO_LOAD = -1


class WrongBlock(NamedTuple):
    """A block whose wrong contents were read and then mattered."""

    block_id: int
    group: int
    request_id: str
    """Who read it first."""
    position: int
    """The first wrong position in it."""
    provenance: Provenance | None


class LateWrite(NamedTuple):
    """Foreign words landed in a block that nobody was loading for them."""

    block_id: int
    group: int
    owner: str | None
    """The request that holds the block now."""
    provenance: Provenance | None


@dataclass(slots=True)
class _Suspect:
    request: Request
    wrong: list[WrongBlock]
    is_hit: bool
    """Read by hitting a block that somebody else left in the cache: a finding whether or not a token follows."""


class WorkerModel:
    """One rank's forward passes.

    `every_read`: verify every position at every step, to test the shortcuts.
    """

    def __init__(self, scheduler: Scheduler, buffers: KVBuffers, *, every_read: bool = False) -> None:
        self.scheduler = scheduler
        self.buffers = buffers
        self.every_read = every_read
        self._suspects: list[_Suspect] = []
        self.late_writes: list[LateWrite] = []
        self.before_late_write: Callable[[], None] | None = None
        """Brings the scheduler up to this instant: words that were computed before must have been written before."""
        self.num_derived = 0
        self._loading = np.full(len(buffers.words), _NO_LOAD, np.int64)
        """Block → arrival order of the parked request that a connector is loading it for."""
        self.on_late_write: Callable[[], None] | None = None
        """Called before a write lands in blocks that nobody loads: whoever skips steps comes up to date."""
        self._rewritten: dict[int, None] = {}
        """Blocks in use that somebody else has written since the last step."""
        scheduler.on_leave_lockstep = self.flush
        scheduler.on_blocks_freed = self._on_blocks_freed
        scheduler.on_parked = self._on_parked
        scheduler.on_promoted = self._on_promoted

    @property
    def must_recheck(self) -> bool:
        """Whether the next step has to look again at what is in use."""
        return bool(self._rewritten)

    # -- a step -----------------------------------------------------------------------------------------------

    def execute(self, out: SchedulerOutput) -> None:
        """Write and read what the step's shares compute; lockstep members write later and have nothing new to read."""
        if self._rewritten or self.every_read:
            self._recheck(out)
        for share in out.shares:
            self._write(share.request, share.start, share.end)
        for share in out.shares:
            self._read(share)

    def _write(self, request: Request, start: int, end: int) -> None:
        for group, table in enumerate(self.scheduler.kv.block_arrays(request.request_id)):
            self.buffers.write(table, request.content, group, start, end, request.taint)
            if request.taint:
                self._mark_derived(
                    table[start // self.buffers.block_size : -(-end // self.buffers.block_size)], request
                )
        request.written_until = end

    def _read(self, share: Share) -> None:
        """Everything before the share that has not been verified yet, and then the share itself is verified too."""
        request = share.request
        known = min(request.clean_until, share.start)
        if known < share.start:
            live = max(known, self._first_live(share.start))
            if live < share.start:
                self._verify(request, live, share.start, is_hit=share.admitted and share.num_local_tokens > 0)
        request.clean_until = share.end

    def _first_live(self, num_computed_tokens: int) -> int:
        return min(manager.skipped_tokens(num_computed_tokens) for manager in self.scheduler.kv.managers)

    def _verify(self, request: Request, start: int, end: int, *, is_hit: bool) -> None:
        if self._hits_output(request, start, end):
            self._flush_members()
        for group, table in enumerate(self.scheduler.kv.block_arrays(request.request_id)):
            first = max(start, self.scheduler.kv.managers[group].skipped_tokens(end))
            positions = self.buffers.wrong_positions(table, request.content, group, first, end)
            if positions is not None:
                self._suspect(request, group, table, positions, is_hit=is_hit)

    def _hits_output(self, request: Request, start: int, end: int) -> bool:
        """Whether a full block of [start, end) may be somebody's output, and so not written yet."""
        return end // self.buffers.block_size > request.content.first_output_block

    def _suspect(
        self, request: Request, group: int, table: BlockIds, positions: NDArray[np.int64], *, is_hit: bool
    ) -> None:
        """`request` has read wrong words: what it writes from now on is wrong, also what it wrote in this step."""
        buffers = self.buffers
        request.taint ^= buffers.taint_of(table, positions)
        request.taint |= 1
        wrong = []
        for index in np.unique(positions // buffers.block_size).tolist():
            block_id = int(table[index])
            first = int(positions[positions // buffers.block_size == index][0])
            if block_id in buffers.derived:
                self.num_derived += 1
                continue
            wrong.append(WrongBlock(block_id, group, request.request_id, first, buffers.provenance.get(block_id)))
        request.tainted_by = request.tainted_by or (wrong[0] if wrong else None)
        self._suspects.append(_Suspect(request, wrong, is_hit))
        start = request.num_computed_tokens - request.num_in_flight_tokens
        if request.lockstep_since is None and request.num_in_flight_tokens:
            self._write(request, start, request.num_computed_tokens)

    def _mark_derived(self, block_ids: BlockIds, request: Request) -> None:
        source = request.tainted_by.block_id if request.tainted_by is not None else 0
        for block_id in block_ids.tolist():
            self.buffers.derived[block_id] = source

    @property
    def has_suspects(self) -> bool:
        """Whether wrong words have been read of which it is not yet known if they matter."""
        return bool(self._suspects)

    # -- findings ---------------------------------------------------------------------------------------------

    def commit(self, emitted: Iterable[str], skipped: Sequence[str]) -> list[WrongBlock]:
        """After the step's update: wrong reads that led to a token, or were hits. A dropped sample leads to nothing."""
        if not self._suspects:
            return []
        has_token = set(emitted)
        dropped = set(skipped)
        findings: list[WrongBlock] = []
        waiting: list[_Suspect] = []
        for suspect in self._suspects:
            request = suspect.request
            if request.request_id in dropped:
                continue
            if request.request_id not in has_token and not suspect.is_hit:
                if not request.status.is_finished:
                    waiting.append(suspect)
                continue
            for wrong in suspect.wrong:
                if wrong.block_id not in self.buffers.reported:
                    self.buffers.reported.add(wrong.block_id)
                    findings.append(wrong)
        self._suspects = waiting
        return findings

    # -- lockstep ---------------------------------------------------------------------------------------------

    def flush(self, request: Request) -> None:
        """Write what a decoding request has computed since it was last written; its counters are up to date."""
        if request.written_until < request.num_computed_tokens:
            self._write(request, request.written_until, request.num_computed_tokens)
            request.clean_until = request.num_computed_tokens

    def _flush_members(self) -> None:
        """Make visible what decoding requests have computed up to and with the step in progress."""
        scheduler = self.scheduler
        for request in scheduler.lockstep:
            since = request.lockstep_since
            assert since is not None
            upto = request.num_computed_tokens + scheduler.step - since + 1
            if request.written_until < upto:
                self._write(request, request.written_until, upto)
                request.clean_until = upto

    # -- what happens to blocks -------------------------------------------------------------------------------

    def _on_parked(self, request: Request) -> None:
        """What it loads are the blocks behind its local hits."""
        kv = self.scheduler.kv
        local = request.num_computed_tokens - request.num_external_tokens
        for table, manager in zip(kv.block_arrays(request.request_id), kv.managers, strict=True):
            loaded = table[local // manager.block_size :]
            self._loading[loaded] = request.arrival_order
            self.buffers.begin_load(loaded)
        request.is_loading = True

    def _on_promoted(self, request: Request) -> None:
        for table in self.scheduler.kv.block_arrays(request.request_id):
            self._loading[table] = _NO_LOAD
        request.is_loading = False
        request.clean_until = request.written_until = 0

    def _on_blocks_freed(self, request: Request, freed: Sequence[BlockIds]) -> None:
        if request.is_loading:
            request.is_loading = False
            for block_ids in freed:
                self._loading[block_ids] = _NO_LOAD
        request.clean_until = request.written_until = 0
        request.taint = 0
        request.tainted_by = None

    # -- KVMemory: what connectors do -------------------------------------------------------------------------

    def read_blocks(self, group: int, block_ids: AnyBlockIds) -> WordArray:
        return self.buffers.read_blocks(group, block_ids)

    def write_blocks(
        self, group: int, block_ids: AnyBlockIds, words: WordArray, *, provenance: Provenance | None
    ) -> None:
        """A transfer lands. Into blocks that are being loaded, as a rule; else it is too late, and may do harm.

        So it is into blocks that are being loaded for somebody else by now.
        """
        ids = np.asarray(block_ids, np.int64)
        if provenance is not None or (self._loading[ids] == _NO_LOAD).any():
            if self.on_late_write is not None:
                self.on_late_write()
            self._flush_members()
            late = ids if provenance is not None else ids[self._loading[ids] == _NO_LOAD]
            for block_id in late.tolist():
                owner = self._owner_of(block_id)
                self.late_writes.append(LateWrite(block_id, group, owner, provenance))
                if owner is not None:
                    self._rewritten[block_id] = None
        self.buffers.write_blocks(group, ids, words)
        if provenance is not None:
            for block_id in ids.tolist():
                self.buffers.provenance[block_id] = provenance

    def mark_corrupted(self, block_id: int, provenance: Provenance) -> None:
        self.buffers.provenance[block_id] = provenance
        self.buffers.reported.discard(block_id)

    def _owner_of(self, block_id: int) -> str | None:
        for request_id in self.scheduler.requests:
            for table in self.scheduler.kv.block_arrays(request_id):
                if (table == block_id).any():
                    return request_id
        return None

    def _recheck(self, out: SchedulerOutput) -> None:
        """Verify again what running requests hold of the blocks that others have written, or, in tests, everything."""
        shares = {share.request.request_id: share for share in out.shares}
        rewritten = np.array(sorted(self._rewritten), np.int64)
        self._rewritten.clear()
        self._flush_members()
        for request in list(self.scheduler.running.values()):
            share = shares.get(request.request_id)
            if share is not None and share.admitted:
                continue
            if request.lockstep_since is None:
                end = share.start if share is not None else request.num_computed_tokens
            else:
                end = request.num_computed_tokens + self.scheduler.step - request.lockstep_since
            end = min(end, request.written_until if request.lockstep_since is not None else end)
            holds = self.every_read or any(
                np.isin(table, rewritten).any() for table in self.scheduler.kv.block_arrays(request.request_id)
            )
            if not holds or request.status is not RequestStatus.RUNNING or not end:
                continue
            before = request.taint
            if not before:
                self._verify(request, self._first_live(end), end, is_hit=False)
            if request.taint and not before and request.lockstep_since is not None:
                # It writes wrong words from this step on: let it do so openly.
                self.scheduler.materialise_member(request, out)
