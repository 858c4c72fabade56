"""How the command starts and ends."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from kvreplay import __version__
from kvreplay.cli import app as app_module
from kvreplay.cli.app import run_app
from kvreplay.errors import ConfigError

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "kvreplay"]


def kvreplay(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **(env or {})}, check=False
    )


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], int]:
    """Runs a command that does what it is given; returns the exit status."""

    def run(action: Callable[[], None]) -> int:
        app = typer.Typer()

        @app.command()
        def act() -> None:
            action()

        monkeypatch.setattr(app_module, "app", app)
        return run_app([])

    return run


def raising(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


# -- errors -------------------------------------------------------------------------------------------------------


def test_a_users_mistake_is_one_unwrapped_line_and_status_2(
    command: Callable[[Callable[[], None]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    path = "/a/long/path" * 20
    assert command(raising(ConfigError(f"{path}: [bold]wrong[/bold]\nand \x1b[31mred"))) == 2
    assert capsys.readouterr().err == f"error: {path}: [bold]wrong[/bold]\\nand \\x1b[31mred\n"


@pytest.mark.parametrize("argument", [b"tr\xe9.parquet", b"--set=model.name=\xff"])
def test_what_is_no_text_is_refused(argument: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["run", "decode-stall", os.fsdecode(argument)]) == 2
    shown = argument.decode("ascii", "backslashreplace").replace("\\x", "\\udc")
    assert capsys.readouterr() == ("", f"error: {shown}: is not UTF-8 text\n")


def test_a_file_that_the_system_refuses_is_the_users_mistake(
    command: Callable[[Callable[[], None]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(raising(PermissionError(13, "Permission denied", "x.parquet"))) == 2
    assert capsys.readouterr().err == "error: x.parquet: permission denied\n"


def test_a_bug_of_ours_leaves_with_its_traceback(command: Callable[[Callable[[], None]], int]) -> None:
    with pytest.raises(AssertionError, match=r"^blocks leaked$"):
        command(raising(AssertionError("blocks leaked")))


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (typer.Abort(), 130), (typer.Exit(4), 4)])
def test_quiet_ends(
    command: Callable[[Callable[[], None]], int],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
) -> None:
    assert command(raising(error)) == status
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "start", "command_path"),
    [
        (["profile"], "error: no such command 'profile'", "kvreplay"),
        (["profiles", "--jsn"], "error: no such option: --jsn", "kvreplay profiles"),
        (["profiles", "x"], "error: got unexpected extra argument", "kvreplay profiles"),
    ],
)
def test_usage_errors_look_like_ours(
    arguments: list[str], start: str, command_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typer's words differ between its versions; the shape does not."""
    assert run_app(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(start)
    assert output.err.endswith(f" (see '{command_path} --help')\n")
    assert output.err.count("\n") == 1


# -- the process --------------------------------------------------------------------------------------------------


def test_version() -> None:
    done = kvreplay("--version")
    assert (done.returncode, done.stdout) == (0, f"kvreplay {__version__}\n")


def test_asserts_are_required() -> None:
    done = kvreplay("--version", env={"PYTHONOPTIMIZE": "1"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: kvreplay needs its asserts")


def test_help_imports_nothing_heavy() -> None:
    """The reason why `--help` is instant."""
    probe = (
        "import sys; from kvreplay.cli.app import run_app; run_app(['--help']); "
        "print([name for name in ('torch', 'numpy', 'polars', 'pyarrow', 'zmq', 'msgspec') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.endswith("\n[]\n")


@pytest.mark.parametrize("arguments", [["profiles"], ["profiles", "--json"], ["--help"]])
def test_a_closed_pipe_is_no_traceback(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
        )
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["profiles"], ["profiles", "--json"], ["--help"]])
def test_a_full_disk_is_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as stdout:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
        )
    assert (done.returncode, done.stderr) == (2, "error: standard output: no space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("arguments", "status"), [("info nosuch", 2), ("run decode-stall --baseline", 0)])
def test_an_error_that_cannot_be_said_changes_no_status(arguments: str, status: int) -> None:
    line = f"{' '.join(COMMAND)} {arguments} 2> /dev/full"
    assert subprocess.run(["sh", "-c", line], cwd=ROOT, check=False, stdout=subprocess.DEVNULL).returncode == status


@pytest.mark.parametrize("arguments", ["profiles --json", "profiles", "run decode-stall", "run decode-stall --json"])
def test_a_closed_output_is_one_line(arguments: str) -> None:
    line = f"{' '.join(COMMAND)} {arguments} >&-"
    done = subprocess.run(["sh", "-c", line], cwd=ROOT, check=False, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "error: standard output: bad file descriptor\n")
    line += " 2>&-"
    assert subprocess.run(["sh", "-c", line], cwd=ROOT, check=False).returncode == 2


def test_closed_errors_change_no_status() -> None:
    line = f"{' '.join(COMMAND)} run decode-stall --baseline 2>&-"
    assert subprocess.run(["sh", "-c", line], cwd=ROOT, check=False, stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", ""], "argument ''"),
        (["run", "decode-stall", "-o", ""], "-o ''"),
        (["run", "decode-stall", "--profile", ""], "--profile ''"),
        (["run", "decode-stall", "--config="], "--config ''"),
    ],
)
def test_an_empty_text_is_no_value(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        "run decode-stall --plan a.toml --plan b.toml",
        "run decode-stall -o a.parquet --output=b.parquet",
        "synth -o a.parquet --rate 1 --rate 1",
        "import mooncake a.jsonl --limit 1 --limit 2",
        "info decode-stall nosuch --json --json",
    ],
)
def test_of_two_values_none_is_dropped(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What may be given more than once is taken more than once; a switch says the same again."""
    assert run_app(arguments.split()) == 2
    flag = next(
        word for word in ("--plan", "--output", "--rate", "--limit", "argument") if word in arguments + " argument"
    )
    assert flag in capsys.readouterr().err


def test_help_is_not_broken_within_a_range() -> None:
    for command in ("run", "synth"):
        shown = kvreplay(command, "--help", env={"COLUMNS": "80"}).stdout
        ranges = [line.count("[") - line.count("]") for line in shown.splitlines() if "<=x" in line or "x>=" in line]
        assert ranges
        assert not any(ranges)


def test_ctrl_c_ends_quietly_with_130() -> None:
    # The signal comes from a command of our own making, so that it cannot come too early or too late.
    probe = (
        "import os, signal, sys, typer; from kvreplay.cli import app, main\n"
        "app.app = typer.Typer()\n"
        "@app.app.command()\n"
        "def wait() -> None:\n"
        f"    os.kill(os.getpid(), {int(signal.SIGINT)}); signal.pause()\n"
        "sys.argv = ['kvreplay']; main()"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_colours_only_where_they_are_wanted() -> None:
    coloured = kvreplay("nonsense", env={"FORCE_COLOR": "1", "TERM": "xterm"})
    assert "\x1b[31m" in coloured.stderr
    plain = kvreplay("nonsense", env={"FORCE_COLOR": "1", "TERM": "xterm", "NO_COLOR": "1"})
    assert "\x1b[31m" not in plain.stderr
    assert "\x1b" not in kvreplay("profiles").stdout


# -- profiles -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_profiles_fit_the_terminal(width: int) -> None:
    done = kvreplay("profiles", env={"COLUMNS": str(width)})
    assert done.returncode == 0
    assert max(len(line) for line in done.stdout.splitlines()) <= width
    assert re.search(r"^  pre-50984 +mooncake_failure=silent$", done.stdout, re.MULTILINE)
    assert re.search(r"^ {4}silent  .*\n( {14}.*\n)* {14}in pre-50984\b", done.stdout, re.MULTILINE)
    assert not any(line.endswith(" ") for line in done.stdout.splitlines())


def test_profiles_as_json_are_one_object() -> None:
    document = json.loads(kvreplay("profiles", "--json").stdout)
    assert document["default"] == "vllm-0.33"
    assert document["profiles"]["pre-50984"]["mooncake_failure"] == "silent"
    assert set(document["switches"]) == set(document["profiles"]["ideal"])
    assert set(document["switches"]["pull_wait"]) == {"models", "values"}


def test_a_terminal_of_unknown_size_is_as_wide_as_most() -> None:
    assert kvreplay("profiles", env={"COLUMNS": "0"}).stdout == kvreplay("profiles", env={"COLUMNS": "80"}).stdout
