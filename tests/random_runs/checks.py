"""What must hold of any run, whatever is in it: what it says is the same however it is asked."""

import io
import json
import re
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Final

from kvreplay.cli.app import run_app
from tests.random_runs.cases import Case

_VERDICTS: Final = (0, 3, 4, 5)
_DEADLY: Final = ("engine.step-raises", "mooncake.register")
"""An engine has to die of these."""
_NOT_COMPARED: Final = ("wall_seconds", "in_effect")


class Shell:
    """Runs commands in this process, on files of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Exit status, and what is written to stdout and stderr."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            status = run_app(list(arguments))
        return status, out.getvalue(), err.getvalue()

    def path(self, name: str) -> str:
        return str(self.folder / name)


def complaints(case: Case, shell: Shell) -> Iterator[str]:
    """What is wrong with the runs of this case, a line each."""
    status, _, err = shell.run("synth", "-o", shell.path("in.parquet"), *case.workload)
    if status:
        yield f"synth: {err}"
        return
    needed = _blocks_needed(case, shell)
    if needed is None:
        return
    (shell.folder / "c.toml").write_text(case.config.format(blocks=needed + case.blocks))
    arguments = ["--config", shell.path("c.toml"), *case.arguments]
    status, out, err = shell.run("run", shell.path("in.parquet"), *arguments, "--json")
    if status == 2:
        if not re.fullmatch(r"error: [^\n]+\n", err):
            yield f"a refusal is one line, not {err!r}"
        return
    if status not in _VERDICTS:
        yield f"exit status {status}: {err[-2000:]}"
        return
    verdict = json.loads(out)
    if verdict["exit_status"] != status:
        yield f"exit status {status}, told {verdict['exit_status']}"
    if case.is_ideal:
        yield from _ideal(verdict)
    yield from _what_does_not_add_up(verdict)
    yield from _same_however_asked(case, shell, arguments, verdict)


def _blocks_needed(case: Case, shell: Shell) -> int | None:
    """None: the case is refused for another reason."""
    (shell.folder / "c.toml").write_text(case.config.format(blocks=2))
    status, _, err = shell.run("run", shell.path("in.parquet"), "--config", shell.path("c.toml"))
    found = re.search(r": (\d+) are needed", err)
    assert status == 2, err
    return int(found[1]) if found else None


def _ideal(verdict: dict[str, Any]) -> Iterator[str]:
    for violation in verdict["violations"]:
        yield f"ideal violates {violation}"
    for crash in verdict["crashes"]:
        if not (crash["fault"] or "").startswith(_DEADLY):
            yield f"ideal dies: {crash}"
    if verdict["verdict"] not in ("passed", "crashed"):
        yield f"ideal: {verdict['verdict']}, {verdict['reasons']}"


def _what_does_not_add_up(verdict: dict[str, Any]) -> Iterator[str]:
    """Numbers of a verdict that are told twice, once by parts."""
    requests, evicted, recomputed = (verdict[name] for name in ("requests", "evicted_blocks", "recomputed_tokens"))
    instances, loads = verdict["instances"], verdict["loads"]
    transfers = verdict["transfers"] or {"started": 0, "finished": 0, "failed": 0, "failed_by_cause": {}}
    outcomes = ("finished", "failed", "aborted", "rejected", "stalled", "unfinished")
    sums = {
        "requests": (requests["total"], [requests[name] for name in outcomes]),
        "stalled": (requests["stalled"], [requests["lost"], requests["held_up"]]),
        "finished": (requests["finished"], [verdict["latency_s"]["e2e"]["count"]]),
        "recomputed by cause": (recomputed["total"], recomputed["by_cause"].values()),
        "recomputed by instance": (
            recomputed["total"],
            [count for causes in recomputed["by_instance"].values() for count in causes.values()],
        ),
        "evicted by cause": (evicted["total"], evicted["by_cause"].values()),
        "evicted by group": (evicted["total"], evicted["by_group"].values()),
        "evicted by group and cause": (
            evicted["total"],
            [count for causes in evicted["by_group_and_cause"].values() for count in causes.values()],
        ),
        "computed": (verdict["computed_tokens"], [instance["computed_tokens"] for instance in instances]),
        "loaded": (verdict["loaded_tokens"], [instance["loaded_tokens"] for instance in instances]),
        "failed loads": (loads["failed"], loads["failed_by_cause"].values()),
        "failed transfers": (transfers["failed"], transfers["failed_by_cause"].values()),
    }
    for outcome in ("failed", "aborted", "rejected"):
        counts = [reason["count"] for reason in verdict["reasons"] if reason["outcome"] == outcome]
        if outcome != "aborted" or counts:  # of aborts only those with a cause
            sums[f"reasons of {outcome}"] = (requests[outcome], counts)
    for fault in verdict["faults"]:
        sums[f"requests of {fault['spec']}"] = (fault["requests"], fault["outcomes"].values())
    for name, (total, parts) in sums.items():
        if total != sum(parts):
            yield f"{name}: {total} in all, and {list(parts)} by part"
    ends = {"loads": loads, "transfers": transfers, **{f"tier's {way}": each for way, each in _moves(verdict).items()}}
    for name, counts in ends.items():
        if counts["started"] < counts["finished"] + counts["failed"]:
            yield f"more {name} end than start: {_cut(counts)}"
    for instance in instances:
        if instance["peak_blocks"] >= instance["num_gpu_blocks"] or not 0 <= (instance["busy"] or 0) <= 1:
            yield f"impossible: {_cut(instance)}"
    if requests["rejected_unfaulted"] and not verdict["crashes"]:
        yield f"refused for nothing: {requests['rejected_unfaulted']}"
    if (verdict["verdict"] == "passed") != (verdict["exit_status"] == 0):
        yield f"{verdict['verdict']} with exit status {verdict['exit_status']}"


def _moves(verdict: dict[str, Any]) -> dict[str, dict[str, Any]]:
    tiers = verdict["tiers"] or {}
    return {way: tiers[way] for way in ("stored", "loaded") if way in tiers}


def _same_however_asked(case: Case, shell: Shell, arguments: list[str], verdict: dict[str, Any]) -> Iterator[str]:
    names = {}
    for detail in ("run", "steps", "blocks"):
        names[detail] = shell.path(f"{detail}.parquet")
        status, out, err = shell.run(
            "run", shell.path("in.parquet"), *arguments, "--json", "-o", names[detail], "--detail", detail
        )
        if status not in _VERDICTS:
            yield f"--detail {detail}: exit status {status}: {err[-2000:]}"
            continue
        told = json.loads(out)
        # With an event for each block FENCE sees more.
        if detail != "blocks" or not (verdict["violations"] or told["violations"]):
            yield from _differences(f"--detail {detail}", verdict, told)
        _, out, _ = shell.run("report", names[detail], "--json")
        yield from _differences(f"report of --detail {detail}", told, json.loads(out))
    first = Path(names["run"]).read_bytes()
    shell.run("run", shell.path("in.parquet"), *arguments, "-o", names["run"])
    if Path(names["run"]).read_bytes() != first:
        yield "another run writes other bytes"
    if case.faults:
        (shell.folder / "plan.toml").write_text("".join(map(_as_table, case.faults)))
        by_plan = ["--config", shell.path("c.toml"), "--plan", shell.path("plan.toml"), *case.options]
        _, out, err = shell.run("run", shell.path("in.parquet"), *by_plan, "--json")
        yield from _differences("--plan", verdict, json.loads(out)) if out else (f"--plan: {err}",)
    else:
        # With the config that the trace has.
        _, out, err = shell.run("run", names["run"], *case.arguments, "--json")
        again = json.loads(out)["fingerprint"] if out else err
        if again != verdict["fingerprint"]:
            yield f"its own output replays to {again}, not {verdict['fingerprint']}"
    if not verdict["violations"]:
        _, out, _ = shell.run("run", shell.path("in.parquet"), *arguments, "--json", "--set", "kv.check=off")
        yield from _differences("kv.check=off", verdict, json.loads(out))


def _as_table(fault: str) -> str:
    """A fault of `--inject` as one of a plan."""
    name, _, words = fault.partition(":")
    pairs = [word.partition("=") for word in words.split(",") if word]
    values = {key: value if key == "p" else json.dumps(value) for key, _, value in pairs}
    return "\n".join(
        ["[[fault]]", f"name = {json.dumps(name)}", *(f"{key} = {value}" for key, value in values.items()), ""]
    )


def _differences(what: str, expected: dict[str, Any], told: dict[str, Any]) -> Iterator[str]:
    for key in expected:
        if key not in _NOT_COMPARED and expected[key] != told.get(key):
            yield f"{what}: {key} is {_cut(told.get(key))}, not {_cut(expected[key])}"


def _cut(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) < 400 else text[:400] + "..."
