"""What models with several KV cache groups cost, against one group: the same hour, config, topology and faults.

    python -m tests.benchmarks.hybrids                 every pair, some two minutes
    python -m tests.benchmarks.hybrids --repeat 3      the fastest of three of each
    python -m tests.benchmarks.hybrids --limit 2000    only the hour's first requests

User CPU time of whole processes, turn and turn about, and its ratio to the one group's. Eight instances that keep up
with the traffic, with aborts, preemptions, resets and a crash; and one that is overloaded several times over, without
faults. Contents are checked. All pools have the same number of blocks; a hybrid's are pages of all its groups.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.benchmarks.hour import PUBLIC, imported, measured

HYBRIDS: Final = ("gemma-hybrid", "qwen-gdn-hybrid")
LONGEST: Final = ("--set", "model.max_model_len=196608")
FAULTS: Final = (
    "abort:p=0.02,when=running",
    "scheduler.preempt:at=request.first_token,p=0.02",
    "cache.reset:at=600s",
    "cache.reset:at=1200s,what=running",
    "peer-crash:at=1800s,down=20s,instance=E1",
)
CASES: Final = {
    "eight instances, faults": (
        "llama-70b",
        (
            "--config",
            "single",
            "--set",
            "topology.instances=8",
            *(word for name in FAULTS for word in ("--inject", name)),
        ),
    ),
    "one overloaded instance": ("deepseek-mla", ("--config", "single-overloaded")),
}
"""Name → the preset with one group, and the rest of the command."""


def user_seconds(trace: Path, preset: str, arguments: tuple[str, ...], limit: int, core: int) -> float:
    command = [
        sys.executable,
        "-m",
        "kvreplay",
        "run",
        str(trace),
        *arguments,
        *LONGEST,
        "--limit",
        str(limit),
        "--json",
    ]
    return measured([*command, "--set", f"model.preset={preset}"], core).user_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=PUBLIC, help="Mooncake's conversation trace (JSONL)")
    parser.add_argument("--limit", type=int, default=12_031, help="first so many requests")
    parser.add_argument("--repeat", type=int, default=1, help="rounds, of which each preset's fastest counts")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="where to run")
    options = parser.parse_args()
    if not options.trace.exists():
        print(f"skipped: {options.trace.name} is not beside the checkout; give it with --trace")
        return
    with tempfile.TemporaryDirectory() as name:
        trace = imported(options.trace, Path(name), options.core)
        print(f"{'':34}{'preset':>18}{'user s':>9}{'ratio':>8}")
        for case, (single, arguments) in CASES.items():
            presets = (single, *HYBRIDS)
            best = dict.fromkeys(presets, float("inf"))
            for _ in range(options.repeat):
                for preset in presets:
                    spent = user_seconds(trace, preset, arguments, options.limit, options.core)
                    best[preset] = min(best[preset], spent)
            for preset in presets:
                print(f"{case:34}{preset:>18}{best[preset]:9.2f}{best[preset] / best[single]:8.2f}", flush=True)


if __name__ == "__main__":
    main()
