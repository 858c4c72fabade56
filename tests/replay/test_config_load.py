"""Where a configuration comes from, and what is said about a wrong one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvreplay.connectors.multi.config import MultiConfig
from kvreplay.connectors.simple_cpu.config import SimpleCpuConfig
from kvreplay.errors import ConfigError
from kvreplay.replay.config_load import load_config

MINIMAL = """
[model]
preset = "llama-70b"
max_model_len = 1024
[topology]
prefill = 1
decode = 2
[connector]
kind = "mooncake"
[cache]
num_gpu_blocks = 100
[timing]
preset = "llama-70b-8xh100"
[network]
preset = "8x400g-roce"
"""

WriteConfig = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> WriteConfig:
    def write_config(text: str) -> str:
        path = tmp_path / "my.toml"
        path.write_text(text)
        return str(path)

    return write_config


def refused(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value)


def test_defaults_are_vllms(write: WriteConfig) -> None:
    scheduler = load_config(write(MINIMAL)).config.role("decode").scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs, scheduler.max_model_len) == (2048, 128, 1024)


# -- roles --------------------------------------------------------------------------------------------------------


def test_a_roles_own_table_is_laid_over_the_common_one(write: WriteConfig) -> None:
    text = MINIMAL + "[scheduler]\nmax_num_seqs = 7\n[decode.cache]\nnum_gpu_blocks = 200\n"
    roles = load_config(write(text)).config.roles
    assert [roles[role].cache.num_gpu_blocks for role in ("prefill", "decode")] == [100, 200]
    assert [roles[role].scheduler.max_num_seqs for role in ("prefill", "decode")] == [7, 7]


def test_a_roles_own_preset_replaces_the_common_table(write: WriteConfig) -> None:
    text = MINIMAL + 'per_request_ns = 1\n[decode.timing]\npreset = "deepseek-v3-8xh800"\n'
    text = text.replace('[network]\npreset = "8x400g-roce"\nper_request_ns = 1', "per_request_ns = 1")
    roles = load_config(write(text + '[network]\npreset = "8x400g-roce"\n')).config.roles
    assert roles["prefill"].timing.name == "llama-70b-8xh100, changed"
    assert roles["decode"].timing.name == "deepseek-v3-8xh800"
    assert roles["decode"].timing.per_request_ns == 22_000


def test_a_table_for_a_role_that_is_not_there_is_refused(write: WriteConfig) -> None:
    text = MINIMAL.replace("prefill = 1\ndecode = 2", "instances = 1").replace('kind = "mooncake"', "")
    path = write(text + "[prefill.cache]\nnum_gpu_blocks = 1\n")
    assert refused(path) == f"{path}: [prefill]: the topology has no prefill instances"


# -- --set --------------------------------------------------------------------------------------------------------


def num_blocks(path: str, *sets: str) -> list[int]:
    roles = load_config(path, sets=sets).config.roles
    return [roles[role].cache.num_gpu_blocks for role in ("prefill", "decode")]


def test_set_for_one_role(write: WriteConfig) -> None:
    assert num_blocks(write(MINIMAL), "decode.cache.num_gpu_blocks=300") == [100, 300]


def test_set_without_a_role_holds_for_all_whatever_the_file_says(write: WriteConfig) -> None:
    path = write(MINIMAL + "[decode.cache]\nnum_gpu_blocks = 200\n")
    assert num_blocks(path, "cache.num_gpu_blocks=300") == [300, 300]


def test_of_two_sets_the_later_wins(write: WriteConfig) -> None:
    path = write(MINIMAL)
    assert num_blocks(path, "decode.cache.num_gpu_blocks=300", "cache.num_gpu_blocks=400") == [400, 400]
    assert num_blocks(path, "cache.num_gpu_blocks=400", "decode.cache.num_gpu_blocks=300") == [400, 300]


def test_set_of_a_preset_replaces_what_a_preset_stands_for() -> None:
    text = load_config("mooncake-4p4d").config.to_json()
    config = load_config(trace_config=text, sets=["model.preset=llama-70b", "timing.preset=llama-70b-8xh100"]).config
    assert config.model.name == "llama-70b"
    assert config.model.max_model_len == 196_608
    assert config.role("decode").timing.name == "llama-70b-8xh100"


def test_set_of_another_kind_of_connector_leaves_the_files_keys_for_the_former_one_out() -> None:
    config = load_config("offload-single", sets=["connector.kind=simple_cpu"]).config
    assert config.connector.options == SimpleCpuConfig(cpu_bytes_to_use=1374389534720)
    assert load_config("offload-single", sets=["connector.kind=none"]).config.connector.options is None
    sets = ["connector.cpu_bytes_to_use=8000000000", "connector.kind=multi"]  # in whatever order
    multi = load_config("mooncake-1p1d", sets=sets).config.connector
    assert isinstance(multi.options, MultiConfig)
    assert multi.options.offloading.cpu_bytes_to_use == 8_000_000_000


def test_a_set_key_of_the_former_kind_is_refused() -> None:
    sets = ["connector.store_bytes_per_s=5000000000", "connector.kind=simple_cpu"]
    with pytest.raises(ConfigError, match=r"^--set connector.store_bytes_per_s=5000000000: .* unknown key"):
        load_config("offload-single", sets=sets)


def test_set_values_take_the_fields_type() -> None:
    sets = [
        "cache.prefix_cache_retention_interval=none",
        "cache.enable_prefix_caching=false",
        "scheduler.watermark=0",
        "connector.connector_timeout=2",
        "model.block_size=32",
        "kv.check=every-read",
    ]
    config = load_config("mooncake-1p1d", sets=sets).config
    cache = config.role("prefill").cache
    assert (cache.prefix_cache_retention_interval, cache.enable_prefix_caching) == (None, False)
    assert config.connector.mooncake.connector_timeout == 2.0
    assert config.model.groups[0].block_size == 32
    assert config.kv.check == "every-read"


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("cache.num_gpu_blocks", "expected KEY=VALUE"),
        ("cache.num_gpu_block=1", "unknown key; did you mean 'cache.num_gpu_blocks'?"),
        ("scheduler.max_model_len=1", "unknown key; did you mean 'model.max_model_len'?"),
        (
            "model.groups=[]",
            "groups are tables, which a file has; here model.preset or model.block_size",
        ),
        (
            "model.groups.0.block_size=32",
            "groups are tables, which a file has; here model.preset or model.block_size",
        ),
        ("prefill.kv.device=cpu", "unknown key; did you mean 'kv.device'?"),
        ("cache.num_gpu_blocks=many", "expected an integer, got 'many'"),
        ("cache.num_gpu_blocks=1e3", "expected an integer, got '1e3'"),
        ("cache.num_gpu_blocks=99999999999999999999", "99999999999999999999 is out of range"),
        ("scheduler.watermark=nan", "nan is out of range"),
        ("scheduler.enable_chunked_prefill=1", "expected true or false, got '1'"),
        ("kv.check=of", "expected one of on, off, every-read, got 'of'; did you mean 'off'?"),
        (
            "timing.preset=h100",
            "timing.preset: no preset 'h100'; known are llama-70b-8xh100, llama-8b-4xh100, llama-8b-2xh100, "
            "deepseek-v3-8xh800",
        ),
        ("connector.num_workers=0", "connector.num_workers must be > 0, got 0"),
        ("connector.abort_requests_timeout=1", "unknown key; did you mean 'connector.abort_request_timeout'?"),
        ("decode.cache.num_gpu_blocks=1", "cache.num_gpu_blocks must be >= 2, got 1"),
    ],
)
def test_a_wrong_set_is_named(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("mooncake-1p1d", sets=[assignment])
    assert str(caught.value) == f"--set {assignment}: {message}"


@pytest.mark.parametrize(
    ("sets", "blamed"),
    [
        (["prefill.cache.num_gpu_blocks=65536", "decode.cache.num_gpu_blocks=2"], "decode.cache.num_gpu_blocks=2"),
        (["decode.cache.num_gpu_blocks=2", "prefill.cache.num_gpu_blocks=65536"], "decode.cache.num_gpu_blocks=2"),
        (["cache.num_gpu_blocks=65536", "decode.cache.num_gpu_blocks=2"], "decode.cache.num_gpu_blocks=2"),
        (["cache.num_gpu_blocks=2", "decode.cache.num_gpu_blocks=65536"], "cache.num_gpu_blocks=2"),
    ],
)
def test_the_one_for_the_role_that_it_is_about_is_blamed(sets: list[str], blamed: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--set {blamed}: (prefill|decode)\.cache\.num_gpu_blocks: 2 blocks, "):
        load_config("mooncake-1p1d", sets=sets)


# -- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[scheduller]\n", " scheduller: unknown key; did you mean 'scheduler'?"),
        ("[scheduler]\nmax_num_seq = 1\n", " [scheduler] max_num_seq: unknown key; did you mean 'max_num_seqs'?"),
        ("[scheduler]\nmax_num_seqs = 'x'\n", " [scheduler] max_num_seqs: expected an integer, got 'x'"),
        ("[scheduler]\nmax_num_seqs = true\n", " [scheduler] max_num_seqs: expected an integer, got True"),
        ("[scheduler]\nmax_num_seqs = 0\n", " scheduler.max_num_seqs must be > 0, got 0"),
        ("[decode]\nkv = 1\n", " [decode] kv: unknown key; known are scheduler, cache, timing, speculative"),
        ("[decode.cache]\nblocks = 1\n", " [decode.cache] blocks: unknown key; did you mean 'num_gpu_blocks'?"),
        ("[decode]\ncache = 3\n", " [decode.cache]: expected a table, got 3"),
        ("kv = 3\n", " [kv]: expected a table, got 3"),
        ("[kv]\ncheck = 3\n", " [kv] check: expected one of on, off, every-read, got 3"),
        ("x = [\n", " not TOML: Invalid value (at line 3, column 2)"),
    ],
)
def test_a_wrong_file_is_named_with_table_and_key(write: WriteConfig, text: str, message: str) -> None:
    # A bare key must stand before the first table.
    path = write(text + MINIMAL if not text.startswith("[") else MINIMAL + text)
    assert refused(path) == f"{path}:{message}"


def test_options_stand_beside_their_kind_of_connector(write: WriteConfig) -> None:
    path = write(MINIMAL.replace('"mooncake"', '"mooncake"\nabort_request_timeout = 60'))
    assert load_config(path).config.connector.mooncake.abort_request_timeout_ns == 60_000_000_000
    path = write(MINIMAL.replace('"mooncake"', '"mooncake"\nabort_timeout = 60'))
    message = f"{path}: [connector] abort_timeout: unknown key; did you mean 'abort_request_timeout'?"
    assert refused(path) == message
    with pytest.raises(ConfigError, match=r"^--set connector.num_workers=3: \[connector\] num_workers: unknown key"):
        load_config("single", sets=["connector.num_workers=3"])


def test_a_network_need_not_be_given(write: WriteConfig) -> None:
    path = write(MINIMAL.replace('[network]\npreset = "8x400g-roce"', ""))
    assert load_config(path, sets=["network.latency_ns=5"]).config.network.name == "8x400g-roce, changed"


def test_missing_keys_are_named(write: WriteConfig) -> None:
    path = write(MINIMAL.replace("num_gpu_blocks = 100", ""))
    assert refused(path) == f"{path}: [cache] num_gpu_blocks: missing"


def test_groups_of_ones_own(write: WriteConfig) -> None:
    groups = "[[model.groups]]\nkind = 'full'\nblock_size = 32\nbytes_per_token = 4\n"
    text = MINIMAL.replace('preset = "llama-70b"\n', "name = 'mine'\n").replace("[topology]", groups + "[topology]")
    assert load_config(write(text)).config.model.groups[0].block_size == 32
    path = write(text.replace("block_size", "blocksize"))
    assert refused(path) == f"{path}: [model] groups[0] blocksize: unknown key; did you mean 'block_size'?"


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    assert refused("mooncake-4p4") == "--config mooncake-4p4: no such preset or file; did you mean 'mooncake-4p4d'?"


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    assert refused(str(tmp_path)) == f"{tmp_path}: is a directory"
    binary = tmp_path / "trace.parquet"
    binary.write_bytes(b"PAR1\xff\xfe")
    assert refused(str(binary)) == f"{binary}: byte 4 is not UTF-8; expected a configuration in TOML"
    huge = tmp_path / "huge"
    huge.write_bytes(b"#" * (1 << 20) + b"\n")
    assert refused(str(huge)) == f"{huge}: larger than 1048576 bytes, not a configuration"
    assert refused("/dev/zero") == "/dev/zero: larger than 1048576 bytes, not a configuration"


@pytest.mark.parametrize("text", ["[]", "nonsense", "{", "[" * 100_000])
def test_a_traces_config_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^the trace's config: "):
        load_config(trace_config=text)
    with pytest.raises(ConfigError, match=r"^x\.parquet's config: "):
        load_config(trace_config=text, trace_name="x.parquet")


# -- what is in effect, and since when ----------------------------------------------------------------------------


def test_config_is_taken_from_the_flag_then_the_trace_then_the_default(write: WriteConfig) -> None:
    text = load_config("single").config.to_json()
    path = write(MINIMAL)
    loaded = [load_config(path, trace_config=text), load_config(trace_config=text), load_config()]
    assert [(item.config_name, item.origins.config) for item in loaded] == [
        (path, "--config"),
        ("trace", "the trace"),
        ("mooncake-1p1d", "default"),
    ]


def test_flags_on_top_are_part_of_the_origin() -> None:
    loaded = load_config("mooncake-1p1d", sets=["kv.check=off"], switches=["pull_wait=bounded"])
    assert loaded.origins.config == "--config --set kv.check=off"
    assert loaded.origins.profile == "default --behaviour pull_wait=bounded"
    assert loaded.behaviour["pull_wait"] == "bounded"


def policy(path: str, **options: object) -> tuple[str, str]:
    loaded = load_config(path, **options)  # type: ignore[arg-type]
    return loaded.policy, loaded.origins.policy


def test_policy_comes_from_flag_config_profile_or_vllm(write: WriteConfig) -> None:
    path = write(MINIMAL)
    assert policy(path) == ("fail", "vLLM's default")
    assert policy(path, profile="ideal") == ("recompute", "profile ideal")
    assert policy(path, sets=["connector.kv_load_failure_policy=recompute"]) == ("recompute", "--set")
    assert policy(path, policy="recompute") == ("recompute", "--policy")
    path = write(MINIMAL.replace('"mooncake"', '"mooncake"\nkv_load_failure_policy = "recompute"'))
    assert policy(path, profile="pre-50984") == ("recompute", path)
    assert policy(path, policy="fail", profile="ideal") == ("fail", "--policy")


def test_unknown_policy_and_profile_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^--policy retry: expected one of fail, recompute, got 'retry'$"):
        load_config("single", policy="retry")
    with pytest.raises(ConfigError, match=r"^--profile idea: unknown profile; did you mean 'ideal'\?$"):
        load_config("single", profile="idea")


# -- speculation --------------------------------------------------------------------------------------------------

MTP = "[speculative]\nnum_speculative_tokens = 3\nmethod = 'mtp'\n"


def speculation(path: str, *sets: str) -> list[int]:
    """Speculative tokens of prefill and decode instances, read back from the document that the config writes."""
    written = load_config(path, sets=sets).config
    read = load_config(trace_config=written.to_json()).config
    assert read == written
    parts = [read.roles[role].speculative for role in ("prefill", "decode")]
    return [part.num_speculative_tokens if part is not None else 0 for part in parts]


def test_speculation_is_off_unless_a_table_says_otherwise(write: WriteConfig) -> None:
    plain, mtp = MINIMAL, MINIMAL + MTP
    assert speculation(write(plain)) == [0, 0]
    assert "speculative" not in load_config(write(plain)).config.to_document()
    assert speculation(write(mtp)) == [3, 3]
    assert speculation(write(mtp), "speculative.num_speculative_tokens=0") == [0, 0]
    assert speculation(write(mtp), "prefill.speculative.num_speculative_tokens=0") == [0, 3]
    assert speculation(write(plain), "decode.speculative.num_speculative_tokens=2") == [0, 2]
    assert speculation(write(mtp + "[decode.speculative]\nnum_speculative_tokens = 1\n")) == [3, 1]


def test_acceptance_is_given_as_rates_or_as_a_length(write: WriteConfig) -> None:
    def rates(*sets: str) -> list[float]:
        part = load_config(write(MINIMAL + MTP), sets=[f"speculative.{item}" for item in sets]).config.role("decode")
        assert part.speculative is not None
        return [round(rate, 6) for rate in part.speculative.acceptance_rates]

    assert rates() == [0.7, 0.49, 0.343]
    assert rates("synthetic_acceptance_rates=0.8,0.5,0") == [0.8, 0.5, 0.0]
    assert rates("synthetic_acceptance_length=2.4") == [1.0, 0.4, 0.0]
    assert rates("synthetic_acceptance_length=4") == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("num_speculative_tokens=-1", "speculative.num_speculative_tokens must be in [1, 64], or 0 for none, got -1"),
        ("num_speculative_tokens=some", "expected an integer, got 'some'"),
        ("num_spec_tokens=1", "unknown key; did you mean 'speculative.num_speculative_tokens'?"),
        ("method=medusa", "speculative.method must be one of eagle, eagle3, mtp, draft_model, ngram, got 'medusa'"),
        ("num_mtp_layers=0", "speculative.num_mtp_layers must be > 0, got 0"),
        ("draft_pass_ns=-1", "speculative.draft_pass_ns must be >= 0, got -1"),
        (
            "synthetic_acceptance_rates=0.5",
            "speculative.synthetic_acceptance_rates: 3 are needed, one for each speculative token, got 1",
        ),
        ("synthetic_acceptance_rates=0.5,x,1", "expected a number, got 'x'"),
        (
            "synthetic_acceptance_rates=0.5,0.6,0.1",
            "speculative.synthetic_acceptance_rates must not increase, got 0.5, 0.6, 0.1",
        ),
        (
            "synthetic_acceptance_rates=1.5,1,1",
            "speculative.synthetic_acceptance_rates must be in [0, 1], got 1.5, 1.0, 1.0",
        ),
        ("synthetic_acceptance_length=4.5", "speculative.synthetic_acceptance_length must be in [1, 4], got 4.5"),
    ],
)
def test_a_wrong_key_of_speculation_is_named(write: WriteConfig, assignment: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(MINIMAL + MTP), sets=[f"speculative.{assignment}"])
    assert str(caught.value) == f"--set speculative.{assignment}: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[speculative]\nmethod = 'mtp'\n", " [speculative] num_speculative_tokens: missing"),
        (
            "[speculative]\nsynthetic_acceptance_rates = 0.5\n",
            " [speculative] synthetic_acceptance_rates: expected an array of numbers, got 0.5",
        ),
        (
            "[speculative]\nnum_speculative_tokens = 1\nsynthetic_acceptance_rates = [1]\n"
            "synthetic_acceptance_length = 1\n",
            " speculative.synthetic_acceptance_rates and speculative.synthetic_acceptance_length: give one of them",
        ),
        (
            "[scheduler]\nmax_num_batched_tokens = 4\nmax_num_seqs = 4\n[speculative]\nnum_speculative_tokens = 4\n",
            " scheduler.max_num_batched_tokens, scheduler.max_num_scheduled_tokens: a step with 4 speculative tokens "
            "needs 5, got 4",
        ),
        (
            "[speculative]\nmethod = 'mtp'\nnum_speculative_tokens = 20\nnum_mtp_layers = 20\n",
            " speculative.num_mtp_layers: prefix caching with 20 MTP modules needs blocks of at least as many tokens, "
            "got 16",
        ),
    ],
)
def test_speculation_that_does_not_go_with_the_rest_is_refused(write: WriteConfig, text: str, message: str) -> None:
    path = write(MINIMAL + text)
    assert refused(path) == f"{path}:{message}"


@pytest.mark.parametrize(("sizes", "is_refused"), [((2, 4), False), ((2, 2), True)])
def test_mtp_modules_read_no_further_than_a_hit_leaves_out(
    write: WriteConfig, sizes: tuple[int, int], is_refused: bool
) -> None:
    """Hits end where blocks of all groups do, so it is not the smallest block that counts."""
    window, full = sizes
    groups = f"""
