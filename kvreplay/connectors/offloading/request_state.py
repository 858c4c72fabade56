"""What the connector keeps of a request while it lives, and until its last job is reported."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvreplay.connectors.offloading.arrays import NO_KEYS, Keys
from kvreplay.connectors.offloading.context import OffloadPolicy, RequestContext
from kvreplay.connectors.offloading.keys import KeySpace
from kvreplay.connectors.offloading.layout import OffloadGroup, OffloadLayout
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.kv.block_table import BlockTable

BlocksOfGroups = Sequence[NDArray[np.int32] | Sequence[int]]
"""One list per KV cache group of the engine."""


class GroupState:
    """One group's share.

    `table` mirrors the request's block table by appending what each step hands out: it keeps ids of blocks that have
    left the window. `next_stored_chunk_idx`: chunks below have been offered.
    """

    __slots__ = ("_all_keys", "group", "lookup_hit_end", "next_stored_chunk_idx", "num_keys", "table")

    def __init__(self, group: OffloadGroup) -> None:
        self.group = group
        self.table = BlockTable()
        self.next_stored_chunk_idx = 0
        self.num_keys = 0
        self.lookup_hit_end = 0
        """Exclusive end of the chunks that the last lookup found ready, a drafter's surplus one included."""
        self._all_keys: Keys = NO_KEYS

    @property
    def keys(self) -> Keys:
        """Of the request's complete chunks, as far as they have been noticed."""
        return self._all_keys[: self.num_keys]

    def notice_keys(self, index: int, request: Request, space: KeySpace, tokens_per_hash: int) -> None:
        """Take in the chunks that have become complete. `index`: this group's, for its keys."""
        num_keys = request.num_tokens // self.group.tokens_per_chunk
        if num_keys == self.num_keys:
            return
        if num_keys > len(self._all_keys):
            hashes_per_chunk = self.group.tokens_per_chunk // tokens_per_hash
            block_keys = request.content.block_keys[hashes_per_chunk - 1 :: hashes_per_chunk]
            ends = np.arange(1, len(block_keys) + 1) * self.group.tokens_per_chunk
            self._all_keys = space.make(block_keys, index, ends)
        self.num_keys = num_keys

    def storable_chunks(self, num_tokens: int, *, holds_back_last: bool, clamps_to_blocks: bool) -> int:
        """Leading chunks with tokens, blocks and keys. `holds_back_last`: the last may still be rewritten."""
        num_chunks = num_tokens // self.group.tokens_per_chunk
        if holds_back_last:
            num_chunks = max(0, num_chunks - 1)
        if clamps_to_blocks:
            num_chunks = min(num_chunks, self.table.num_blocks // self.group.blocks_per_chunk)
        return min(num_chunks, self.num_keys)


class RequestState:
    def __init__(
        self, request: Request, context: RequestContext, layout: OffloadLayout, space: KeySpace, policy: OffloadPolicy
    ) -> None:
        self.request = request
        self.context = context
        self.policy = policy
        self.groups = tuple(GroupState(group) for group in layout.groups)
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
        self.finished_signaled = False
        """The manager has been told of its end."""
        self.settled_tokens = -1
        """So many storable tokens have been dealt with; with no more there is nothing to offer."""
        self._space = space
        self._tokens_per_hash = layout.tokens_per_hash

    def notice_keys(self) -> None:
        for index, state in enumerate(self.groups):
            state.notice_keys(index, self.request, self._space, self._tokens_per_hash)

    def boundary_key(self, index: int, boundary: int) -> int:
        """The key of the prefix that ends at `boundary`, which need not be the end of a chunk."""
        hash_index = boundary // self._tokens_per_hash - 1
        block_keys = self.request.content.block_keys[hash_index : hash_index + 1]
        return int(self._space.make(block_keys, index, np.array([boundary]))[0])

    @property
    def num_hashes(self) -> int:
        return self.request.num_tokens // self._tokens_per_hash

    def clear_tables(self) -> None:
        for state in self.groups:
            state.table.num_blocks = 0

    def rewind(self) -> None:
        """Offer every chunk again."""
        for state in self.groups:
            state.next_stored_chunk_idx = 0
        self.settled_tokens = -1

    def extend_tables(self, new_blocks: BlocksOfGroups) -> None:
        for state in self.groups:
            state.table.extend(np.asarray(new_blocks[state.group.group_id], np.int32))

    def storable_chunks(self, state: GroupState, num_tokens: int, *, clamps_to_blocks: bool) -> int:
        """A drafter's trailing chunk may be rewritten while its request decodes; at the end it is stored too."""
        request = self.request
        is_volatile = (
            state.group.is_drafter and num_tokens > request.num_prompt_tokens and not request.status.is_finished
        )
        return state.storable_chunks(num_tokens, holds_back_last=is_volatile, clamps_to_blocks=clamps_to_blocks)

    def tokens_after(self, num_scheduled: int, num_computed: int) -> int:
        """Tokens whose KV is there after this step. The last sampled token's slot is never written."""
        request = self.request
        if request.status is RequestStatus.FINISHED_ABORTED:
            return request.num_computed_tokens
        if request.status.is_finished:
            return max(request.num_prompt_tokens, request.num_tokens - 1)
        return num_computed + num_scheduled


def _token_limit(params: Mapping[str, Any] | None, name: str) -> int | None:
    """A non-negative whole number; anything else is ignored (vLLM logs a warning). True is no number."""
    raw = params.get(name) if params else None
    return raw if type(raw) is int and raw >= 0 else None
