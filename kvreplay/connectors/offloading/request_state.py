"""What the connector keeps of a request while it lives, and until its last job is reported."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvreplay.connectors.offloading.arrays import NO_KEYS, Keys
from kvreplay.connectors.offloading.context import OffloadPolicy, RequestContext
from kvreplay.connectors.offloading.keys import KeySpace
from kvreplay.connectors.offloading.layout import OffloadGroup, OffloadLayout
from kvreplay.engine.request import Request
from kvreplay.kv.prefix_cache import BlockIds

BlocksOfGroups = Sequence[BlockIds | Sequence[int]]
"""One list per KV cache group of the engine."""


class MirroredTable:
    """A request's blocks in one group, as far as they have been shown. `ids` may be written to."""

    __slots__ = ("_cells", "_num_blocks")

    def __init__(self) -> None:
        self._cells: BlockIds = NO_KEYS
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    @property
    def ids(self) -> BlockIds:
        return self._cells[: self._num_blocks]

    def extend(self, block_ids: BlockIds | Sequence[int]) -> None:
        end = self._num_blocks + len(block_ids)
        if end == self._num_blocks:
            return
        if end > len(self._cells):
            longer = np.zeros(max(end, 2 * len(self._cells), 16), np.int64)
            longer[: self._num_blocks] = self.ids
            self._cells = longer
        self._cells[self._num_blocks : end] = block_ids
        self._num_blocks = end

    def clear(self) -> None:
        self._num_blocks = 0


