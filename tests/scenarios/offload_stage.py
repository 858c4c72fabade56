"""One engine with a CPU tier, and the moment in which that matters: a prompt is stored, driven off the GPU, and asked
for again.

Times in ms, a step takes 10: `a` runs from 0 on; `f` needs the whole pool from `f_ms` on; `b` has the prompt of `a`,
and finds all of it in the CPU tier. Copies take no time, or nearly.
"""

from dataclasses import replace
from typing import Any

from kvreplay.connectors.offloading.config import OffloadingConfig
from kvreplay.kv.specs import MAMBA, MAMBA_ALIGN, KVCacheGroupSpec
from kvreplay.replay.config import ConnectorConfig, ReplayConfig
from kvreplay.trace.workload import Workload
from tests.scenarios.stage import Check, request, role, single, workload

STATES = KVCacheGroupSpec(kind=MAMBA, block_size=4, mamba_cache_mode=MAMBA_ALIGN, state_bytes=4)
SLOT = 4096
"""Bytes of a chunk's slot: a page of memory, as blocks are so small."""
TEXT = "abcd"


def offloading(
    *groups: KVCacheGroupSpec,
    cpu_chunks: int = 64,
    num_gpu_blocks: int = 17,
    check: Check = "on",
    scheduler: dict[str, Any] | None = None,
    **options: Any,  # noqa: ANN401 - fields of OffloadingConfig
) -> ReplayConfig:
    """E0 with a pool that holds one longest request."""
    base = single(role(num_gpu_blocks=num_gpu_blocks, **(scheduler or {})), check=check)
    config = OffloadingConfig(cpu_bytes_to_use=cpu_chunks * SLOT, copy_latency=1e-6, **options)
    return replace(
        base,
        model=replace(base.model, groups=groups or base.model.groups),
        connector=ConnectorConfig(kind="offloading", options=config),
    )


def there_and_back(*, f_ms: float = 100, b_ms: float = 400, **params: Any) -> Workload:  # noqa: ANN401 - of `a`
    return workload(
        request("a", 0, prompt_tokens=16, text=TEXT, **params),
        request("f", f_ms, prompt_tokens=60),
        request("b", b_ms, prompt_tokens=16, text=TEXT),
    )


def hybrid(
    *groups: KVCacheGroupSpec,
    num_gpu_blocks: int,
    max_model_len: int = 64,
    budget: int = 32,
    cpu_chunks: int = 64,
    prefix_match_unit: int | None = None,
    **options: Any,  # noqa: ANN401 - fields of OffloadingConfig
) -> ReplayConfig:
    """E0 with a model of these groups, every state and window of which is kept that a hit could need."""
    base = offloading(*groups, cpu_chunks=cpu_chunks, num_gpu_blocks=40, **options)
    own = role(num_gpu_blocks=num_gpu_blocks, max_num_batched_tokens=budget)
    scheduler = replace(own.scheduler, max_model_len=max_model_len)
    cache = replace(own.cache, prefix_cache_retention_interval=None, prefix_match_unit=prefix_match_unit)
    own = replace(own, scheduler=scheduler, cache=cache)
    return replace(base, model=replace(base.model, max_model_len=max_model_len), roles={"engine": own})
