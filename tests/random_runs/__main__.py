"""Many random command lines, and what is wrong with them.

    python -m tests.random_runs --first 0            until interrupted
    python -m tests.random_runs --first 0 --count 500 --jobs 2
    python -m tests.random_runs --show 17            the commands of one, to be run by hand
    python -m tests.random_runs --kind mooncake --profile ideal --inject mooncake.dup-transfer-id:p=0.3

Each runs in a process of its own, and is told if it takes longer than --limit seconds.
"""

import argparse
import itertools
import os
import shlex
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

from kvreplay.kv.torch_import import import_torch
from tests.random_runs.cases import KINDS, Wish, draw
from tests.random_runs.checks import Shell, complaints


def check(seed: int, wish: Wish, folder: str) -> None:
    """In a child: what is found goes into a file."""
    os.environ["COLUMNS"] = "120"
    with (Path(folder) / "found.txt").open("w") as found:
        try:
            for complaint in complaints(draw(seed, wish), Shell(Path(folder))):
                print(complaint, file=found, flush=True)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=found)
            raise


def outcome(seed: int, wish: Wish, limit_s: float) -> tuple[int, float, str]:
    """Seed, seconds, complaints."""
    started = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        child = get_context("fork").Process(target=check, args=(seed, wish, folder))
        child.start()
        child.join(limit_s)
        late = child.is_alive()
        if late:
            child.kill()
            child.join()
        path = Path(folder) / "found.txt"
        found = path.read_text() if path.exists() else "no outcome\n"
    return seed, perf_counter() - started, found + (f"takes longer than {limit_s:g} s\n" if late else "")


def show(seed: int, wish: Wish) -> None:
    case = draw(seed, wish)
    print(f"# c.toml; {case.blocks} blocks more than one request needs\n{case.config}")
    print(shlex.join(["kvreplay", "synth", "-o", "in.parquet", *case.workload]))
    print(shlex.join(["kvreplay", "run", "in.parquet", "--config", "c.toml", *case.arguments]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=sys.maxsize, help="so many; without: no end")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that a case may take")
    parser.add_argument("--show", type=int, metavar="SEED", help="print a case instead")
    parser.add_argument("--kind", choices=KINDS, help="connector of all cases")
    parser.add_argument("--profile", help="of all cases")
    parser.add_argument(
        "--inject", action="append", default=[], metavar="SPEC", help="a fault that all have; repeatable"
    )
    parser.add_argument(
        "--behaviour", action="append", default=[], metavar="SWITCH", help="one that all have; repeatable"
    )
    options = parser.parse_args()
    wish = Wish(options.kind, options.profile, tuple(options.inject), tuple(options.behaviour))
    if options.show is not None:
        show(options.show, wish)
        return 0
    import_torch()
    import_module("kvreplay.replay.runner")  # once, not in every child
    seeds = iter(range(options.first, options.first + options.count))
    num_bad = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        while batch := list(itertools.islice(seeds, 8 * options.jobs)):
            for seed, seconds, found in pool.map(lambda seed: outcome(seed, wish, options.limit), batch):
                if found:
                    num_bad += 1
                    print(f"seed {seed} ({seconds:.1f} s):\n{found}", flush=True)
            print(f"... {batch[-1] - options.first + 1} cases, {num_bad} with complaints", flush=True)
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
