"""vLLM's scheduler and cache settings, under vLLM's names and with vLLM 0.33.0's defaults.

Sources: vllm/config/scheduler.py, vllm/config/cache.py, vllm/config/kv_transfer.py.
"""

from dataclasses import dataclass

from kvreplay.errors import ConfigError

LOAD_FAILURE_POLICIES = ("fail", "recompute")
KV_ROLES = ("kv_producer", "kv_consumer", "kv_both")


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
        if self.policy != "fcfs":
            raise ConfigError(f"scheduler.policy must be 'fcfs', got {self.policy!r}")
        if self.async_scheduling:
            raise ConfigError("scheduler.async_scheduling is not modelled yet; set it to false")

    @property
    def token_budget(self) -> int:
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """`num_gpu_blocks` includes block 0, the null block."""

    num_gpu_blocks: int
    enable_prefix_caching: bool = True
    prefix_cache_retention_interval: int | None = 0

    def __post_init__(self) -> None:
        if self.num_gpu_blocks < 2:
            raise ConfigError(f"cache.num_gpu_blocks must be >= 2, got {self.num_gpu_blocks}")
        interval = self.prefix_cache_retention_interval
        if interval is not None and interval < 0:
            raise ConfigError(f"cache.prefix_cache_retention_interval must be >= 0, got {interval}")