[[model.groups]]
kind = "sliding_window"
block_size = {window}
bytes_per_token = {16 // window}
sliding_window = 8
[[model.groups]]
block_size = {full}
bytes_per_token = {16 // full}
[topology]"""
    text = MINIMAL.replace('preset = "llama-70b"\n', "", 1).replace("[topology]", groups, 1)
    text = text.replace("num_gpu_blocks = 100", "num_gpu_blocks = 2000")
    path = write(text + MTP.replace("3", "4") + "num_mtp_layers = 4\n")
    message = f"{path}: speculative.num_mtp_layers: prefix caching with 4 MTP modules needs blocks of at least as many"
    if is_refused:
        assert refused(path) == f"{message} tokens, got 2"
    else:
        assert load_config(path).config.draft_rules("decode").num_prefill_lookahead == 4


def test_groups_that_drafts_do_not_go_with(write: WriteConfig) -> None:
    chunks = """
[[model.groups]]
kind = "{kind}"
block_size = 4
bytes_per_token = 4
attention_chunk_size = 8
[[model.groups]]
block_size = 4
bytes_per_token = 4
""".replace("{kind}", "chunked_local")
    states = chunks.replace("chunked_local", "mamba").replace(
        "bytes_per_token = 4\nattention_chunk_size = 8", "state_bytes = 16\nmamba_cache_mode = 'align'"
    )
    base = MINIMAL.replace('preset = "llama-70b"\n', "").replace("[topology]", "{groups}[topology]", 1)
    base = base.replace("num_gpu_blocks = 100", "num_gpu_blocks = 1000")
    path = write(base.replace("{groups}", chunks) + MTP)
    assert refused(path) == f"{path}: speculative.method: mtp does not go with groups of kind chunked_local"
    path = write(base.replace("{groups}", states) + MTP.replace("3", "4"))
    message = "speculative.num_speculative_tokens must be < the block_size of mamba groups (4), got 4"
    assert refused(path) == f"{path}: {message}"
    config = load_config(write(base.replace("{groups}", states) + MTP)).config
    assert [group.num_speculative_blocks for group in config.groups_of("decode")] == [3, 0]
    assert [group.num_speculative_blocks for group in config.model.groups] == [0, 0]
