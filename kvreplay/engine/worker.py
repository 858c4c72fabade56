"""The worker model: executes a step against the KV buffers, and finds what was read wrong.

Order within a step: zeroing, copies, synchronous loads, all writes, then all reads. A request's positions are verified
once, when they enter its table (a prefix hit, a finished load), in each group those that the next token attends to;
what it then writes itself is right as long as what it read was. Blocks that someone
else writes while they are in use are verified again. A decoding request's words are written when it stops decoding,
or earlier if anybody could see them.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvreplay.engine.connector_memory import ConnectorMemory
from kvreplay.engine.output import SchedulerOutput, Share
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.engine.scheduler import Scheduler
from kvreplay.engine.suspects import Origin, Suspect, Suspects, WrongBlock
from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.buffers import KVBuffers
from kvreplay.kv.managers.base import KVGroupManager
from kvreplay.kv.prefix_cache import BlockIds
from kvreplay.kv.specs import CIRCULAR_BUFFER, MAMBA, KVCacheGroupSpec, cdiv

_OVERWRITTEN = (MAMBA, CIRCULAR_BUFFER)
"""Kinds of groups whose blocks take what a step computes in the place of what it goes on from."""


class WorkerModel(ConnectorMemory):
    """One rank's forward passes.

    `every_read`: verify every position at every step, to test the shortcuts.
    """

    def __init__(self, scheduler: Scheduler, buffers: KVBuffers, *, every_read: bool = False) -> None:
        super().__init__(scheduler, buffers)
        self.every_read = every_read
        self._step = -1
        self._suspects = Suspects()
        specs = scheduler.kv.groups
        self._reads_from = [_first_read(spec, scheduler.kv.rules.hit_alignment) for spec in specs]
        self._windows = [manager if _has_window(manager.spec) else None for manager in scheduler.kv.managers]
        self._keeps_all = scheduler.connector is not None or scheduler.config.async_scheduling
        self._window_runs = _runs_of_windows(self._windows)
        self._groups_without_window = [group for group, window in enumerate(self._windows) if window is None]
        self._writes_windows_late = bool(self._window_runs) and not self._keeps_all and not every_read
        self._state_groups = [group for group, spec in enumerate(specs) if spec.kind in _OVERWRITTEN]
        self._token_groups = [group for group, spec in enumerate(specs) if spec.kind not in _OVERWRITTEN]
        self._mamba_groups = [group for group, spec in enumerate(specs) if spec.kind == MAMBA]
        self._drafters = [group for group, spec in enumerate(specs) if spec.drafter_only]
        self._speculates = scheduler.speculation is not None
        self._drafted_groups = self._token_groups
        """Where drafts have a place of their own. (A ring is taken to be long enough for what is open and drafts.)"""
        self._zeroes_loads_late = scheduler.zeroes_loads
        self._to_zero_late: list[int] = []
        self._token_groups = [group for group in self._token_groups if group not in self._drafters]
        """Without the drafter's own: what it reads there decides about drafts, and those are verified."""
        scheduler.subscribe(contents=self)

    # -- a step -----------------------------------------------------------------------------------------------

    def prepare(self, out: SchedulerOutput) -> None:
        """What happens to whole blocks before anything is loaded or computed."""
        to_zero = out.blocks_to_zero
        if self._zeroes_loads_late:
            to_zero = self._behind_step(to_zero)
        if to_zero:
            self.buffers.zero(to_zero)
        for source, target in out.block_copies:
            self.buffers.copy_block(source, target)

    def _behind_step(self, block_ids: list[int]) -> list[int]:
        """What is zeroed now: blocks for a load were to be, but wait for the step in progress."""
        waiting = [block_id for block_id in block_ids if self.is_loading(np.array([block_id]))]
        now = [block_id for block_id in block_ids if block_id not in waiting] + self._to_zero_late
        self._to_zero_late = waiting
        return now

    def execute(self, out: SchedulerOutput) -> None:
        """Write and read what the step's shares compute; lockstep members write later and have nothing new to read."""
        self._step = out.step
        if self._rewritten or self.every_read:
            self._recheck(out)
        shares = [share for share in out.shares if share.request.status is RequestStatus.RUNNING]
        if len(shares) < len(out.shares):
            self._compute_for_nobody(out)
        if self._speculates:
            self._execute_speculating(shares)
            return
        if self._state_groups:
            # A step goes on from a state, or a ring, before it puts its own in the same place.
            for share in shares:
                self._read(share, share.start, self._state_groups)
        for share in shares:
            if share.admitted:
                share.request.windows_written_until = share.start
            self._write(share.request, share.start, share.end)
        for share in shares:
            if self._read(share, share.start, self._token_groups):
                self._write(share.request, share.start, share.end)  # what it has computed in this step is wrong, too
            self._note_computed(share.request, share.end)

    def _execute_speculating(self, shares: Sequence[Share]) -> None:
        """The same, for shares whose last tokens are drafts."""
        spans = [self._computed(share) for share in shares]
        for share, (start, _, _) in zip(shares, spans, strict=True):
            self._read(share, start, self._state_groups)
        for share, (start, end, drafted_end) in zip(shares, spans, strict=True):
            if share.admitted:
                share.request.windows_written_until = start
            if share.drafter_start is not None:
                self._write_drafters(share.request, share.drafter_start, start)
            self._write_drafting(share.request, start, end, drafted_end)
        for share, (start, end, drafted_end) in zip(shares, spans, strict=True):
            if self._read(share, start, self._token_groups):
                self._write_drafting(share.request, start, end, drafted_end)
            self._note_computed(share.request, end)

    @staticmethod
    def _note_computed(request: Request, end: int) -> None:
        if request.drop_stale_output and request.num_stale_output_tokens:
            # The step was in flight when its load was found to have failed: what it has read is computed anew.
            request.forget_taint()
        else:
            request.clean_until = end

    @staticmethod
    def _computed(share: Share) -> tuple[int, int, int]:
        """Where the share computes: from, up to which its tokens are right, and its end."""
        start, end, drafted_end = share.computed
        # Drafts behind the request's last token are given up, whatever they are.
        last = share.request.num_prompt_tokens + share.request.max_tokens
        return start, max(start, min(end, last)), drafted_end

    def _write_drafting(self, request: Request, start: int, end: int, drafted_end: int) -> None:
        """Tokens [start, end) are right; drafts behind them leave what is of no use."""
        tables = self.scheduler.kv.block_arrays(request.request_id)
        for group in self._mamba_groups:
            # A state at a block's end is kept where others may hit it.
            size = self.scheduler.kv.groups[group].block_size
            for boundary in range((start // size + 1) * size, end, size):
                if tables[group][boundary // size - 1]:
                    self.buffers.write(tables[group], request.content, group, boundary - 1, boundary, request.taint)
        if start < end:
            self._write(request, start, end)
        if end < drafted_end:
            for group in self._drafted_groups:
                self.buffers.write_rejected(tables[group], group, end, drafted_end)

    def _write_drafters(self, request: Request, start: int, end: int) -> None:
        """What a load has left out."""
        tables = self.scheduler.kv.block_arrays(request.request_id)
        for group in self._drafters:
            window = self._windows[group]
            first = start if window is None else self._first_kept(request, window, tables[group], start, end)
            if first < end:
                self.buffers.write(tables[group], request.content, group, first, end)

    def capture(self, out: SchedulerOutput) -> None:
        """The step runs later, where its shares' blocks are now."""
        for share in out.shares:
            tables = self.scheduler.kv.block_arrays(share.request.request_id)
            share.tables = [ids.copy() for ids in tables]

    def _compute_for_nobody(self, out: SchedulerOutput) -> None:
        """The step before has ended some requests, or taken their blocks back: their shares are computed all the same,
        and somebody in this step may have hit what they fill."""
        for share in out.shares:
            request = share.request
            if request.status is not RequestStatus.RUNNING and share.tables is not None:
                start, end, _ = self._computed(share)
                for group, table in enumerate(share.tables if start < end else ()):
                    self.buffers.write(table, request.content, group, start, end)

    def _write(self, request: Request, start: int, end: int, *, is_late: bool = False, is_over: bool = False) -> None:
        """`is_late`: these tokens were computed in earlier steps, and windows may have left some of them behind.
        `is_over`: the request gives its blocks back now."""
        tables = self.scheduler.kv.block_arrays(request.request_id)
        if not request.taint and self._writes_windows_late:
            self._write_all_but_windows(request, tables, start, end)
            self._write_windows(request, tables, start, end, is_late=is_late, is_over=is_over)
            return
        buffers, taint = self.buffers, request.taint
        if self._writes_windows_late and request.windows_written_until < start:
            # What it computed before it read anything wrong.
            self._write_windows(request, tables, request.windows_written_until, start, is_late=True, is_over=False)
        for group, table in enumerate(tables):
            first = start
            window = self._windows[group]
            if window is not None:
                # What a window has left is a table's beginning: where one block is real, all behind it are.
                if not is_late and not table[start // window.block_size]:
                    self._note_null_write(request, group, start)
                first = self._first_kept(request, window, table, start, end)
                if first >= end:
                    continue
            hits_null = buffers.write(table, request.content, group, first, end, taint)
            if hits_null and window is None:
                self._note_null_write(request, group, start)
            if taint:
                places = slice(*buffers.rows_of(group).places(first, end))
                buffers.origins.update(dict.fromkeys(table[places].tolist(), request.tainted_by))
                buffers.origins.pop(NULL_BLOCK_ID, None)
        request.written_until = request.windows_written_until = end

    def _note_null_write(self, request: Request, group: int, start: int) -> None:
        self._null_writes.append(WrongBlock(NULL_BLOCK_ID, group, request.request_id, start, None, True))

    def _write_all_but_windows(self, request: Request, tables: Sequence[BlockIds], start: int, end: int) -> None:
        for group in self._groups_without_window:
            if self.buffers.write(tables[group], request.content, group, start, end):
                self._note_null_write(request, group, start)
        request.written_until = end

    def _write_windows(
        self, request: Request, tables: Sequence[BlockIds], start: int, end: int, *, is_late: bool, is_over: bool
    ) -> None:
        """What windows hold is not written while nobody but the request itself can see it: until its prompt ends, or
        blocks of it get a hash."""
        if not is_late:
            for first_group, end_group, window in self._window_runs:
                if not tables[first_group][start // window.block_size]:
                    for group in range(first_group, end_group):
                        self._note_null_write(request, group, start)
            start = request.windows_written_until
            if end < request.num_tokens and all(
                self._first_cached(request, tables[group], window.block_size, start, end) == end
                for group, _, window in self._window_runs
            ):
                return
        for first_group, end_group, window in self._window_runs:
            table = tables[first_group]
            if is_over:
                first = self._first_cached(request, table, window.block_size, start, end)
            else:
                first = self._first_kept(request, window, table, start, end)
            if first < end:
                self.buffers.write_alike(tables[first_group:end_group], request.content, first_group, first, end)
        request.windows_written_until = end

    def _first_cached(self, request: Request, table: BlockIds, block_size: int, start: int, end: int) -> int:
        """The first of tokens [start, end) whose block has a hash; `end` if none has."""
        first, last = start // block_size, cdiv(end, block_size)
        if not self.scheduler.kv.may_have_hash(request.request_id, first, last):
            return end
        places = self.scheduler.pool.is_cached(table[first:last]).nonzero()[0]
        return max(start, (first + int(places[0])) * block_size) if len(places) else end

    def _first_kept(self, request: Request, window: KVGroupManager, table: BlockIds, start: int, end: int) -> int:
        """The first of tokens [start, end) that anybody may still read: before the window only what has a hash, or what
        a connector may look at."""
        size = window.block_size
        live = window.skipped_tokens(end) // size
        if live * size <= start:
            return start
        if not self._keeps_all and not self.scheduler.kv.may_have_hash(request.request_id, start // size, live):
            return live * size
        behind = table[start // size : live]
        is_kept = behind != NULL_BLOCK_ID if self._keeps_all else self.scheduler.pool.is_cached(behind)
        places = is_kept.nonzero()[0]
        return max(start, (start // size + int(places[0]) if len(places) else live) * size)

    def _read(self, share: Share, start: int, groups: Sequence[int]) -> bool:
        """Look at everything before the share, at `start`, that has not been verified yet. Returns whether something
        is wrong."""
        request = share.request
        if request.clean_until >= start:
            return False
        num_hit_tokens = share.num_local_tokens if share.admitted else 0
        return self._verify(request, request.clean_until, start, groups, num_hit_tokens=num_hit_tokens)

    def _verify(
        self, request: Request, start: int, end: int, groups: Sequence[int], *, num_hit_tokens: int = 0
    ) -> bool:
        """Look at what the token at `end` attends to of [start, end). Returns whether something is wrong."""
        if self._hits_output(request, end):
            self._flush_members()
        return self._compare(request, start, end, groups, num_hit_tokens=num_hit_tokens)

    def _compare(
        self, request: Request, start: int, end: int, groups: Sequence[int], *, num_hit_tokens: int = 0
    ) -> bool:
        tables = self.scheduler.kv.block_arrays(request.request_id)
        is_right = True
        for group in groups:
            first = max(start, self._reads_from[group](end))
            if first < end and self._is_comparable(request, group):
                positions = self.buffers.wrong_positions(tables[group], request.content, group, first, end)
                if positions is not None:
                    self._suspect(request, group, tables[group], positions, num_hit_tokens)
                    is_right = False
        return not is_right

    def _is_comparable(self, request: Request, group: int) -> bool:
        """What no cache holds is computed again behind a hit, unless a load has brought it."""
        return self.scheduler.kv.groups[group].prefix_cacheable or request.has_loaded_all

    def _hits_output(self, request: Request, end: int) -> bool:
        """Whether a full block before `end` may be somebody's output, and so not written yet."""
        return end // self.scheduler.kv.rules.hash_block_size > request.content.first_output_block

    def _suspect(
        self, request: Request, group: int, table: BlockIds, positions: NDArray[np.int64], num_hit_tokens: int
    ) -> None:
        """`request` has read wrong words: what it writes from now on is wrong."""
        buffers = self.buffers
        request.taint ^= buffers.taint_of(table, positions, group)
        request.taint |= 1
        hits: list[tuple[Origin, WrongBlock]] = []
        others: list[tuple[Origin, WrongBlock]] = []
        places = buffers.rows_of(group).places_of(positions)
        for index in np.unique(places).tolist():
            block_id = int(table[index])
            first = int(positions[places == index][0])
            seen = WrongBlock(block_id, group, request.request_id, first, buffers.provenance.get(block_id))
            origin = buffers.origins.get(block_id) if block_id else None
            if origin is None:
                origin = Origin(seen)
                if block_id:
                    buffers.origins[block_id] = origin
            assert isinstance(origin, Origin)
            request.tainted_by = request.tainted_by or origin
            (hits if first < num_hit_tokens else others).append((origin, seen))
        for wrong, is_hit in ((hits, True), (others, False)):
            if wrong:
                self._suspects.add(Suspect(request, wrong, self._step, is_hit))

    @property
    def has_findings(self) -> bool:
        """Whether `commit` or `late_writes` may have something to tell."""
        return bool(self._suspects or self._null_writes or self.late_writes)

    # -- findings ---------------------------------------------------------------------------------------------

    def commit(self, step: int, emitted: Iterable[str], skipped: Sequence[str]) -> list[WrongBlock]:
        """After the update of `step`: wrong reads that led to a token, or were hits. Dropped samples do not count."""
        null_writes, self._null_writes = self._null_writes, []
        if not self._suspects:
            return null_writes
        return null_writes + self._suspects.commit(step, dict.fromkeys(emitted), skipped)

    # -- lockstep ---------------------------------------------------------------------------------------------

    def zero(self, block_ids: list[int]) -> None:
        self.buffers.zero(block_ids)

    def flush(self, request: Request, *, is_over: bool = False) -> None:
        """Write what a decoding request has computed since it was last written; its counters are up to date.

        `is_over`: it gives its blocks back now.
        """
        if request.written_until < request.num_computed_tokens:
            self._write(request, request.written_until, request.num_computed_tokens, is_late=True, is_over=is_over)
            request.clean_until = request.num_computed_tokens

    @property
    def _has_begun(self) -> bool:
        return self._step >= self.scheduler.step or self.scheduler.config.async_scheduling

    def _flush_members(self, *, in_step: bool = True) -> None:
        scheduler = self.scheduler
        for request in scheduler.lockstep:
            since = request.lockstep_since
            assert since is not None
            upto = request.num_computed_tokens + scheduler.step - since + in_step
            if request.written_until < upto:
                self._write(request, request.written_until, upto, is_late=True)
                request.clean_until = upto

    def _recheck(self, out: SchedulerOutput) -> None:
        """Verify again what running requests hold of the blocks that others have written, or, in tests, everything."""
        shares = {share.request.request_id: share for share in out.shares}
        is_rewritten = self.scheduler.pool.membership(np.array(list(self._rewritten), np.int64))
        self._rewritten.clear()
        # Not with this step: it goes on from the state that it then overwrites.
        self._flush_members(in_step=False)
        to_check: list[tuple[Request, int]] = []
        for request in list(self.scheduler.running.values()):
            share = shares.get(request.request_id)
            if share is not None and share.admitted:
                continue
            if request.lockstep_since is not None:
                computed = request.num_computed_tokens + self.scheduler.step - request.lockstep_since
                end = min(computed, request.written_until)
            else:
                end = share.computed[0] if share is not None else request.num_computed_tokens
            holds = self.every_read or any(
                is_rewritten[table].any() for table in self.scheduler.kv.block_arrays(request.request_id)
            )
            if holds and request.status is RequestStatus.RUNNING and end and not request.taint:
                to_check.append((request, end))
        for request, end in to_check:
            self._compare(request, 0, end, self._state_groups)
            self._compare(request, 0, end, self._token_groups)
        for request, _ in to_check:
            # It writes wrong words from this step on: let it do so openly. Whoever shares blocks with it does, too, and
            # leaves lockstep with this step's state in the place of the one that it goes on from: compared before.
            if request.taint and request.lockstep_since is not None:
                self.scheduler.materialise_member(request, out)


def _runs_of_windows(windows: Sequence[KVGroupManager | None]) -> list[tuple[int, int, KVGroupManager]]:
    """(first, end, window of the first) for neighbouring groups whose windows leave the same behind."""
    runs: list[tuple[int, int, KVGroupManager]] = []
    for group, window in enumerate(windows):
        if window is None:
            continue
        first, end, last = runs[-1] if runs else (0, 0, None)
        if last is not None and end == group and last.spec.lookup_identity == window.spec.lookup_identity:
            runs[-1] = (first, group + 1, last)
        else:
            runs.append((group, group + 1, window))
    return runs


def _has_window(spec: KVCacheGroupSpec) -> bool:
    return spec.sliding_window is not None or spec.attention_chunk_size is not None


def _first_read(spec: KVCacheGroupSpec, hit_alignment: int) -> Callable[[int], int]:
    """Number of tokens before a token → the first of them that it attends to. Of Mamba: whose state it goes on from.

    Of a circular buffer: those that are not compressed yet, as far as the next token leaves them room. Hits end where
    nothing is open, and no compression goes beyond that.
    """
    if spec.kind == MAMBA:
        return lambda num_tokens: num_tokens - 1
    if spec.kind == CIRCULAR_BUFFER:
        room = spec.block_size - 1
        return lambda num_tokens: max(num_tokens - room, num_tokens // hit_alignment * hit_alignment)
    if spec.sliding_window is not None:
        reach = spec.sliding_window - 1
        return lambda num_tokens: max(num_tokens - reach, 0)
    if spec.attention_chunk_size is not None:
        chunk = spec.attention_chunk_size
        return lambda num_tokens: num_tokens // chunk * chunk
    return lambda num_tokens: 0
