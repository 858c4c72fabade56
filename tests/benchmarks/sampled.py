"""`kvreplay` with a sampler: where its CPU time goes, by part.

    python -m tests.benchmarks.sampled OUT.json run TRACE --config single-overloaded --json

Every 2 ms of CPU time a signal arrives; the CPU time since the one before is charged to the innermost frame that
belongs to kvreplay, so that numpy's time is its caller's. Distortion: Python handles a signal between two bytecodes, so
a long call into C is charged whole to its caller, along with what little ran since the last sample; a sample costs
some 20 µs, about 1 %. A profiler that hooks every call would triple the run, and charge small functions too much.
"""

import gc
import json
import signal
import sys
from collections import defaultdict
from pathlib import Path
from time import process_time
from types import FrameType

INTERVAL_S = 0.002

PARTS: dict[str, tuple[str, ...]] = {
    "scheduler": ("engine/sched", "engine/lockstep", "engine/queues", "engine/recovery", "engine/request"),
    "instance and clock": ("engine/instance", "engine/log", "sim/event_loop", "replay/timing"),
    "accounts": ("engine/accounts",),
    "block pool and tables": (
        "kv/block_pool",
        "kv/block_table",
        "kv/joined_tables",
        "kv/group_keys",
        "kv/attention_managers",
        "kv/uniform_manager",
        "kv/block_list",
        "kv/cache_manager",
        "kv/managers",
        "kv/lookup",
    ),
    "hashing": ("kv/content",),
    "buffers": ("kv/buffers", "kv/block_rows", "engine/worker", "engine/suspects", "kv/memory"),
    "connector, bus, faults": ("connectors/", "transport/", "sim/", "faults/", "replay/network"),
    "trace": ("trace/", "events"),
    "checkers and summary": ("checkers/", "verdict/"),
    "cluster, proxy, command": ("replay/", "report/", "cli/"),
}
"""First match counts. What is imported is start-up, wherever it is imported from."""

START_UP = "start-up"
COLLECTOR = "garbage collection"
REST = "the rest"


class Sampler:
    def __init__(self, package: Path) -> None:
        self._prefix = f"{package}/"
        self._parts: dict[str, str] = {}
        self._last_s = process_time()
        self._collecting = False
        self.seconds: defaultdict[str, float] = defaultdict(float, {START_UP: self._last_s})

    def start(self) -> None:
        gc.callbacks.append(self._on_collection)
        signal.signal(signal.SIGPROF, self._on_signal)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        """The collector runs no bytecode: its time is taken here."""
        now_s = process_time()
        if phase == "stop":
            self.seconds[COLLECTOR] += now_s - self._last_s
            self._last_s = now_s

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = process_time()
        self.seconds[self._part_of(frame)] += now_s - self._last_s
        self._last_s = now_s

    def _part_of(self, frame: FrameType | None) -> str:
        innermost = None
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith("<frozen importlib"):
                return START_UP
            if innermost is None and name.startswith(self._prefix):
                innermost = name
            frame = frame.f_back
        if innermost is None:
            return START_UP if not self._parts else REST
        part = self._parts.get(innermost)
        if part is None:
            part = self._parts[innermost] = part_of(innermost.removeprefix(self._prefix))
        return part


def part_of(module: str) -> str:
    """The part that a file of the package belongs to."""
    return next((part for part, prefixes in PARTS.items() if module.startswith(prefixes)), REST)


def main() -> None:
    output, *arguments = sys.argv[1:]
    sampler = Sampler(Path(__file__).parents[2] / "kvreplay")
    sampler.start()
    try:
        from kvreplay.cli.app import run_app

        status = run_app(arguments)
    finally:
        sampler.stop()
        Path(output).write_text(json.dumps(sampler.seconds))
    sys.exit(status)


if __name__ == "__main__":
    main()
