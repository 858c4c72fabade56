"""The README says what there is."""

import re
from pathlib import Path

import pytest

from kvreplay.cli.app import COMMANDS
from kvreplay.replay.config_load import config_from_document, preset_names, read_document
from kvreplay.replay.network import NETWORK_PRESETS
from kvreplay.replay.presets import MODEL_PRESETS
from kvreplay.replay.timing import TIMING_PRESETS

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.parametrize("command", [name for name, _ in COMMANDS])
def test_every_command_has_a_row(command: str) -> None:
    assert re.search(rf"^\| `{command}\b", README, re.MULTILINE)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_a_row(name: str) -> None:
    assert f"\n| `{name}` |" in README


@pytest.mark.parametrize("name", [*MODEL_PRESETS, *TIMING_PRESETS, *NETWORK_PRESETS])
def test_presets_of_tables_are_named(name: str) -> None:
    assert name in README


def test_the_example_of_a_configuration_is_one(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "example.toml"
    path.write_text(example)
    config = config_from_document(read_document(str(path)), "README")
    assert config.role("prefill").scheduler.max_num_batched_tokens == 16_384
