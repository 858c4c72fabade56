"""Where a chunk of a prompt may end (vLLM: Scheduler._mamba_block_aligned_split, _reserve_prefill_lookahead)."""

from dataclasses import dataclass

from kvreplay.engine.config import SchedulerConfig, SpeculativeConfig
from kvreplay.engine.request import Request
from kvreplay.kv.cache_manager import KVCacheManager
from kvreplay.kv.managers.mamba import checkpoint_position


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRules:
    """`block_size`: of Mamba states (vLLM: cache_config.block_size); None where chunks may end anywhere.

    `tail_unit`: what a prompt's last state that lies inside a block is aligned to; None where there is none.
    `prefill_lookahead`: known tokens beyond a chunk that a drafter reads.
    """

    block_size: int | None = None
    tail_unit: int | None = None
    drops_eagle_block: bool = False
    num_hash_lookahead: int = 0
    max_chunk: int = 0
    prefill_lookahead: int = 0

    def aligned(self, request: Request, start: int, num_tokens: int) -> int:
        """Of `num_tokens` from `start` on, those up to where the state must be kept; 0 if there is no such place.

        Only while the prompt (or, after a preemption, what had been generated) is computed.
        """
        block_size = self.block_size
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        if block_size is None or start >= prefill_end:
            return num_tokens
        end = start + num_tokens
        if end < prefill_end:
            aligned_end = end // block_size * block_size
            if aligned_end > start or block_size <= self.max_chunk:
                end = aligned_end
        stops = [stop for stop in self._stops(request, start, end) if start < stop < end]
        return max(min(stops, default=end) - start, 0)

    def _stops(self, request: Request, start: int, end: int) -> list[int]:
        """Positions that a chunk must not run past."""
        assert self.block_size is not None
        block_size = self.block_size
        last_cacheable = self._checkpoint(request.num_tokens, block_size)
        stops = [last_cacheable]
        if start % block_size:
            stops.append((start // block_size + 1) * block_size)
        if self.tail_unit is not None:
            tail = self._checkpoint(request.num_prompt_tokens, self.tail_unit)
            if last_cacheable < tail < request.num_prompt_tokens:
                stops.append(tail)
        junction = request.shared_prefix_boundary
        if start < junction < end:
            stops.append(start + (junction - start) // block_size * block_size)
        return stops

    def _checkpoint(self, num_tokens: int, unit: int) -> int:
        return checkpoint_position(
            num_tokens, unit, drops_eagle_block=self.drops_eagle_block, num_lookahead=self.num_hash_lookahead
        )

    def outside_lookahead(self, request: Request, start: int, num_tokens: int) -> int:
        """No chunk ends so close to the end that a drafter would read beyond what is known."""
        remaining = request.num_tokens - start - num_tokens
        if 0 < remaining < self.prefill_lookahead:
            num_tokens -= self.prefill_lookahead - remaining
        return max(num_tokens, 0)


def chunk_rules(
    config: SchedulerConfig, kv: KVCacheManager, speculation: SpeculativeConfig | None, block_size: int | None
) -> ChunkRules:
    """`block_size` None: that of the aligned Mamba group."""
    aligned = [group.block_size for group in kv.groups if group.is_aligned_mamba]
    threshold = config.long_prefill_token_threshold
    budget = config.max_num_scheduled_tokens or config.max_num_batched_tokens
    return ChunkRules(
        block_size=(block_size or aligned[0]) if aligned else None,
        tail_unit=kv.rules.hash_block_size if aligned and kv.hits_inside_blocks else None,
        drops_eagle_block=kv.rules.drops_eagle_block,
        num_hash_lookahead=kv.rules.num_hash_lookahead_tokens,
        max_chunk=min(budget, threshold) if threshold else budget,
        prefill_lookahead=speculation.num_prefill_lookahead if speculation is not None else 0,
    )
