"""The real scheduler of an installed vLLM, set up for a workload: on a CPU, without a model, nothing compiled.

What vLLM reads from a model is made up here; no decision that a vector records depends on it. Some checks of
`VllmConfig` look at that model, or at the platform, and change settings: those that the workload names are put back
afterwards. A setting that this vLLM does not have yet is left out where the workload leaves it neutral, and refused
where it does not.
"""

# mypy: disable-error-code="import-not-found, import-untyped"

import copy
import dataclasses
import inspect
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch  # noqa: TID253 - vLLM imports it anyway
import vllm
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.config.speculative import SpeculativeConfig
from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.structured_output import StructuredOutputManager

from kvreplay.conformance.vector import UnsupportedVectorError
from kvreplay.conformance.workload import EngineSpec, GroupSpec, Speculation, Workload
from kvreplay.errors import ConfigError

VLLM_VERSION: Final = str(vllm.__version__)

_CONNECTOR: Final = {
    "kv_connector": "ScriptedKVConnector",
    "kv_connector_module_path": "kvreplay.record.vllm_connector",
}
_NEUTRAL: Final = {"max_tp_shards": 1, "tokens_per_state": 1, "prefill_schedule_interval": 1}
"""Values, other than null, false and 0, that mean what a vLLM without the setting does."""

_TINY_LLAMA: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1 << 20,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
}


class RealScheduler(NamedTuple):
    """`scheduler_block_size` is what hits are aligned to, `hash_block_size` what prefix hashes cover."""

    scheduler: Any
    scheduler_block_size: int
    hash_block_size: int


def build_scheduler(workload: Workload, connector: Mapping[str, Any] | None = None) -> RealScheduler:
    """`connector`: settings of another one than the scripted. Raises ConfigError for what vLLM itself refuses."""
    try:
        return _build(workload, connector)
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"vllm {VLLM_VERSION} refuses the engine: {_first_line(error)}") from error


def known(record: Any, /, **settings: Any) -> Any:  # noqa: ANN401 - a class of vLLM
    """`record(**settings)`, without the neutral ones of those that it does not have."""
    names = set(inspect.signature(record).parameters)
    if dataclasses.is_dataclass(record):
        names |= {field.name for field in dataclasses.fields(record)}
    for name in settings.keys() - names:
        if settings[name] and settings[name] != _NEUTRAL.get(name):
            raise UnsupportedVectorError(f"vllm {VLLM_VERSION} has no {record.__name__}.{name}")
    return record(**{name: value for name, value in settings.items() if name in names})


def _build(workload: Workload, connector: Mapping[str, Any] | None) -> RealScheduler:
    engine = workload.engine
    config = _vllm_config(workload, connector)
    groups = [
        known(
            kv_cache_interface.KVCacheGroupSpec,
            layer_names=[f"group{index}.layer{layer}" for layer in range(group.layers)],
            kv_cache_spec=_group_spec(group, engine.block_size),
            is_eagle_group=group.eagle,
        )
        for index, group in enumerate(workload.groups)
    ]
    cache_config = known(
        kv_cache_interface.KVCacheConfig,
        num_blocks=engine.num_gpu_blocks,
        kv_cache_tensors=[_tensor(engine.num_gpu_blocks)] if connector is not None else [],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=engine.retention_interval,
        hisparse_host_num_blocks=engine.hisparse_host_blocks,
    )
    register_all_kvcache_specs(config)
    scheduler_block_size, hash_block_size = resolve_kv_cache_block_sizes(cache_config, config)
    scheduler = (AsyncScheduler if engine.async_scheduling else Scheduler)(
        vllm_config=config,
        kv_cache_config=cache_config,
        block_size=scheduler_block_size,
        hash_block_size=hash_block_size,
        log_stats=False,
        structured_output_manager=StructuredOutputManager(config),
    )
    # The V2 model runner is the default on a GPU; on a CPU vLLM falls back.
    scheduler.use_v2_model_runner = True
    scheduler.can_skip_drafts = getattr(scheduler, "num_lookahead_tokens", 0) > 0
    return RealScheduler(scheduler, scheduler_block_size, hash_block_size)


def _tensor(num_blocks: int) -> Any:  # noqa: ANN401 - KVCacheTensor
    """A byte a block: whoever derives a pool from bytes counts blocks."""
    return kv_cache_interface.KVCacheTensor(size=num_blocks, layers=[], layer_stride=num_blocks, block_stride=1)


def _vllm_config(workload: Workload, connector: Mapping[str, Any] | None) -> Any:  # noqa: ANN401 - VllmConfig
    engine = workload.engine
    cache = CacheConfig(block_size=engine.block_size, enable_prefix_caching=engine.enable_prefix_caching)
    # Otherwise chosen by the workers, which are not there.
    cache.kv_cache_layout = "LBNHC"
    config = VllmConfig(
        model_config=_model_config(engine.max_model_len),
        scheduler_config=_scheduler_config(engine),
        cache_config=cache,
        parallel_config=ParallelConfig(),
        kv_transfer_config=_transfer_config(engine, connector) if workload.has_connector else None,
        device_config=DeviceConfig("cpu"),
    )
    config.scheduler_config.async_scheduling = engine.async_scheduling
    config.cache_config.enable_prefix_caching = engine.enable_prefix_caching
    config.cache_config.block_size = engine.block_size
    config.cache_config.mamba_cache_mode = engine.mamba_cache_mode
    config.cache_config.num_gpu_blocks = engine.num_gpu_blocks
    if engine.spec is not None:
        config.speculative_config = _speculative_config(engine.spec)
    if engine.hash_block_size is not None:
        config.cache_config.prefix_match_unit = engine.hash_block_size
    return config


