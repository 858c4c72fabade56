"""What is known by name: model presets with their source, and the data that is packaged with kvreplay."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import kvreplay
from kvreplay.behaviour import nearest
from kvreplay.errors import TraceError
from kvreplay.kv.specs import (
    FULL,
    MAMBA,
    MAMBA_ALIGN,
    MLA,
    SLIDING_WINDOW,
    SLIDING_WINDOW_MLA,
    KVCacheGroupSpec,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPreset:
    """A model's KV cache. `bytes_per_token` is what an instance stores for a token, over all its GPUs."""

    groups: tuple[KVCacheGroupSpec, ...]
    max_model_len: int
    num_kv_heads: int | None = None
    use_mla: bool = False
    source: str


MODEL_PRESETS: Final[dict[str, ModelPreset]] = {
    "llama-70b": ModelPreset(
        groups=(KVCacheGroupSpec(kind=FULL, block_size=16, bytes_per_token=327_680),),
        max_model_len=131_072,
        num_kv_heads=8,
        source=(
            "Llama 3.1 70B, config.json: 80 layers x 8 KV heads x 128 x 2 (K and V) x 2 B (BF16) = 327,680 B per "
            "token; max_position_embeddings 131,072"
        ),
    ),
    "llama-8b": ModelPreset(
        groups=(KVCacheGroupSpec(kind=FULL, block_size=16, bytes_per_token=131_072),),
        max_model_len=131_072,
        num_kv_heads=8,
        source=(
            "Llama 3.1 8B, config.json: 32 layers x 8 KV heads x 128 x 2 (K and V) x 2 B (BF16) = 131,072 B per "
            "token; max_position_embeddings 131,072"
        ),
    ),
    "deepseek-mla": ModelPreset(
        groups=(KVCacheGroupSpec(kind=FULL, block_size=16, bytes_per_token=70_272),),
        max_model_len=163_840,
        use_mla=True,
        source=(
            "DeepSeek-V3, config.json: 61 layers x (kv_lora_rank 512 + qk_rope_head_dim 64) x 2 B (BF16) = 70,272 B "
            "per token; max_position_embeddings 163,840. One copy per token: attention data parallel or decode context "
            "parallel; plain TP would keep a copy on every GPU"
        ),
    ),
    "gemma-hybrid": ModelPreset(
        groups=(
            KVCacheGroupSpec(kind=FULL, block_size=16, bytes_per_token=81_920, num_layers=10),
            *(
                KVCacheGroupSpec(
                    kind=SLIDING_WINDOW, block_size=16, sliding_window=1024, bytes_per_token=81_920, num_layers=10
                )
                for _ in range(6)
            ),
        ),
        max_model_len=131_072,
        num_kv_heads=16,
        source=(
            "Gemma 3 27B, config.json: 62 layers, every sixth global, the others with a window of 1,024; 16 KV heads x "
            "128 x 2 (K and V) x 2 B (BF16) = 8,192 B per token and layer. vLLM makes groups of 10 layers: one of the "
            "global ones, six of the 52 others (the last is padded)"
        ),
    ),
    "qwen-gdn-hybrid": ModelPreset(
        groups=(
            KVCacheGroupSpec(kind=FULL, block_size=544, bytes_per_token=24_576, num_layers=12),
            *(
                KVCacheGroupSpec(
                    kind=MAMBA,
                    block_size=544,
                    mamba_cache_mode=MAMBA_ALIGN,
                    state_bytes=12 * 1_097_728,
                    num_layers=12,
                    page_alignment=1_114_112,
                )
                for _ in range(3)
            ),
        ),
        max_model_len=262_144,
        num_kv_heads=2,
        source=(
            "Qwen3-Next 80B-A3B, config.json: 48 layers, every fourth full attention (2 KV heads x 256 x 2 x 2 B = "
            "2,048 B per token), the others gated delta nets: 32 x 128 x 128 x 2 B of state and 3 x 8,192 x 2 B of "
            "convolution = 1,097,728 B. Attention blocks are the smallest multiple of 16 tokens whose page is as "
            "large: 544, to which states are padded"
        ),
    ),
    "kimi-linear": ModelPreset(
        groups=(
            KVCacheGroupSpec(kind=MLA, block_size=1_888, bytes_per_token=8_064, num_layers=7),
            *(
                KVCacheGroupSpec(
                    kind=MAMBA,
                    block_size=1_888,
                    mamba_cache_mode=MAMBA_ALIGN,
                    state_bytes=7 * 2_170_880,
                    num_layers=7,
                    page_alignment=2_174_976,
                )
                for _ in range(3)
            ),
        ),
        max_model_len=1_048_576,
        use_mla=True,
        source=(
            "Kimi Linear 48B-A3B, config.json: 27 layers, 7 of them MLA ((512 + 64) x 2 B = 1,152 B per token), 20 "
            "delta attention: 32 x 128 x 128 x 4 B of state and 3 x 12,288 x 2 B of convolution = 2,170,880 B. The "
            "smallest multiple of 16 tokens whose page is as large is 1,888; vLLM may round it up for its kernels"
        ),
    ),
    "deepseek-v4-five-groups": ModelPreset(
        groups=(
            KVCacheGroupSpec(kind=MLA, block_size=256, tokens_per_state=4, bytes_per_token=146, page_alignment=576),
            KVCacheGroupSpec(
                kind=SLIDING_WINDOW_MLA, block_size=4, sliding_window=8, bytes_per_token=8_192, page_alignment=576
            ),
            KVCacheGroupSpec(
                kind=SLIDING_WINDOW_MLA, block_size=8, sliding_window=128, bytes_per_token=4_096, page_alignment=576
            ),
            *(
                KVCacheGroupSpec(
                    kind=SLIDING_WINDOW_MLA, block_size=64, sliding_window=128, bytes_per_token=584, page_alignment=576
                )
                for _ in range(2)
            ),
        ),
        max_model_len=1_048_576,
        use_mla=True,
        source=(
            "DeepSeek-V4-like, vllm/v1/kv_cache_interface.py, one layer of each kind: MLA compressed 4:1 (584 B "
            "per state, so 146 B per token), the states of both compressors in float32 (8,192 and 4,096 B per token, "
            "windows 8 and 128), and two of sliding-window MLA (584 B per token, window 128); pages padded to "
            "multiples of 576 B"
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


def find_trace(name_or_path: str) -> Path:
    """A file, or a canned trace by name. Raises TraceError naming the canned ones."""
    path = Path(name_or_path)
    names = packaged_names("traces", ".parquet")
    if path.exists() and not (path.is_dir() and name_or_path in names):
        return path
    if name_or_path in names:
        return packaged_folder("traces") / f"{name_or_path}.parquet"
    canned = f"{', '.join(names) or 'there are none'}"
    raise TraceError(f"{name_or_path}: no such file, nor a canned trace ({canned}){nearest(name_or_path, names)}")
