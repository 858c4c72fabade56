"""Runs whose instances are processes: as in virtual time, and nothing is left of them, however they end."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from kvreplay.cli.app import run_app

ROOT = Path(__file__).parents[2]
PROC = Path("/proc")
QUICK = ["--set", "connector.abort_request_timeout=20"]
"""A consumer then waits 80 s for a reply."""

needs_proc = pytest.mark.skipif(not PROC.is_dir(), reason="looks for processes in /proc")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvreplay", "run", *arguments]


def run(*arguments: str) -> dict[str, Any]:
    """What it prints: the supervisor here, instances in processes of their own."""
    printed, said = StringIO(), StringIO()
    with redirect_stdout(printed), redirect_stderr(said):
        run_app(["run", *arguments, "--json"])
    assert printed.getvalue(), said.getvalue()
    result: dict[str, Any] = json.loads(printed.getvalue())
    return result


def outcome(result: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on when things happen."""
    return {
        "verdict": result["verdict"],
        "requests": {name: count for name, count in result["requests"].items() if name != "overdue"},
        "reasons": result["reasons"],
        "stalled": sorted(stall["request_id"] for stall in result["stalled"]),
        "crashes": [(crash["instance"], crash["exception"]) for crash in result["crashes"]],
        "checkers": sorted({found["checker"] for found in result["violations"]}),
    }


def both(*arguments: str, scale: int = 1000) -> tuple[dict[str, Any], dict[str, Any]]:
    virtual = run(*arguments, *QUICK)
    real = run(*arguments, *QUICK, "--transport", "zmq", "--time-scale", str(scale))
    return outcome(virtual), outcome(real)


def rows() -> list[str]:
    """Every row about Mooncake of the table of canned traces."""
    found, name = [], ""
    for cell, options in re.findall(
        r"^\| (.*?) ?\| `(--.*?)` \| \d \|", (ROOT / "traces/README.md").read_text(), re.MULTILINE
    ):
        name = cell.strip("`") or name
        if "offload" not in name:
            found.append(f"{name} {options}")
    return found


@pytest.mark.parametrize(
    "arguments",
    ["decode-stall --inject timeout", "decode-stall --inject timeout --profile pre-50984 --limit 3"],
)
def test_a_run_ends_as_in_virtual_time(arguments: str) -> None:
    virtual, real = both(*shlex.split(arguments))
    assert real == virtual


@pytest.mark.slow
@pytest.mark.parametrize("arguments", rows())
def test_every_canned_trace_has_the_same_verdict_on_both(arguments: str) -> None:
    virtual, real = both(*shlex.split(arguments))
    assert real == virtual


@pytest.mark.slow
def test_conversations_of_all_instances_are_counted_together() -> None:
    arguments = "decode-stall --inject timeout:nth=3 --set topology.prefill=2 --set topology.decode=2"
    virtual, real = both(*shlex.split(arguments))
    assert real == virtual
    assert real["requests"]["failed"] == 1


CROWD = (*QUICK, "--set", "topology.prefill=2", "--set", "topology.decode=2", "--set", "network.latency_ns=0")
"""Whatever happens, much happens at one instant."""


@pytest.mark.slow
def test_a_run_has_the_same_events_in_virtual_time_and_over_sockets(tmp_path: Path) -> None:
    trace = str(tmp_path / "crowd.parquet")
    synth = ["synth", "-o", trace, "--requests", "40", "--arrivals", "constant", "--rate", "1000000", "--seed", "3"]
    assert run_app(synth) == 0
    told = (trace, "--config", "mooncake-1p1d", *CROWD, "--inject", "peer-crash:instance=P1,at=500ms,down=1s")
    virtual = run(*told)
    real = [run(*told, "--transport", "zmq", "--time-scale", "10000") for _ in range(2)]
    assert virtual["requests"]["finished"] > 10
    assert [one["fingerprint"] for one in real] == [virtual["fingerprint"]] * 2


@pytest.mark.parametrize("identity", ["same", "new"])
def test_a_restarted_producer_is_found_or_not_as_in_virtual_time(identity: str) -> None:
    told = ("decode-stall", *QUICK, "--inject", f"engine.restart:instance=P0,at=3s,down=1s,identity={identity}")
    virtual = run(*told)
    assert run(*told, "--transport", "zmq", "--time-scale", "10000")["fingerprint"] == virtual["fingerprint"]
    assert virtual["requests"]["failed"] == (8 if identity == "same" else 1)


