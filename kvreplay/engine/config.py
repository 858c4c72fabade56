"""vLLM's scheduler and cache settings, under vLLM's names and with vLLM 0.33.0's defaults.

Sources: vllm/config/scheduler.py, vllm/config/cache.py, vllm/config/kv_transfer.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from kvreplay.errors import ConfigError
from kvreplay.kv.cache_manager import DraftRules

KV_ROLES = ("kv_producer", "kv_consumer", "kv_both")
POLICIES = ("fcfs", "priority")
_EAGLE_METHODS = ("eagle", "eagle3", "mtp")
SPECULATIVE_METHODS = (*_EAGLE_METHODS, "draft_model", "ngram")
MAX_SPECULATIVE_TOKENS = 64
DEFAULT_ACCEPTANCE = 0.7
"""Of a draft, given that those before it were right: what drafters of the EAGLE kind reach on chat, roughly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes in tokens or requests. `max_num_scheduled_tokens` and `max_num_active_seqs` None: as their namesakes."""

    max_num_batched_tokens: int = 2048
    max_num_scheduled_tokens: int | None = None
    max_num_seqs: int = 128
    max_num_active_seqs: int | None = None
    max_model_len: int = 131072
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    enable_chunked_prefill: bool = True
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    prefill_schedule_interval: int = 1
    policy: str = "fcfs"
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "prefill_schedule_interval"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"scheduler.{name} must be > 0, got {getattr(self, name)}")
        for name in ("max_num_scheduled_tokens", "max_num_active_seqs"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"scheduler.{name} must be > 0, got {value}")
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                f"scheduler.long_prefill_token_threshold must be >= 0, got {self.long_prefill_token_threshold}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"scheduler.max_num_batched_tokens ({self.max_num_batched_tokens}) must be >= "
                f"scheduler.max_num_seqs ({self.max_num_seqs})"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"scheduler.watermark must be in [0, 1), got {self.watermark}")
        if self.policy not in POLICIES:
            raise ConfigError(f"scheduler.policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")

    @property
    def token_budget(self) -> int:
        """Tokens that a step may schedule, where drafts need no rows of their own."""
        return min(self.max_num_scheduled_tokens or self.max_num_batched_tokens, self.max_num_batched_tokens)

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that overlap."""
        return 2 if self.async_scheduling else 1

    @property
    def max_in_flight_tokens(self) -> int:
        return self.max_concurrent_batches * self.max_num_batched_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding (vllm/config/speculative.py, VllmConfig.num_*_tokens).

    How many drafts are right is drawn, as by vLLM's rejection sampler of kind `synthetic`, whose two settings are
    exclusive. `draft_pass_ns`, which is ours: a forward pass of the drafter.
    """

    num_speculative_tokens: int
    method: str = "eagle"
    num_mtp_layers: int = 1
    disable_eagle_block_drop: bool = False
    disable_lookahead_block_hashes: bool = False
    parallel_drafting: bool = False
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    """For each draft, the chance that it and all before it are right."""
    synthetic_acceptance_length: float | None = None
    """Tokens that a verification brings on average, the one that is always right included."""
    draft_pass_ns: int = 500_000

    def __post_init__(self) -> None:
        if self.method not in SPECULATIVE_METHODS:
            raise ConfigError(
                f"speculative.method must be one of {', '.join(SPECULATIVE_METHODS)}, got {self.method!r}"
            )
        if not 0 < self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"speculative.num_speculative_tokens must be in [1, {MAX_SPECULATIVE_TOKENS}], "
                f"or 0 for none, got {self.num_speculative_tokens}"
            )
        if self.num_mtp_layers <= 0:
            raise ConfigError(f"speculative.num_mtp_layers must be > 0, got {self.num_mtp_layers}")
        if self.draft_pass_ns < 0:
            raise ConfigError(f"speculative.draft_pass_ns must be >= 0, got {self.draft_pass_ns}")
        self._check_acceptance()

    def _check_acceptance(self) -> None:
        rates, length, count = (
            self.synthetic_acceptance_rates,
            self.synthetic_acceptance_length,
            self.num_speculative_tokens,
        )
        if rates is not None and length is not None:
            raise ConfigError(
                "speculative.synthetic_acceptance_rates and speculative.synthetic_acceptance_length: give one of them"
            )
        if rates is not None:
            name = "speculative.synthetic_acceptance_rates"
            if len(rates) != count:
                raise ConfigError(f"{name}: {count} are needed, one for each speculative token, got {len(rates)}")
            if not all(0.0 <= rate <= 1.0 for rate in rates):
                raise ConfigError(f"{name} must be in [0, 1], got {_listed(rates)}")
            if any(later > earlier for earlier, later in pairwise(rates)):
                raise ConfigError(f"{name} must not increase, got {_listed(rates)}")
        if length is not None and not 1.0 <= length <= count + 1:
            raise ConfigError(f"speculative.synthetic_acceptance_length must be in [1, {count + 1}], got {length}")

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """For each draft, the chance that it and all before it are right.

        (vLLM: _resolve_synthetic_acceptance_rates)
        """
        count, length = self.num_speculative_tokens, self.synthetic_acceptance_length
        if self.synthetic_acceptance_rates is not None:
            return self.synthetic_acceptance_rates
        if length is None:
            return tuple(DEFAULT_ACCEPTANCE**place for place in range(1, count + 1))
        return tuple(min(max(length - 1 - place, 0.0), 1.0) for place in range(count))

    @property
    def drafting_ns(self) -> int:
        """What proposing the next step's drafts adds to a step."""
        if self.method == "ngram":
            return 0
        return self.draft_pass_ns * (1 if self.parallel_drafting else self.num_speculative_tokens)

    @property
    def uses_hidden_states(self) -> bool:
        """Whether drafts are made from the model's own states (vLLM: use_eagle)."""
        return self.method in _EAGLE_METHODS

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots that the drafter writes beyond the scheduled tokens."""
        return self.num_speculative_tokens if self.uses_hidden_states or self.method == "draft_model" else 0

    @property
    def num_step_slots(self) -> int:
        """Slots that a request needs for a step of decoding."""
        return 1 + self.num_speculative_tokens + self.num_lookahead_tokens

    @property
    def num_draft_slots(self) -> int:
        """Rows of input that each request needs beside its tokens (vLLM: max_num_new_slots_for_drafting)."""
        if self.parallel_drafting:
            return self.num_speculative_tokens - (0 if self.method == "draft_model" else 1)
        return 1 if self.method == "draft_model" else 0

    @property
    def num_prefill_lookahead(self) -> int:
        """Known tokens beyond a chunk that the drafter reads: one, or with several MTP modules one for each."""
        if not self.uses_hidden_states:
            return 0
        has_modules = self.method == "mtp" and min(self.num_mtp_layers, self.num_speculative_tokens) > 1
        return self.num_speculative_tokens if has_modules else 1

    def cache_rules(self, *, enable_caching: bool, has_connector: bool) -> DraftRules:
        """Without a connector hashes cover what drafts depend on; with one, hits lose their last block instead."""
        drops_block = self.uses_hidden_states and not self.disable_eagle_block_drop
        covers = drops_block and not self.disable_lookahead_block_hashes and enable_caching and not has_connector
        return DraftRules(
            num_hash_lookahead=self.num_prefill_lookahead if covers else 0,
            num_prefill_lookahead=self.num_prefill_lookahead,
            drops_block=drops_block and not covers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """`num_gpu_blocks` includes block 0, the null block."""

    num_gpu_blocks: int
    rank_gpu_blocks: tuple[int, ...] | None = None
    """How many of them each rank has memory for, where that differs; None: for all."""
    enable_prefix_caching: bool = True
    prefix_cache_retention_interval: int | None = 0
    prefix_match_unit: int | None = None
    """Tokens of one prefix hash, with several KV cache groups; None: the greatest that divides all of their blocks."""

    def __post_init__(self) -> None:
        if self.num_gpu_blocks < 2:
            raise ConfigError(f"cache.num_gpu_blocks must be >= 2, got {self.num_gpu_blocks}")
        if self.rank_gpu_blocks is not None and min(self.rank_gpu_blocks, default=0) < 2:
            raise ConfigError(f"cache.rank_gpu_blocks must be >= 2 each, got {_listed(self.rank_gpu_blocks) or 'none'}")
        interval = self.prefix_cache_retention_interval
        if interval is not None and interval < 0:
            raise ConfigError(f"cache.prefix_cache_retention_interval must be >= 0, got {interval}")
        if self.prefix_match_unit is not None and self.prefix_match_unit <= 0:
            raise ConfigError(f"cache.prefix_match_unit must be > 0, got {self.prefix_match_unit}")

    def pool_blocks(self, *, as_first_rank: bool = False) -> int:
        """Blocks of the pool: as many as every rank has (vLLM: get_kv_cache_configs), or as the first one has."""
        ranks = self.rank_gpu_blocks or ()
        return min((self.num_gpu_blocks, *(ranks[:1] if as_first_rank else ranks)))


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(map(str, numbers))
