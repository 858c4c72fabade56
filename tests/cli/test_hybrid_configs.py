"""Models of several KV cache groups as a shell sees them: what no engine could have is one line, and exit status 2."""

from pathlib import Path

import pytest

from kvreplay.cli.app import run_app

FULL = '[[model.groups]]\nkind = "full"\nbytes_per_token = 2\n'
TAIL = """
[topology]
instances = 1
[cache]
num_gpu_blocks = {blocks}
[timing]
preset = "llama-70b-8xh100"
"""


@pytest.mark.parametrize(
    ("group", "blocks", "message"),
    [
        (
            'kind = "sliding_window"\nbytes_per_token = 2\nsliding_window = 8',
            4096,
            "model.groups: sliding_window (8) must be >= block_size (16)",
        ),
        (
            'kind = "sliding_window"\nbytes_per_token = 3\nsliding_window = 64',
            4096,
            "model.groups[0]: a block of 32 bytes has no page in common with the widest, of 48 bytes, which must be a "
            "multiple of it: change block_size or page_alignment",
        ),
        (
            'kind = "sliding"\nbytes_per_token = 2',
            4096,
            "model.groups: kind must be one of full, mla, sliding_window, sliding_window_mla, chunked_local, mamba, "
            "circular_buffer, got 'sliding'",
        ),
        (
            'kind = "chunked_local"\nbytes_per_token = 4\nblock_size = 8\nattention_chunk_size = 64',
            4096,
            "model.groups: beside chunked_local, every group must have its block_size",
        ),
        (
            'kind = "sliding_window"\nbytes_per_token = 2\nsliding_window = 64',
            100,
            "cache.num_gpu_blocks: 100 blocks, one of them the null block, cannot hold one request of "
            "model.max_model_len (1600 tokens): 202 are needed",
        ),
        ('kind = "mamba"', 4096, "model.groups: state_bytes must be > 0, got 0"),
        (
            'kind = "mamba"\nstate_bytes = 32',
            4096,
            "model.groups: prefix caching needs mamba_cache_mode 'align'",
        ),
    ],
)
def test_what_no_engine_could_have_is_one_line(
    group: str, blocks: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "model.toml"
    model = f"[model]\nmax_model_len = 1600\n{FULL}[[model.groups]]\n{group}\n"
    config.write_text(model + TAIL.format(blocks=blocks))
    assert run_app(["run", "multi-turn", "--config", str(config)]) == 2
    assert capsys.readouterr().err == f"error: {config}: {message}\n"


@pytest.mark.parametrize("preset", ["gemma-hybrid", "deepseek-v4-five-groups"])
def test_contents_of_several_groups_are_checked_in_every_run(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "multi-turn", "--config", "single", "--limit", "10", "--set", f"model.preset={preset}"]
    assert run_app(arguments) == 0
    assert capsys.readouterr().out.startswith("PASSED")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["mooncake-1p1d", "--set", "cache.prefix_cache_retention_interval=33", "--transport", "zmq"],
            "--set cache.prefix_cache_retention_interval=33: cache.prefix_cache_retention_interval is 33, but only "
            "sliding-window and Mamba groups are retained sparsely",
        ),
        (
            ["offload-single", "--set", "connector.cpu_bytes_to_use=100000000000000"],
            "--set connector.cpu_bytes_to_use=100000000000000: connector.cpu_bytes_to_use: 100000000000000 bytes are "
            "19073486 chunks of this model, and at most 16777216 are kept track of",
        ),
        (
            ["offload-hybrid", "--inject", "config.override:key=cache.prefix_cache_retention_interval,value=33"],
            "--inject config.override:key=cache.prefix_cache_retention_interval,value=33: "
            "cache.prefix_cache_retention_interval must be a multiple of 544, got 33",
        ),
    ],
)
def test_what_no_engine_could_be_made_of_is_told_before_any_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over sockets, too: no instance's process meets it."""
    assert run_app(["run", "multi-turn", "--config", *arguments]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