def _scheduler_config(engine: EngineSpec) -> Any:  # noqa: ANN401 - SchedulerConfig
    names = (
        "max_num_seqs",
        "max_num_active_seqs",
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "max_model_len",
        "enable_chunked_prefill",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "scheduler_reserve_full_isl",
        "prefill_schedule_interval",
        "watermark",
        "policy",
        "async_scheduling",
    )
    settings = {name: getattr(engine, name) for name in names}
    return known(SchedulerConfig, is_encoder_decoder=False, **settings)


def _transfer_config(engine: EngineSpec, connector: Mapping[str, Any] | None) -> Any:  # noqa: ANN401
    if connector is not None:
        policy = {"kv_role": "kv_both", "kv_load_failure_policy": engine.kv_load_failure_policy}
        return known(KVTransferConfig, **policy, **connector)
    return known(
        KVTransferConfig,
        **_CONNECTOR,
        kv_role=engine.kv_role,
        kv_load_failure_policy=engine.kv_load_failure_policy,
        kv_connector_extra_config={
            "requires_kv_delivery": engine.requires_kv_delivery,
            "divergent_hits": engine.divergent_hits,
        },
    )


@cache
def _tiny_model() -> Any:  # noqa: ANN401 - ModelConfig
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_TINY_LLAMA))
        return ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float16", seed=42, max_model_len=1024)


def _model_config(max_model_len: int) -> Any:  # noqa: ANN401 - ModelConfig
    model = copy.copy(_tiny_model())
    model.max_model_len = max_model_len
    return model


def _group_spec(group: GroupSpec, default_block_size: int) -> Any:  # noqa: ANN401 - KVCacheSpec
    block_size = group.block_size or default_block_size
    attention = {
        "block_size": block_size,
        "num_kv_heads": 1,
        "head_size": group.head_size,
        "dtype": torch.float16,
    }
    window = {"sliding_window": group.sliding_window, "extra_retained_tokens": group.extra_retained}
    if group.type == "full":
        return kv_cache_interface.FullAttentionSpec(**attention)
    if group.type == "swa":
        return known(kv_cache_interface.SlidingWindowSpec, **attention, **window)
    if group.type == "chunked_local":
        return kv_cache_interface.ChunkedLocalAttentionSpec(**attention, attention_chunk_size=group.chunk)
    if group.type == "mla":
        return known(
            kv_cache_interface.MLAAttentionSpec, **attention, max_tp_shards=1, tokens_per_state=group.tokens_per_state
        )
    if group.type == "swa_mla":
        return known(
            kv_cache_interface.SlidingWindowMLASpec,
            **attention,
            **window,
            max_tp_shards=1,
            bounded_replay=group.bounded_replay,
        )
    if group.type == "ring":
        return kv_cache_interface.CircularBufferSpec(**attention)
    if group.type == "mamba":
        return kv_cache_interface.MambaSpec(
            block_size=block_size,
            shapes=((16,), (16,)),
            dtypes=(torch.float16, torch.float16),
            mamba_cache_mode=group.mode,
            num_speculative_blocks=group.spec_blocks,
        )
    raise UnsupportedVectorError(f"group type {group.type} is not known to the driver")


def _speculative_config(spec: Speculation) -> Any:  # noqa: ANN401 - SpeculativeConfig
    """With its own rules, but without `__init__`, which reads a drafter's files."""
    config = object.__new__(SpeculativeConfig)
    for field in dataclasses.fields(SpeculativeConfig):
        object.__setattr__(config, field.name, _default_of(field))
    settings = {
        "method": spec.method,
        "num_speculative_tokens": spec.tokens,
        "parallel_drafting": spec.parallel_drafting,
        "disable_eagle_block_drop": spec.disable_block_drop,
        "disable_lookahead_block_hashes": spec.disable_lookahead_hashes,
        "num_speculative_tokens_per_batch_size": None,
        "draft_model_config": SimpleNamespace(
            architectures=[], hf_config=SimpleNamespace(num_nextn_predict_layers=spec.mtp_layers)
        ),
    }
    for name, value in settings.items():
        object.__setattr__(config, name, value)
    return config


def _default_of(field: dataclasses.Field[Any]) -> Any:  # noqa: ANN401
    """A field's default, also where pydantic wraps it; None for a field that has none."""
    if field.default is dataclasses.MISSING:
        return None
    default = getattr(field.default, "default", field.default)
    return None if type(default).__name__ == "PydanticUndefinedType" else default


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Pydantic's first lines count the errors and name the class.
    told = [line for line in lines if line.startswith(("Value error,", "Assertion failed,"))]
    return (told or lines or [type(error).__name__])[0]
