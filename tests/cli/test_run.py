"""`kvreplay run` as a shell sees it: exit statuses, what goes where, and what is left behind."""

import json
import os
import pty
import re
import resource
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvreplay.cli.app import run_app

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "kvreplay", "run"]


def run(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **env}, check=False
    )


# -- how it ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "verdict"),
    [
        ("--inject timeout", 0, "PASSED"),
        ("--inject corrupt", 3, "VIOLATED"),
        ("--inject timeout --fail-on failed", 3, "VIOLATED"),
        ("--inject timeout:nth=900", 0, "PASSED"),
        ("--inject timeout:nth=900 --fail-on unfired", 3, "VIOLATED"),
        ("--inject timeout --fail-on unfired", 0, "PASSED"),
        ("--inject peer-crash:at=1h --fail-on unfired", 3, "VIOLATED"),
        ("--set model.max_model_len=10", 0, "PASSED"),
        ("--set model.max_model_len=10 --fail-on default,rejected", 3, "VIOLATED"),
        ("--inject timeout --profile pre-50984", 4, "STALLED"),
        ("--inject timeout --profile pre-50984 --fail-on crashed", 0, "PASSED"),
        ("--inject engine.step-raises:instance=D0,at=3s", 5, "CRASHED"),
    ],
)
def test_the_verdict_comes_first_and_gives_the_exit_status(
    arguments: str, status: int, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["run", "decode-stall", *arguments.split()]) == status
    assert capsys.readouterr().out.startswith(f"{verdict}  exit status {status}\n")


