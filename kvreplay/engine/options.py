"""What a scheduler is told beside vLLM's own settings."""

from dataclasses import dataclass

from kvreplay.engine.config import SpeculativeConfig
from kvreplay.engine.recovery import VLLM_0_33_FAILURES, FailureRules
from kvreplay.engine.rules import VLLM_0_33_RULES, SchedulerRules


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """How its version, its connector and its workload behave."""

    rules: SchedulerRules = VLLM_0_33_RULES
    failure_rules: FailureRules = VLLM_0_33_FAILURES
    recompute_load_failures: bool = False
    """`kv_load_failure_policy` is `recompute`; else it is `fail`."""
    kv_role: str = ""
    """Empty without a connector that has roles."""
    divergent_hits: bool = False
    """The connector can bring a Mamba state that is missing at the end of full attention's hit."""
    defer_async_loads: bool = False
    """Loads, too, wait for steps in flight."""
    speculation: SpeculativeConfig | None = None
    cache_block_size: int | None = None
    """What chunks are aligned to for Mamba, if not its group's block size."""
    use_lockstep: bool = False
    output_is_shared: bool = False
    """Some request could hit blocks that hold another one's output."""


VLLM_0_33_OPTIONS = SchedulerOptions()
