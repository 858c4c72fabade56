"""ReplayConfig: what it refuses, and its text form."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.errors import ConfigError
from kvreplay.kv.specs import CHUNKED_LOCAL, FULL, MAMBA, SLIDING_WINDOW, KVCacheGroupSpec
from kvreplay.replay.config import ModelConfig, _table, check_role
from kvreplay.replay.config_load import config_from_json, load_config, preset_names
from kvreplay.replay.presets import MODEL_PRESETS, packaged_folder, packaged_names

HOUR_PROMPT_TOKENS, HOUR_SECONDS = 144_793_823, 3_537
LONGEST_REQUEST = 191_386


@pytest.mark.parametrize("name", preset_names())
def test_a_config_survives_its_text_form(name: str) -> None:
    config = load_config(name).config
    assert config_from_json(config.to_json()) == config
    assert config_from_json(config.to_json()).to_json() == config.to_json()


def test_text_form_names_no_preset_and_no_path() -> None:
    """It must mean the same in a later version, on another machine."""
    text = load_config("mooncake-4p4d").config.to_json()
    assert '"preset"' not in text
    assert str(Path.cwd()) not in text


@dataclass
class Annotated:
    """As under `from __future__ import annotations`: the types of its fields are texts."""

    timeout: "float" = 480
    limit: "float | None" = None
    count: "int" = 3


def test_a_whole_number_of_a_float_is_written_as_a_float() -> None:
    """However it was given, and however the record's types are spelled: the fingerprint of a run depends on it."""
    assert json.dumps(_table(Annotated())) == '{"timeout": 480.0, "limit": null, "count": 3}'
    assert json.dumps(_table(MooncakeConfig(abort_request_timeout=480))["abort_request_timeout"]) == "480.0"


def test_what_roles_share_is_written_once() -> None:
    document = load_config("mooncake-4p4d").config.to_document()
    assert document["cache"]["num_gpu_blocks"] == 131_072
    assert document["prefill"]["scheduler"] == {"max_num_batched_tokens": 16_384, "max_num_seqs": 128}
    assert document["decode"]["cache"] == {}


@pytest.mark.parametrize(
    ("preset", "sets", "num_parts", "is_replicated"),
    [
        ("llama-70b", ["topology.tp=4"], 4, False),
        ("llama-70b", ["topology.tp=4", "topology.pp=2", "model.num_kv_heads=8"], 8, False),
        ("llama-70b", ["topology.tp=16", "model.num_kv_heads=8"], 8, False),  # two ranks keep each head
        ("deepseek-mla", [], 1, False),
        ("deepseek-mla", ["topology.tp=4"], 1, True),
        ("deepseek-mla", ["topology.pp=4"], 4, False),
        ("deepseek-mla", ["topology.tp=2", "topology.pp=2"], 2, False),
        ("kimi-linear", ["topology.tp=2"], 1, False),  # has states
    ],
)
def test_what_ranks_keep_of_a_block(preset: str, sets: list[str], num_parts: int, *, is_replicated: bool) -> None:
    """vLLM: offloading/config.py, replicated_layout."""
    config = load_config("offload-single", sets=[f"model.preset={preset}", *sets]).config
    assert config.num_parts("engine") == num_parts
    assert config.is_replicated("engine") is is_replicated


RANKS = "topology.tp, topology.pp: ranks of an instance are modelled with a connector only"


def test_presets_of_the_project() -> None:
    assert preset_names() == [
        "mooncake-1p1d",
        "mooncake-4p4d",
        "mooncake-4p4d-tp4-tp2",
        "mooncake-mtp",
        "offload-boundary",
        "offload-hybrid",
        "offload-hybrid-8",
        "offload-single",
        "single",
        "single-overloaded",
    ]
    assert packaged_names("configs", ".toml") == preset_names()
    assert (packaged_folder("configs") / "single.toml").is_file()


def test_the_4p4d_preset_is_not_overloaded_by_the_conversation_hour() -> None:
    config = load_config("mooncake-4p4d").config
    prefill = config.role("prefill")
    budget = prefill.scheduler.token_budget
    tokens_per_second = budget * 1e9 / prefill.timing.step_ns(budget, 0, 0)
    offered = HOUR_PROMPT_TOKENS / HOUR_SECONDS / config.topology.prefill
    assert 0.5 < offered / tokens_per_second < 0.7
    assert config.role("decode").cache.num_gpu_blocks >= 100_000


@pytest.mark.parametrize("name", ["mooncake-4p4d", "single-overloaded"])
def test_the_presets_for_public_traces_take_their_longest_request(name: str) -> None:
    assert load_config(name).config.model.max_model_len >= LONGEST_REQUEST


def test_model_presets_say_their_source() -> None:
    sizes = {name: preset.groups[0].bytes_per_token for name, preset in MODEL_PRESETS.items()}
    assert sizes == {
        "llama-70b": 80 * 8 * 128 * 2 * 2,
        "llama-8b": 32 * 8 * 128 * 2 * 2,
        "deepseek-mla": 61 * 576 * 2,
        "gemma-hybrid": 10 * 16 * 128 * 2 * 2,
        "qwen-gdn-hybrid": 12 * 2 * 256 * 2 * 2,
        "kimi-linear": 7 * 576 * 2,
        "deepseek-v4-five-groups": 584 // 4,
    }
    assert all("config.json" in preset.source or "vllm/" in preset.source for preset in MODEL_PRESETS.values())