class GroupState:
    """One group's share.

    `table` mirrors the request's block table by appending what each step hands out: it keeps ids of blocks that have
    left the window. `next_stored_chunk_idx`: chunks below have been offered.
    """

    __slots__ = (
        "_all_keys",
        "_ends",
        "_index",
        "_request",
        "_space",
        "_tokens_per_hash",
        "group",
        "lookup_hit_end",
        "next_stored_chunk_idx",
        "num_keys",
        "table",
    )

    def __init__(
        self, group: OffloadGroup, index: int, request: Request, space: KeySpace, tokens_per_hash: int
    ) -> None:
        self.group = group
        self.table = MirroredTable()
        self.next_stored_chunk_idx = 0
        self.num_keys = 0
        self.lookup_hit_end = 0
        """Exclusive end of the chunks that the last lookup found ready, a drafter's surplus one included."""
        self._all_keys: Keys = NO_KEYS
        self._ends: NDArray[np.int64] = NO_KEYS
        """Where the prefixes of these end."""
        self._index = index
        self._request = request
        self._space = space
        self._tokens_per_hash = tokens_per_hash

    @property
    def keys(self) -> Keys:
        """Of the request's complete chunks, as far as they have been noticed."""
        if self.num_keys > len(self._all_keys):
            self._make_keys()
        return self._all_keys[: self.num_keys]

    def _make_keys(self) -> None:
        """Not before somebody asks: of most groups, most requests never need them."""
        size = self.group.tokens_per_chunk
        hashes_per_chunk = size // self._tokens_per_hash
        block_keys = self._request.content.block_keys[hashes_per_chunk - 1 :: hashes_per_chunk]
        self._ends = self._space.ends(len(block_keys), size)
        self._all_keys = self._space.make(block_keys, self._index, self._ends)

    def notice_keys(self) -> None:
        """Take in the chunks that have become complete."""
        self.num_keys = self._request.num_tokens // self.group.tokens_per_chunk

    def run(self, start: int, end: int) -> Keys:
        """The keys of chunks [start, end), which the manager is about to be asked about."""
        keys = self.keys[start:end]
        self._space.note_run(keys, self._ends[start:end])
        return keys

    def storable_chunks(self, num_tokens: int, *, holds_back_last: bool, clamps_to_blocks: bool) -> int:
        """Leading chunks with tokens, blocks and keys. `holds_back_last`: the last may still be rewritten."""
        num_chunks = num_tokens // self.group.tokens_per_chunk
        if holds_back_last:
            num_chunks = max(0, num_chunks - 1)
        if clamps_to_blocks:
            num_chunks = min(num_chunks, len(self.table) // self.group.blocks_per_chunk)
        return min(num_chunks, self.num_keys)


class RequestState:
    def __init__(
        self,
        request: Request,
        context: RequestContext,
        layout: OffloadLayout,
        space: KeySpace,
        policy: OffloadPolicy,
        mirrored: Sequence[int],
    ) -> None:
        self.request = request
        self.context = context
        self.policy = policy
        self.groups = tuple(
            [
                GroupState(group, index, request, space, layout.tokens_per_hash)
                for index, group in enumerate(layout.groups)
            ]
        )
        self.mirrored = tuple([self.groups[index] for index in mirrored])
        """Groups whose tables are followed."""
        params = request.kv_transfer_params
        self.max_load_tokens = _token_limit(params, "max_load_tokens")
        self.max_offload_tokens = _token_limit(params, "max_offload_tokens")
        self.num_local_tokens = 0
        """Tokens that the prefix cache held at the last lookup."""
        self.jobs: dict[int, None] = {}
        """In flight, in order of their numbers: one load, or any number of stores beside a synchronous load."""
        self.partial_tail_boundary: int | None = None
        """Where the last lookup found a hit that ends inside a block."""
        self.shared_prefix_boundary = 0
        self.loaded_from_offload = False
        self.load_source: str | None = None
        """The slowest tier that its last load needed."""
        self.num_lost_loads = 0
        """Loads that have failed: another tier may still have what it then loses again."""
        self.finished_signaled = False
        """The manager has been told of its end."""
        self.settled_tokens = -1
        """So many storable tokens have been dealt with; with no more there is nothing to offer."""
        self.storable_prompt_tokens = request.num_prompt_tokens
        if self.max_offload_tokens is not None:
            self.storable_prompt_tokens = min(self.storable_prompt_tokens, self.max_offload_tokens)
        self.admitted_tables: BlocksOfGroups = ()
        """What it held when it last got blocks."""
        self.last_question: tuple[int, int, int] | None = None
        """At which state of the tier it was last looked up, beyond how many tokens of the GPU's, with how many."""
        self.last_answer: int | None = 0
        """None: it is undecided, and stays so while a fault keeps the answer back."""
        self.is_settled = False
        """The last lookup has ordered nothing, and only copies under way could change what it found."""
        self.has_found = False
        """It came upon chunks one by one, and some of them were there, or coming."""
        self.num_rescued = 0
        """Times that it was left alone, and then something changed."""
        self.deferred_since_ns: int | None = None
        """Since when its lookup has been undecided."""
        self._space = space
        self._tokens_per_hash = layout.tokens_per_hash
        self._noticed = range(0)
        """Lengths of the request at which it has the chunks that have been noticed."""

    def notice_keys(self) -> None:
        """Take in the chunks that have become complete since the last time."""
        if self.request.num_tokens in self._noticed:
            return
        start, end = 0, sys.maxsize
        for state in self.groups:
            state.notice_keys()
            size = state.group.tokens_per_chunk
            noticed = state.num_keys * size
            start, end = max(start, noticed), min(end, noticed + size)
        self._noticed = range(start, end)

    def boundary_key(self, index: int, boundary: int) -> int:
        """The key of the prefix that ends at `boundary`, which need not be the end of a chunk."""
        hash_index = boundary // self._tokens_per_hash - 1
        assert hash_index >= 0
        return self._space.make_one(self.request.content.block_keys.item(hash_index), index, boundary)

    @property
    def num_hashes(self) -> int:
        return self.request.num_tokens // self._tokens_per_hash

    def clear_tables(self) -> None:
        for state in self.mirrored:
            state.table.clear()

    def rewind(self) -> None:
        """Offer every chunk again."""
        for state in self.groups:
            state.next_stored_chunk_idx = 0
        self.settled_tokens = -1

    def extend_tables(self, new_blocks: BlocksOfGroups) -> None:
        for state in self.mirrored:
            state.table.extend(new_blocks[state.group.group_id])

    def catch_up(self, tables: BlocksOfGroups) -> None:
        """Take in blocks that it got while it ran without being shown; only where nothing leaves a table."""
        for state in self.mirrored:
            if len(state.table) and not state.group.is_windowed:
                table = tables[state.group.group_id]
                state.table.extend(table[len(state.table) :])


def _token_limit(params: Mapping[str, Any] | None, name: str) -> int | None:
    """A non-negative whole number; anything else is ignored (vLLM logs a warning). True is no number."""
    raw = params.get(name) if params else None
    return raw if type(raw) is int and raw >= 0 else None
