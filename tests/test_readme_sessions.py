"""The console sessions in the README: played again, and compared.

Run as a program it plays them and writes what they print: python -m tests.test_readme_sessions
Sessions with the trace of the Mooncake project need it: python -m tests.test_readme_sessions conversation_trace.jsonl
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "README.md"
README = PATH.read_text()

SESSION = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LARGE_INPUT = "conversation_trace.jsonl"
_WALL_CLOCK = re.compile(r"in [\d.,]+ m?s, [\d,]+ times as fast")


def needs_large_input(session: str) -> bool:
    return LARGE_INPUT in session or "conv.parquet" in session


def play(session: str, folder: Path) -> str:
    """The session with what its commands print now, one after the other in one folder."""
    shell = Shell(folder)
    return "".join(f"$ {line}\n{shell.run(line)}" for line in re.findall(r"^\$ (.*)$", session, re.MULTILINE))


class Shell:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._status = 0
        plain = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM")
        self._env = {name: value for name, value in os.environ.items() if name not in plain}

    def run(self, line: str) -> str:
        if line == "echo $?":
            return f"{self._status}\n"
        script = f'kvreplay() {{ "{sys.executable}" -m kvreplay "$@"; }}; {line}'
        done = subprocess.run(
            ["bash", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self._folder,
            env={**self._env, "COLUMNS": "80", "PYTHONPATH": str(PATH.parent)},
            check=False,
        )
        self._status = done.returncode
        return done.stdout


def timeless(session: str) -> str:
    return _WALL_CLOCK.sub("in ..., ... times as fast", session)


SHORT = [session for session in SESSION.findall(README) if not needs_large_input(session)]


@pytest.mark.parametrize("session", SHORT, ids=lambda session: session.splitlines()[0][2:])
def test_a_session_prints_what_it_prints(session: str, tmp_path: Path) -> None:
    advice = "if the new output is right, write it: python -m tests.test_readme_sessions"
    assert timeless(play(session, tmp_path)) == timeless(session), advice


def replayed(text: str, wanted: Callable[[str], bool], folder: Path) -> str:
    def again(match: re.Match[str]) -> str:
        return f"```console\n{play(match[1], folder)}```" if wanted(match[1]) else match[0]

    return SESSION.sub(again, text)


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments:
            (folder / LARGE_INPUT).symlink_to(Path(arguments[0]).resolve())
        PATH.write_text(replayed(README, lambda session: bool(arguments) or not needs_large_input(session), folder))


if __name__ == "__main__":
    main(sys.argv[1:])
