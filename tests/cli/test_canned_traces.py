"""The canned traces: made by the commands in traces/README.md, and ending as the table there says.

Run as a program it makes them again: python -m tests.cli.test_canned_traces
"""

import os
import re
import shlex
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kvreplay.cli.app import run_app

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "traces"
README = (FOLDER / "README.md").read_text()


def commands() -> dict[str, list[str]]:
    """Trace → the arguments of kvreplay that make it, in the README's order."""
    found = {}
    for text in re.findall(r"^```\nkvreplay (synth [^`]*)```$", README, re.MULTILINE):
        arguments = shlex.split(text.replace("\\\n", " "))
        found[Path(arguments[arguments.index("-o") + 1]).stem] = arguments
    return found


def table() -> list[tuple[str, list[str], int]]:
    """(trace, options to try, exit status)."""
    rows = []
    name = ""
    for cell, options, status in re.findall(r"^\| (.*?) ?\| `(--.*?)` \| (\d) \|", README, re.MULTILINE):
        name = cell.strip("`") or name
        rows.append((name, shlex.split(options), int(status)))
    return rows


def make(name: str, folder: Path) -> Path:
    arguments = commands()[name]
    path = folder / f"{name}.parquet"
    arguments[arguments.index("-o") + 1] = str(path)
    assert run_app(arguments) == 0
    return path


def test_every_trace_has_its_command_and_a_row_in_the_table() -> None:
    names = {path.stem for path in FOLDER.glob("*.parquet")}
    assert set(commands()) == names
    assert {name for name, _, _ in table()} == names


@pytest.mark.parametrize("name", commands())
def test_its_command_makes_the_same_file(name: str, tmp_path: Path) -> None:
    made, kept = make(name, tmp_path), FOLDER / f"{name}.parquet"
    if pq.read_metadata(made).created_by == pq.read_metadata(kept).created_by:
        assert made.read_bytes() == kept.read_bytes(), "make them again: python -m tests.cli.test_canned_traces"
    else:  # another Arrow may lay the same rows out in other bytes
        assert pq.read_table(made).equals(pq.read_table(kept), check_metadata=True)


@pytest.mark.parametrize("name", commands())
def test_without_faults_it_passes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["run", name]) == 0
    assert "Violations  none" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "options", "status"), table())
def test_with_faults_it_ends_as_the_table_says(name: str, options: list[str], status: int) -> None:
    assert run_app(["run", name, *options]) == status


def test_they_are_small() -> None:
    assert max(path.stat().st_size for path in FOLDER.glob("*.parquet")) < 64_000


if __name__ == "__main__":
    os.chdir(FOLDER)
    sys.exit(max(run_app(arguments) for arguments in commands().values()))
