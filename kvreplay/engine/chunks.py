"""Where a chunk of a prompt may end (vLLM: Scheduler._mamba_block_aligned_split, _reserve_prefill_lookahead)."""

from dataclasses import dataclass

from kvreplay.engine.config import SchedulerConfig, SpeculativeConfig
from kvreplay.engine.request import Request
from kvreplay.engine.rules import VLLM_0_33_RULES, SchedulerRules
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
    never_cuts_to_nothing: bool = False

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

    def outside_lookahead(self, request: Request, start: int, num_tokens: int, wanted: int) -> int:
        """No chunk ends so close to the end that a drafter would read beyond what is known.

        `wanted`: what the chunk had been before it was aligned.
        """
        remaining = request.num_tokens - start - num_tokens
        if 0 < remaining < self.prefill_lookahead:
            if self.never_cuts_to_nothing and self.block_size is not None:
                return self._cut_elsewhere(request, start, num_tokens, wanted)
            num_tokens -= self.prefill_lookahead - remaining
        return max(num_tokens, 0)

    def _cut_elsewhere(self, request: Request, start: int, num_tokens: int, wanted: int) -> int:
        """At the last boundary that leaves the drafter enough, or after everything; else where it must be."""
        assert self.block_size is not None
        last = request.num_tokens - self.prefill_lookahead
        boundary = last // self.block_size * self.block_size
        if boundary > start:
            return boundary - start
        if start + wanted >= request.num_tokens:
            return wanted
        return last - start if last > start else num_tokens


def chunk_rules(
    config: SchedulerConfig,
    kv: KVCacheManager,
    speculation: SpeculativeConfig | None,
    block_size: int | None,
    rules: SchedulerRules = VLLM_0_33_RULES,
) -> ChunkRules:
    """`block_size` None: that of the aligned Mamba group."""
    aligned = [group.block_size for group in kv.groups if group.is_aligned_mamba]
    threshold = config.long_prefill_token_threshold
    # Not `token_budget`: vLLM's rule looks at the one limit only.
    budget = config.max_num_scheduled_tokens or config.max_num_batched_tokens
    return ChunkRules(
        block_size=(block_size or aligned[0]) if aligned else None,
        tail_unit=kv.rules.hash_block_size if aligned and kv.hits_inside_blocks else None,
        drops_eagle_block=kv.rules.drops_eagle_block,
        num_hash_lookahead=kv.rules.num_hash_lookahead_tokens,
        max_chunk=min(budget, threshold) if threshold else budget,
        prefill_lookahead=speculation.num_prefill_lookahead if speculation is not None else 0,
        never_cuts_to_nothing=rules.never_cuts_to_nothing,
    )
