"""What is known by name: model presets with their source, and the data that is packaged with kvreplay."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import kvreplay
from kvreplay.kv.specs import FULL, KVCacheGroupSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPreset:
    """A model's KV cache. `bytes_per_token` is what an instance stores for a token, over all its GPUs."""

    groups: tuple[KVCacheGroupSpec, ...]
    max_model_len: int
    source: str


MODEL_PRESETS: Final[dict[str, ModelPreset]] = {
    "llama-70b": ModelPreset(
        groups=(KVCacheGroupSpec(kind=FULL, block_size=16, bytes_per_token=327_680),),
        max_model_len=131_072,
        source=(
            "Llama 3.1 70B, config.json: 80 layers x 8 KV heads x 128 x 2 (K and V) x 2 B (BF16) = 327,680 B per "
            "token; max_position_embeddings 131,072"
        ),
    ),
    "deepseek-mla": ModelPreset(
        groups=(KVCacheGroupSpec(kind=FULL, block_size=16, bytes_per_token=70_272),),
        max_model_len=163_840,
        source=(
            "DeepSeek-V3, config.json: 61 layers x (kv_lora_rank 512 + qk_rope_head_dim 64) x 2 B (BF16) = 70,272 B "
            "per token; max_position_embeddings 163,840. One copy per token: attention data parallel or decode context "
            "parallel; plain TP would keep a copy on every GPU"
        ),
    ),
}


def packaged_folder(name: str) -> Path:
    """`configs` or `traces`: inside the installed package, or at the top of a checkout."""
    package = Path(kvreplay.__file__).parent
    installed = package / name
    return installed if installed.is_dir() else package.parent / name


def packaged_names(name: str, suffix: str) -> list[str]:
    """Names (without suffix) of what a packaged folder holds."""
    return sorted(path.stem for path in packaged_folder(name).glob(f"*{suffix}"))