def test_the_process_ends_with_it(tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    done = run("decode-stall", "--inject", "timeout", "--profile", "pre-50984", "--json", "-o", output)
    assert (done.returncode, done.stderr) == (4, "")
    document = json.loads(done.stdout)
    assert document["exit_status"] == 4
    assert document["wall_seconds"] > 0
    reported = subprocess.run(
        [*COMMAND[:-1], "report", output, "--json"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert reported.returncode == 4
    assert json.loads(reported.stdout) == {**document, "wall_seconds": None}


def test_ctrl_c_ends_it_with_130_and_leaves_no_half_written_file(tmp_path: Path) -> None:
    workload = tmp_path / "long.parquet"
    assert run_app(["synth", "-o", str(workload), "--requests", "8000", "--rate", "100"]) == 0
    output = tmp_path / "out.parquet"
    output.write_text("old")
    process = subprocess.Popen(
        [*COMMAND, workload, "-o", output], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not list(tmp_path.glob(".out.parquet.*")):
        with pytest.raises(subprocess.TimeoutExpired):  # it is still there
            process.wait(timeout=0.2)
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("", "")
    assert process.returncode == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["long.parquet", "out.parquet"]
    assert output.read_text() == "old"


def test_a_closed_pipe_is_141_without_a_word() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        done = subprocess.run(
            [*COMMAND, "decode-stall"], stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_a_disk_that_takes_no_more_is_one_line_and_leaves_the_old_file(tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    output.write_text("old")
    done = subprocess.run(
        [*COMMAND, "decode-stall", "-o", output],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)),
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {output}: cannot be written: file too large\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]
    assert output.read_text() == "old"


# -- what goes where ----------------------------------------------------------------------------------------------


def test_a_bar_is_drawn_on_a_terminal_and_nowhere_else() -> None:
    assert run("decode-stall", FORCE_COLOR="1").stderr == ""
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [*COMMAND, "decode-stall"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
        check=True,
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "replaying" in shown
    assert done.stdout.startswith("PASSED")
    assert "replaying" not in done.stdout


def test_the_command_in_the_report_gives_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text('[[fault]]\nname = "slow"\np = 0.5\n')
    given = (
        "run multi-turn --config mooncake-4p4d --set decode.cache.num_gpu_blocks=20000 --plan plan.toml "
        "--inject timeout:p=0.2 --profile pre-50984 --behaviour pull_wait=bounded --policy recompute --limit 40 "
        "--seed 3 --fail-on none"
    )
    assert run_app(given.split()) == 0
    report = capsys.readouterr().out
    (again,) = re.findall(r"^  (kvreplay run .*)$", report.replace("\\\n", ""), re.MULTILINE)
    assert run_app(shlex.split(again)[1:]) == 0
    assert capsys.readouterr().out.split("Reproduce")[1] == report.split("Reproduce")[1]


def test_faults_that_nobody_looks_for_are_worth_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    unchecked = ["run", "decode-stall", "--set", "kv.check=off"]
    assert run_app([*unchecked, "--inject", "corrupt"]) == 0
    assert (
        capsys.readouterr().err == "warning: kv.check is off: contents are not compared, and wrong ones pass unseen\n"
    )
    assert run_app(unchecked) == 0
    assert capsys.readouterr().err == ""


# -- what it refuses ----------------------------------------------------------------------------------------------


def error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run_app(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("error: ").removesuffix("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("decode-stal", "decode-stal: no such file, nor a canned trace (bursty-prefill, client-aborts, decode-stall"),
        ("decode-stall --config mooncake-1p", "--config mooncake-1p: no such preset or file; did you mean 'mooncake-1"),
        ("decode-stall --set cache.num_gpu_block=9", "--set cache.num_gpu_block=9: unknown key; did you mean 'cache.n"),
        ("decode-stall --set cache.num_gpu_blocks=9", "--set cache.num_gpu_blocks=9: prefill.cache.num_gpu_blocks: 9 "),
        ("decode-stall --set cache.num_gpu_blocks=x", "--set cache.num_gpu_blocks=x: expected an integer, got 'x'"),
        ("decode-stall --inject timeot", "--inject timeot: no fault 'timeot'; did you mean 'timeout'?"),
        ("decode-stall --inject slow:delai=1s", "--inject slow:delai=1s: slow has no key 'delai'; did you mean 'delay"),
        ("decode-stall --inject slow:delay=1", "--inject slow:delay=1: delay "),
        ("decode-stall --config single --inject timeout", "--inject timeout: timeout needs the mooncake connector; "),
        ("decode-stall --profile pre-5098", "--profile pre-5098: unknown profile; did you mean 'pre-50984'?"),
        ("decode-stall --policy retry", "--policy retry: expected one of fail, recompute, got 'retry'"),
        ("decode-stall --behaviour pul_wait=x", "--behaviour pul_wait=x: no switch 'pul_wait'; did you mean 'pull_wai"),
        ("decode-stall --detail block", "--detail block: expected one of run, steps, blocks; did you mean 'blocks'?"),
        (
            "decode-stall --fail-on stall",
            "--fail-on stall: 'stall' is none of crashed, stalled, violated, failed, reje",
        ),
        ("decode-stall --detail blocks", "--detail blocks: says what a written trace holds, give -o as well"),
        ("decode-stall -o decode-stall", "-o decode-stall: is the name of a canned trace, which it would hide; expec"),
        ("decode-stall --overdue-after inf", "invalid value for '--overdue-after': "),
        ("decode-stall --set a=b", "--set a=b: unknown key; sections are model, "),
        ("decode-stall --seed -1", "invalid value for '--seed': "),
        ("decode-stall --seed 9223372036854775808", "--seed 9223372036854775808: expected at most 92233720368547758"),
        ("decode-stall -o -", "-o -: a trace goes into a file, not to standard output"),
        ("decode-stall --inject timeout --inject timeout", "--inject timeout: the same fault twice, it is there alr"),
        ("decode-stall --inject peer-crash:at=-1s", "--inject peer-crash:at=-1s: at must be a duration such as 500ms"),
        ("decode-stall --inject slow:after=bogus.event", "--inject slow:after=bogus.event: after names no event: no k"),
        ("decode-stall --config empty.toml", "--config empty.toml: no such preset or file"),
        ("decode-stall --profile zzz", "--profile zzz: unknown profile, expected one of vllm-0.33, pre-50388, "),
        ("decode-stall --inject timeout:peer=P9", "--inject timeout:peer=P9: peer=P9 matches no instance, expected P0"),
        ("decode-stall --limit 0", "invalid value for '--limit': "),
        ("decode-stall --plan nowhere.toml", "nowhere.toml: "),
        ("decode-stall -o nowhere/out.parquet", "nowhere/out.parquet: no such folder: nowhere"),
        ("decode-stall -o .", ".: is a folder, expected a file name"),
        ("decode-stall -o /dev/null", "/dev/null: is not a regular file"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert error(["run", *arguments.split()], capsys).startswith(message)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments", ["--seed -1", "--seed 1.5", "--seed=x", "--limit 0", "--overdue-after nan", "--time-scale x"]
)
def test_a_bad_number_is_repeated(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Typer's words differ between its versions."""
    flag, value = arguments.replace("=", " ").split()
    message = error(["run", "decode-stall", *arguments.split()], capsys)
    assert flag in message
    assert value in message.replace(flag, "")


def test_a_nearly_right_name_of_a_trace_brings_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert error(["run", "multi-tur"], capsys).endswith("; did you mean 'multi-turn'?")


def test_an_empty_config_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.toml"
    path.write_text("")
    message = error(["run", "decode-stall", "--config", str(path)], capsys)
    assert re.fullmatch(rf"{path}: \[model\]: expected a preset \(llama-70b, .*\), or \[\[model\.groups\]\]", message)


def test_a_tier_that_holds_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = "connector.cpu_bytes_to_use=1"
    message = error(["run", "multi-turn", "--config", "offload-hybrid", "--set", tiny], capsys)
    assert message == f"--set {tiny}: connector.cpu_bytes_to_use: 1 bytes hold no chunk of 13369344 bytes"


@pytest.mark.parametrize("flag", ["TRACE", "--plan", "--config"])
def test_no_input_is_overwritten(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan").write_text('[[fault]]\nname = "slow"\n')
    Path("config").write_bytes((ROOT / "configs" / "mooncake-1p1d.toml").read_bytes())
    Path("trace").write_bytes((ROOT / "traces" / "decode-stall.parquet").read_bytes())
    name = flag.removeprefix("--").lower()
    kept = Path(name).read_bytes()
    message = error(
        ["run", "trace", "--plan", "plan", "--config", "config", "-o", f"../{tmp_path.name}/{name}"], capsys
    )
    assert message == f"../{tmp_path.name}/{name}: is the input itself; write to another file"
    assert Path(name).read_bytes() == kept


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.parquet", b"", "empty file, expected a Parquet trace"),
        ("text.parquet", b"hello, world", "byte 0: not a Parquet file: starts with b'hell', expected b'PAR1'"),
        (
            "log.jsonl",
            b'{"timestamp": 0}',
            "JSON lines, expected a Parquet trace; import it first: kvreplay import moon",
        ),
    ],
)
def test_what_is_no_trace_is_told_apart(
    name: str, content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert error(["run", str(path)], capsys).startswith(f"{path}: {message}")


def test_a_truncated_trace_says_where_it_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes((ROOT / "traces" / "decode-stall.parquet").read_bytes()[:9000])
    message = error(["run", str(path)], capsys)
    assert message.startswith(f"{path}: byte 8996: truncated: ends with ")
    assert message.endswith(", expected b'PAR1'")


# -- detail ----


def test_rows_of_blocks_show_where_a_breach_begins_and_change_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The consumer gives up after 5 s and gives the blocks away; the write lands in them 55 s later."""
    late = "pool-pressure --limit 40 --inject mooncake.engine-slow:count=3 --set connector.receive_timeout=5 --json"

    def fences(detail: str) -> tuple[str, list[float], set[str]]:
        assert run_app(["run", *late.split(), "-o", str(tmp_path / detail), "--detail", detail]) == 3
        document = json.loads(capsys.readouterr().out)
        assert run_app(["report", str(tmp_path / detail), "--json"]) == 3
        assert json.loads(capsys.readouterr().out)["violations"] == document["violations"]
        found = [finding for finding in document["violations"] if finding["checker"] == "FENCE"]
        times = [finding["time_s"] for finding in found]
        return document["fingerprint"], times, {finding["fault"] for finding in found}

    fingerprint, landed, faults = fences("steps")
    again, given, same_faults = fences("blocks")
    assert again == fingerprint
    assert min(given) == pytest.approx(5.0, abs=0.1)
    assert min(landed) == pytest.approx(60.0, abs=0.2)
    assert set(landed) < set(given)
    assert same_faults == faults == {"mooncake.engine-slow:count=3"}


# -- names --------------------------------------------------------------------------------------------------------


def test_a_canned_trace_may_be_named_as_the_report_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_app(["info", "decode-stall.parquet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workload"]["requests"] == 12
    Path("decode-stall.parquet").write_text("mine")
    assert "not a Parquet file" in error(["info", "decode-stall.parquet"], capsys)


def test_a_file_that_hides_a_canned_trace_is_worth_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("decode-stall").write_bytes((ROOT / "traces" / "multi-turn.parquet").read_bytes())
    assert run_app(["info", "decode-stall", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["workload"]["requests"] == 60
    assert captured.err == "warning: decode-stall: the file of this name, not the canned trace\n"
    Path("decode-stall").unlink()
    Path("decode-stall").mkdir()
    assert run_app(["info", "decode-stall", "--json"]) == 0
    captured = capsys.readouterr()
    assert (json.loads(captured.out)["workload"]["requests"], captured.err) == (12, "")
