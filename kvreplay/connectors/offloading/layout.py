"""The KV cache groups as the connector sees them, and what follows from them (vLLM: offloading/config.py).

A *chunk* is `blocks_per_chunk` consecutive blocks of one group and the unit of offloading. All positions are tokens.
"""

from dataclasses import dataclass
from functools import cached_property

from kvreplay.errors import ConfigError
from kvreplay.kv.specs import CHUNKED_LOCAL, FULL, MAMBA, SLIDING_WINDOW, cdiv


@dataclass(frozen=True, kw_only=True)
class OffloadGroup:
    """One offloaded group. `group_id`: its place in the engine's block tables.

    `window`: of a sliding window, or the size of a chunked-local chunk. `extra_retained_tokens`: kept beyond the
    window (multi-module MTP). `is_aligned_state`: a recurrent group in `align` mode, whose states are handed over by
    the scheduler rather than found in block tables. `is_drafter`: its layers belong to an EAGLE or MTP drafter.
    """

    group_id: int
    kind: str = FULL
    tokens_per_block: int = 16
    blocks_per_chunk: int = 1
    window: int | None = None
    extra_retained_tokens: int = 0
    is_aligned_state: bool = False
    is_drafter: bool = False
    bytes_per_block: int = 0

    def __post_init__(self) -> None:
        assert (self.window is not None) == (self.kind in (SLIDING_WINDOW, CHUNKED_LOCAL)), self
        assert not self.is_aligned_state or self.kind == MAMBA, self

    @cached_property
    def tokens_per_chunk(self) -> int:
        return self.tokens_per_block * self.blocks_per_chunk

    @cached_property
    def is_windowed(self) -> bool:
        """Not all of a prefix is needed to go on from its end."""
        return self.kind != FULL

    @cached_property
    def window_chunks(self) -> int:
        """Trailing chunks that a hit needs."""
        if self.kind == MAMBA:
            return 1
        assert self.window is not None, self
        chunks = cdiv(self.window, self.tokens_per_chunk)
        if self.kind == SLIDING_WINDOW:
            chunks = max(chunks, cdiv(self.window - 1 + self.extra_retained_tokens, self.tokens_per_chunk))
        return chunks

    def load_window_chunks(self, end: int) -> int:
        """The same where the hit ends at `end`: rounding that up to a chunk may push the window's start out of it."""
        chunks = self.window_chunks
        if self.kind == SLIDING_WINDOW:
            assert self.window is not None
            padding = -end % self.tokens_per_chunk
            reach = self.window - 1 + self.extra_retained_tokens + padding
            chunks = max(chunks, cdiv(reach, self.tokens_per_chunk))
        return chunks


@dataclass(frozen=True, kw_only=True)
class OffloadLayout:
    """All offloaded groups of a model.

    `tokens_per_hash`: granularity of the content's block keys. `num_workers`: ranks that copy. `sync_load_budget` in
    tokens, 0 for none (`sync_load_budget_bytes` over the bytes of a token). `fine_grained_hits`: the prefix cache hits
    at `tokens_per_hash`, not only at block ends.
    """

    groups: tuple[OffloadGroup, ...]
    tokens_per_hash: int
    num_workers: int = 1
    retention_interval: int | None = None
    sync_load_budget: int = 0
    offload_prompt_only: bool = True
    enable_prefix_caching: bool = True
    fine_grained_hits: bool = False

    def __post_init__(self) -> None:
        if not self.groups:
            raise ConfigError("connector: KV offloading found no eligible cache groups")
        for group in self.groups:
            if group.tokens_per_block % self.tokens_per_hash:
                raise ConfigError(
                    f"connector: block size {group.tokens_per_block} of group {group.group_id} is no multiple of the "
                    f"hash block size {self.tokens_per_hash}"
                )
        self._check_retention()
        if len({group.tokens_per_chunk for group in self.groups if group.is_aligned_state}) > 1:
            raise ConfigError("connector: recurrent groups of different sizes cannot be offloaded together")

    def _check_retention(self) -> None:
        interval = self.retention_interval
        if interval is None:
            return
        for group in self.groups:
            if group.is_windowed and interval % group.tokens_per_chunk:
                raise ConfigError(
                    f"cache.prefix_cache_retention_interval ({interval}) must be a multiple of tokens_per_chunk "
                    f"({group.tokens_per_chunk})"
                )

    @cached_property
    def blocks_per_chunk(self) -> int:
        return self.groups[0].blocks_per_chunk

    @cached_property
    def lookup_order(self) -> tuple[int, ...]:
        """Indices of groups: full attention first, then windows from the largest."""
        full = [index for index, group in enumerate(self.groups) if not group.is_windowed]
        return (*full, *self.windowed)

    @cached_property
    def windowed(self) -> tuple[int, ...]:
        indices = [index for index, group in enumerate(self.groups) if group.is_windowed]
        return tuple(sorted(indices, key=lambda index: self.groups[index].window_chunks, reverse=True))

    @cached_property
    def state_size(self) -> int | None:
        """Hits of a model with aligned recurrent states end at multiples of this."""
        return next((group.tokens_per_chunk for group in self.groups if group.is_aligned_state), None)

    @cached_property
    def alignment_tokens(self) -> int | None:
        """Where aligned hits can end, if that is one grid: of a window only what they need is stored."""
        full = {group.tokens_per_chunk for group in self.groups if not group.is_windowed}
        if len(full) == 1:
            return full.pop()
        return None if full else max(group.tokens_per_chunk for group in self.groups)

    @cached_property
    def supports_partial_tail(self) -> bool:
        """Whether a hit may end inside a block: states are kept at hash boundaries, one of which fits all groups."""
        return (
            self.blocks_per_chunk == 1
            and len({group.tokens_per_block for group in self.groups}) == 1
            and any(group.is_aligned_state and group.tokens_per_block > self.tokens_per_hash for group in self.groups)
            and all(not group.is_windowed or group.is_aligned_state for group in self.groups)
        )

    def proof_margin(self, group: OffloadGroup) -> int:
        """How far past a partial tail's boundary a drafter group is keyed: the prefix cache matches that far."""
        if not (self.supports_partial_tail and group.is_drafter and not group.is_aligned_state):
            return 0
        if self.fine_grained_hits and group.tokens_per_block > self.tokens_per_hash:
            return self.tokens_per_hash
        return group.tokens_per_block

    @cached_property
    def max_proof_margin(self) -> int:
        return max(self.proof_margin(group) for group in self.groups)
