"""What connectors do to an instance's blocks, and who waits for it: a write that nobody waits for may do harm."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvreplay.engine.request import Request
from kvreplay.engine.scheduler import Scheduler
from kvreplay.engine.suspects import WrongBlock
from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.buffers import KVBuffers
from kvreplay.kv.content import WordArray
from kvreplay.kv.memory import BlockIds as AnyBlockIds
from kvreplay.kv.memory import History, Provenance
from kvreplay.kv.prefix_cache import BlockIds


class LateWrite(NamedTuple):
    """Foreign words landed in a block that nobody was loading for them."""

    block_id: int
    group: int
    owner: str | None
    """The request that holds the block now."""
    provenance: Provenance | None


class ConnectorMemory:
    """One rank's blocks as its connector sees them (`KVMemory`); `_flush_members` is up to whoever computes there."""

    def __init__(self, scheduler: Scheduler, buffers: KVBuffers) -> None:
        self.scheduler = scheduler
        self.buffers = buffers
        self._null_writes: list[WrongBlock] = []
        self.late_writes: list[LateWrite] = []
        self.on_late_write: Callable[[], None] | None = None
        """Called before a write lands in blocks that nobody loads: whoever skips steps comes up to date."""
        self._is_loading = np.zeros(buffers.num_blocks, np.bool_)
        """By block: whether a connector is loading it for a parked request."""
        self._rewritten: dict[int, None] = {}
        """Blocks in use that somebody else has written since the last step."""

    @property
    def must_recheck(self) -> bool:
        """Whether the next step has to look again at what is in use."""
        return bool(self._rewritten)

    @property
    def _has_begun(self) -> bool:
        """Whether the step scheduled last computes already."""
        raise NotImplementedError

    def _flush_members(self, *, in_step: bool = True) -> None:
        """Make visible what decoding requests have computed up to the step in progress, and (`in_step`) with it."""
        raise NotImplementedError

    # -- what happens to blocks -------------------------------------------------------------------------------

    def on_parked(self, request: Request) -> None:
        """What it loads are the blocks behind its local hits."""
        kv = self.scheduler.kv
        local = request.num_computed_tokens - request.num_external_tokens
        for group, table in enumerate(kv.block_arrays(request.request_id)):
            first, _ = self.buffers.rows_of(group).places(local, local + 1)
            loaded = table[first:]
            self._is_loading[loaded] = True
            self.buffers.begin_load(loaded)
        self._is_loading[NULL_BLOCK_ID] = False
        request.is_loading = True

    def on_promoted(self, request: Request) -> None:
        for table in self.scheduler.kv.block_arrays(request.request_id):
            self._is_loading[table] = False
        request.is_loading = False
        scheduler = self.scheduler
        assert scheduler.connector is not None
        request.has_loaded_all = (
            scheduler.connector.loads_every_group(request.request_id)
            and request.request_id not in scheduler.failed_recving
        )
        request.clean_until = request.written_until = request.windows_written_until = 0

    def on_blocks_freed(self, request: Request, freed: Sequence[BlockIds]) -> None:
        if request.is_loading:
            request.is_loading = False
            for block_ids in freed:
                self._is_loading[block_ids] = False
        request.has_loaded_all = False
        request.clean_until = request.written_until = request.windows_written_until = 0
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
        late = self.note_landing(group, ids, provenance=provenance)
        self.buffers.write_blocks(group, ids, words)
        if provenance is not None:
            for block_id in late:
                self.buffers.provenance[block_id] = provenance

    def is_loading(self, block_ids: BlockIds) -> bool:
        """Whether somebody still waits for what comes into each of these blocks."""
        return int(np.count_nonzero(self._is_loading[block_ids])) == len(block_ids)

    def note_landing(self, group: int, ids: BlockIds, *, provenance: Provenance | None) -> list[int]:
        """A transfer is about to write these blocks. Returns those that it writes late, or without being asked to."""
        is_unasked = provenance is not None and not provenance.asked_for
        late: list[int] = []
        if is_unasked:
            late = ids.tolist()
        elif not self.is_loading(ids):
            late = ids[~self._is_loading[ids]].tolist()
        if late:
            if self.on_late_write is not None:
                self.on_late_write()
            # A load that a step waits for lands before the step computes, which may overwrite a state.
            self._flush_members(in_step=self._has_begun)
            owners = self._owners_of(late, provenance)
            for block_id in late:
                if block_id == NULL_BLOCK_ID:
                    whose = provenance.request_id if provenance is not None else ""
                    self._null_writes.append(WrongBlock(NULL_BLOCK_ID, group, whose, 0, provenance, is_write=True))
                    continue
                owner = owners.get(block_id)
                self.late_writes.append(LateWrite(block_id, group, owner, provenance))
                if owner is not None:
                    self._rewritten[block_id] = None
        return late

    def mark_corrupted(self, block_id: int, provenance: Provenance) -> None:
        self.buffers.provenance[block_id] = provenance
        self.buffers.origins.pop(block_id, None)

    def histories(self, block_ids: AnyBlockIds) -> dict[int, History]:
        return self.buffers.histories(block_ids)

    def set_history(self, block_id: int, history: History) -> None:
        self.buffers.set_history(block_id, history)

    def _owners_of(self, block_ids: list[int], provenance: Provenance | None) -> dict[int, str]:
        """Who holds each of these, if anybody does. Of several the one that it is written for: others hit it in the
        very step that loads it."""
        written_for = provenance.request_id if provenance is not None else None
        is_sought = self.scheduler.pool.membership(np.array(block_ids, np.int64))
        owners: dict[int, str] = {}
        for request_id in self.scheduler.requests:
            for table in self.scheduler.kv.block_arrays(request_id):
                for block_id in table[is_sought[table]].tolist():
                    if block_id not in owners or request_id == written_for:
                        owners[block_id] = request_id
        return owners