@pytest.mark.parametrize("name", ["gemma-hybrid", "qwen-gdn-hybrid", "kimi-linear", "deepseek-v4-five-groups"])
def test_no_group_of_a_hybrid_wastes_more_than_an_eighth_of_its_pages(name: str) -> None:
    """All groups share one pool, whose blocks are as large as the widest group's."""
    pages = [group.page_bytes for group in MODEL_PRESETS[name].groups]
    assert min(pages) >= 0.875 * max(pages)


def refused(*sets: str, name: str = "single") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(name, sets=sets)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_pool_that_cannot_hold_the_longest_request_is_refused() -> None:
    load_config("single", sets=["model.max_model_len=1600", "cache.num_gpu_blocks=101"])
    assert refused("model.max_model_len=1601", "cache.num_gpu_blocks=101") == (
        "--set cache.num_gpu_blocks=101: cache.num_gpu_blocks: 101 blocks, one of them the null block, cannot hold one "
        "request of model.max_model_len (1601 tokens): 102 are needed"
    )


def test_a_sliding_window_needs_only_its_window_and_a_step() -> None:
    loaded = load_config("single", sets=["model.max_model_len=100000", "scheduler.max_num_batched_tokens=256"]).config
    group = KVCacheGroupSpec(kind=SLIDING_WINDOW, sliding_window=128, bytes_per_token=1)
    document = loaded.to_document()
    document["model"]["groups"] = [
        {"kind": group.kind, "sliding_window": group.sliding_window, "bytes_per_token": group.bytes_per_token}
    ]
    # 127 + 256 tokens are 24 blocks, one more where they start inside a block, and the null block.
    document["cache"]["num_gpu_blocks"] = 26
    config = config_from_json(_dump(document))
    check_role(config.model.groups, "engine", config.role("engine"))
    document["cache"]["num_gpu_blocks"] = 25
    with pytest.raises(ConfigError, match=r"26 are needed$"):
        config_from_json(_dump(document))


def _dump(document: object) -> str:
    import json

    return json.dumps(document)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("topology.tp", "2", RANKS),
        ("topology.pp", "2", RANKS),
        ("topology.dp", "2", "topology.dp: only 1 is modelled so far, got 2"),
        ("topology.tp", "0", "topology.tp must be in [1, 64], got 0"),
        ("topology.tp", "65", "topology.tp must be in [1, 64], got 65"),
        ("model.num_kv_heads", "0", "model.num_kv_heads must be > 0, got 0"),
        ("topology.instances", "-1", "topology.instances must be in [0, 1024], got -1"),
        ("cache.num_gpu_blocks", "1", "cache.num_gpu_blocks must be >= 2, got 1"),
        ("cache.num_gpu_blocks", "99999999", "cache.num_gpu_blocks must be <= 16777216, got 99999999"),
        ("scheduler.max_num_seqs", "0", "scheduler.max_num_seqs must be > 0, got 0"),
        ("model.max_model_len", "0", "model.max_model_len must be > 0, got 0"),
        ("model.block_size", "0", "model.groups: block_size must be > 0, got 0"),
        ("timing.fixed_ns", "0", "timing.fixed_ns must be > 0, got 0"),
        ("network.bandwidth_bytes_per_s", "0", "network.bandwidth_bytes_per_s must be > 0, got 0"),
        ("kv.device", "cuda", "kv.device must be cpu, the only one so far, got 'cuda'"),
        ("connector.kind", "mooncake", "connector.kind: mooncake needs topology.prefill and topology.decode"),
    ],
)
def test_impossible_values_are_refused_naming_the_flag(key: str, value: str, message: str) -> None:
    assert refused(f"{key}={value}").endswith(message)
    assert refused(f"{key}={value}").startswith(("--set", "single --set"))


def test_prefill_and_decode_need_a_connector() -> None:
    assert refused("connector.kind=none", name="mooncake-1p1d").endswith("need mooncake, got 'none'")


_LINEAR = KVCacheGroupSpec(kind=FULL, bytes_per_token=1)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [KVCacheGroupSpec(kind=SLIDING_WINDOW, sliding_window=8, bytes_per_token=1)],
            "model.groups: sliding_window (8) must be >= block_size (16)",
        ),
        ([_LINEAR, KVCacheGroupSpec(kind=MAMBA)], "model.groups: state_bytes must be > 0, got 0"),
        (
            [
                _LINEAR,
                KVCacheGroupSpec(kind=CHUNKED_LOCAL, block_size=8, attention_chunk_size=64, bytes_per_token=2),
            ],
            "model.groups: beside chunked_local, every group must have its block_size",
        ),
        (
            [
                KVCacheGroupSpec(kind=FULL, bytes_per_token=2),
                KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=16, sliding_window=64, bytes_per_token=3),
            ],
            "model.groups[0]: a block of 32 bytes has no page in common with the widest, of 48 bytes, which must be a "
            "multiple of it: change block_size or page_alignment",
        ),
    ],
)
def test_groups_that_no_engine_could_have_are_refused(groups: list[KVCacheGroupSpec], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig(name="m", groups=tuple(groups), max_model_len=100)
    assert str(caught.value) == message


@pytest.mark.parametrize("preset", ["gemma-hybrid", "qwen-gdn-hybrid", "kimi-linear", "deepseek-v4-five-groups"])
@pytest.mark.parametrize("name", ["single", "mooncake-1p1d", "mooncake-4p4d-tp4-tp2"])
def test_models_of_several_groups_go_with_every_preset(name: str, preset: str) -> None:
    assert len(load_config(name, sets=[f"model.preset={preset}"]).config.model.groups) > 1
