"""What an hour of production traffic costs to replay: seconds, memory, and where the time goes.

    python -m tests.benchmarks.hour                    everything, about two minutes
    python -m tests.benchmarks.hour --limit 1000       only its first requests
    python -m tests.benchmarks.hour --no-split         without the sampled runs

Each figure is of a whole process, `python -m kvreplay run ...` from interpreter start to exit, pinned to one core: wall
clock, CPU time and peak memory as the kernel counts them. With --repeat the fastest run counts. The workload is
imported beforehand, which also leaves the bytecode that an installation has. Contents are checked in all runs
(`kv.check` is `on`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
PUBLIC: Final = ROOT.parent / "shared" / "traces" / "conversation_trace.jsonl"
LIMITS: Final = (1_000, 3_000, 12_031)

CASES: Final = {
    "one overloaded instance": ("--config", "single-overloaded"),
    "4P4D, 2 % of the pulls time out": ("--config", "mooncake-4p4d", "--inject", "timeout:p=0.02"),
}


TIER_PAIRS: Final = ("offload-single", "offload-hybrid-8")
"""Packaged configs with a CPU tier of four times the GPU pool; each is run against itself without the tier."""


class Cost(NamedTuple):
    wall_s: float
    cpu_s: float
    peak_mib: float
    user_s: float


def measured(command: Sequence[str], core: int) -> Cost:
    """One process, on one core."""
    started = perf_counter()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\nexits {process.returncode}:\n{errors.decode()}")
    return Cost(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, usage.ru_utime)


def replay(trace: Path, case: str, limit: int) -> list[str]:
    return ["run", str(trace), *CASES[case], "--limit", str(limit), "--json"]


def best_of(count: int, command: Sequence[str], core: int) -> Cost:
    return min((measured(command, core) for _ in range(count)), key=lambda cost: cost.cpu_s)


def print_costs(trace: Path, limits: Sequence[int], repeat: int, core: int) -> None:
    print(f"{'':34}{'requests':>9}{'wall s':>9}{'CPU s':>8}{'MiB':>7}{'ms/request':>12}")
    for case in CASES:
        for limit in limits:
            cost = best_of(repeat, [sys.executable, "-m", "kvreplay", *replay(trace, case, limit)], core)
            per_request = 1_000 * cost.cpu_s / limit
            print(
                f"{case:34}{limit:9,}{cost.wall_s:9.2f}{cost.cpu_s:8.2f}{cost.peak_mib:7.0f}{per_request:12.2f}",
                flush=True,
            )


def without_connector(config: str, folder: Path) -> Path:
    """The packaged config of this name, but for its connector."""
    lines = (ROOT / "configs" / f"{config}.toml").read_text().splitlines()
    start = lines.index("[connector]")
    end = next(index for index in range(start + 1, len(lines)) if lines[index].startswith("["))
    path = folder / f"{config}-without.toml"
    path.write_text("\n".join(lines[:start] + lines[end:]))
    return path


def print_tier_ratios(trace: Path, limit: int, repeat: int, core: int, folder: Path) -> None:
    """What a CPU tier adds to a run: both in turn, so that a machine that changes its speed does it to both."""
    print(f"\n{'CPU tier of 4 x the GPU pool':34}{'with, s':>9}{'without':>9}{'ratio':>7}   CPU, {limit:,} requests")
    for config in TIER_PAIRS:
        command = [sys.executable, "-m", "kvreplay", "run", str(trace), "--limit", str(limit), "--json", "--config"]
        twin = str(without_connector(config, folder))
        pairs = [(measured([*command, config], core), measured([*command, twin], core)) for _ in range(repeat)]
        tiered, plain = (min(cost.cpu_s for cost in costs) for costs in zip(*pairs, strict=True))
        print(f"{config:34}{tiered:9.2f}{plain:9.2f}{tiered / plain:7.2f}", flush=True)


def print_split(trace: Path, limit: int, core: int, folder: Path) -> None:
    """Where the CPU time of the longest runs goes."""
    splits: dict[str, dict[str, float]] = {}
    for case in CASES:
        output = folder / "split.json"
        measured([sys.executable, "-m", "tests.benchmarks.sampled", str(output), *replay(trace, case, limit)], core)
        splits[case] = json.loads(output.read_text())
    totals = {case: sum(split.values()) for case, split in splits.items()}
    print(
        f"\nCPU seconds by part, {limit:,} requests (sampled: see tests/benchmarks/sampled.py for what that distorts)"
    )
    parts = sorted({part for split in splits.values() for part in split}, key=lambda part: -_sum(splits, part))
    for part in parts:
        cells = [
            f"{split.get(part, 0):8.2f} {split.get(part, 0) / totals[case]:5.0%}" for case, split in splits.items()
        ]
        print(f"  {part:26}{'   '.join(cells)}")
    print(f"  {'all':26}{'   '.join(f'{total:8.2f}      ' for total in totals.values())}")
    print(f"  columns: {'; '.join(CASES)}")


def _sum(splits: dict[str, dict[str, float]], part: str) -> float:
    return sum(split.get(part, 0) for split in splits.values())


def imported(source: Path, folder: Path, core: int) -> Path:
    trace = folder / "hour.parquet"
    cost = measured([sys.executable, "-m", "kvreplay", "import", "mooncake", str(source), "-o", str(trace)], core)
    print(f"import: {cost.wall_s:.2f} s, {cost.peak_mib:.0f} MiB")
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=PUBLIC, help="Mooncake's conversation trace (JSONL)")
    parser.add_argument("--limit", type=int, action="append", help="first so many requests; repeatable")
    parser.add_argument("--repeat", type=int, default=1, help="runs of which the fastest counts")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="where to run")
    parser.add_argument("--no-split", action="store_true", help="leave the sampled runs out")
    options = parser.parse_args()
    if not options.trace.exists():
        print(f"skipped: {options.trace.name} is not beside the checkout; give it with --trace")
        return
    limits = options.limit or LIMITS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace = imported(options.trace, folder, options.core)
        print_costs(trace, limits, options.repeat, options.core)
        print_tier_ratios(trace, max(limits), options.repeat, options.core, folder)
        if not options.no_split:
            print_split(trace, max(limits), options.core, folder)


if __name__ == "__main__":
    main()