@pytest.mark.parametrize("profile", ["vllm-0.33", pytest.param("ideal", marks=pytest.mark.slow)])
def test_an_engine_that_dies_of_itself_is_gone_for_its_router_and_its_peers(tmp_path: Path, profile: str) -> None:
    """It counts as idle from then on, and a write into its memory fails at once."""
    trace = str(tmp_path / "busy.parquet")
    assert run_app(["synth", "-o", trace, "--requests", "60", "--rate", "20", "--seed", "5"]) == 0
    router = ("--set", "topology.proxy_decode=least_loaded")
    dies = ("--inject", "engine.step-raises:instance=D1,at=1500ms")
    told = (trace, "--config", "mooncake-1p1d", *CROWD, *router, *dies, "--profile", profile)
    virtual = run(*told)
    real = run(*told, "--transport", "zmq", "--time-scale", "10000")
    assert [crash["instance"] for crash in virtual["crashes"]] == ["D1"]
    assert virtual["requests"]["rejected"] > 10
    assert real["fingerprint"] == virtual["fingerprint"]


@pytest.mark.slow
def test_two_runs_over_sockets_have_the_same_events() -> None:
    arguments = ["client-aborts", "--inject", "timeout:p=0.3", *QUICK, "--transport", "zmq", "--time-scale", "1000"]
    first, second = (run(*arguments)["fingerprint"] for _ in range(2))
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "--set connector.bootstrap_server_address=boot:9000 --set topology.prefill=2",
        "--set connector.bootstrap_server_address=boot:9000 --inject peer-crash:instance=P0,at=3s,down=1s",
    ],
)
def test_an_external_bootstrap_server(arguments: str) -> None:
    virtual, real = both("decode-stall", *shlex.split(arguments))
    assert real == virtual


@pytest.mark.slow
def test_instances_of_several_ranks() -> None:
    arguments = "decode-stall --config mooncake-4p4d-tp4-tp2 --inject mooncake.peer-one-of-k:order=first --limit 4"
    virtual, real = both(*shlex.split(arguments))
    assert real == virtual
    assert real["requests"]["failed"] == 4


def test_the_command_says_what_it_cannot_do() -> None:
    for arguments, message in (
        (["single", "--time-scale", "10"], "--time-scale: virtual time has none; it goes with --transport zmq"),
        (["decode-stall", "--transport", "tcp"], "--transport tcp: expected one of virtual, zmq"),
        (["decode-stall", "--transport", "zmq", "--time-scale", "0"], "--time-scale 0: must be > 0 and <= 10000"),
        (["decode-stall", "--transport", "zmq", "--config", "single"], "only mooncake has sockets"),
    ):
        trace = ["decode-stall", *arguments[1:]]
        done = subprocess.run(command(*trace), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert message in done.stderr


# -- what is left of it -----------------------------------------------------------------------------------


def children_of(pid: int) -> list[int]:
    found = []
    for stat in PROC.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def is_there(pid: int) -> bool:
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Any, limit_s: float = 30.0) -> None:  # noqa: ANN401 - anything that can be called
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it has not come about"
        time.sleep(0.05)


@contextmanager
def started() -> Iterator[tuple["subprocess.Popen[bytes]", list[int]]]:
    """A long run, once its two instances are there; and their processes, of which the first is an instance's."""
    arguments = ["decode-stall", "--inject", "timeout", "--transport", "zmq", "--time-scale", "1"]
    process = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: [len(children_of(child)) for child in children_of(process.pid)] == [2])
        time.sleep(1)  # they read their trace, open sockets, and begin
        (nursery,) = children_of(process.pid)
        yield process, [*children_of(nursery), nursery]
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@needs_proc
def test_ctrl_c_leaves_no_process() -> None:
    with started() as (process, instances):
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        wait_until(lambda: not any(map(is_there, instances)))


@needs_proc
def test_a_supervisor_that_is_killed_leaves_no_process() -> None:
    with started() as (process, instances):
        process.kill()
        wait_until(lambda: not any(map(is_there, instances)))


@needs_proc
def test_a_nursery_that_is_killed_takes_no_instance_with_it_and_all_end() -> None:
    with started() as (process, instances):
        os.kill(instances[-1], signal.SIGKILL)
        wait_until(lambda: not is_there(instances[-1]))
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        wait_until(lambda: not any(map(is_there, instances)))


@needs_proc
def test_an_instance_that_is_killed_ends_the_run_and_the_others() -> None:
    with started() as (process, instances):
        os.kill(instances[0], signal.SIGKILL)
        assert process.wait(20) == 1
        assert process.stderr is not None
        assert b"has ended unasked" in process.stderr.read()
        wait_until(lambda: not any(map(is_there, instances)))
