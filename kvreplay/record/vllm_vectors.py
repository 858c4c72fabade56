"""Makes scheduler vectors from an installed vLLM, checks them against it, and plays random workloads through both.

Run it with the Python that has vLLM (no GPU is needed, no model, nothing compiled), and kvreplay installed beside it
or on PYTHONPATH:

    python -m kvreplay.record.vllm_vectors make WORKLOAD.json ... -o FOLDER
    python -m kvreplay.record.vllm_vectors check [FILES or FOLDERS]
    python -m kvreplay.record.vllm_vectors fuzz --count 1000 [--layouts full,swa] [--features none] [-o FOLDER]

`make` takes a workload, or a vector, of which it takes the workload: that refreshes vectors for another version.
`make --random N` draws N workloads instead. `check` tells which vectors the installed version does not reproduce.
`fuzz` compares vLLM with kvreplay's own scheduler, shrinks each workload for which they differ, and with -o keeps it
as a vector that `kvreplay conformance` then shows to differ.

Exit status: 0 all equal or made, 2 usage, bad input, or no vLLM, 3 something differs.

A workload is what a vector says under "workload": `kvreplay.conformance.workload` has every key with its default. The
driver (`vllm_driver`) builds vLLM's own `Scheduler` or `AsyncScheduler` with a connector that answers from the
workload's script, hands it model output with scripted tokens, and writes down each step. One step: arrivals, aborts,
resets, schedule(), the record's decisions, `abort_mid`, update_from_output(), draft proposals, the state after.

What vLLM 0.33.0 leaves to chance is pinned, so that a vector comes out the same with any PYTHONHASHSEED: requests are
finished and reported in order of arrival, invalid blocks evicted in order of id. `schedule()` is called in every step,
also where the engine core would sleep. The V2 model runner is on, as on a GPU.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvreplay.conformance.compare import FIELD_ORDER, Difference, first_differences
from kvreplay.conformance.kinds.scheduler import SchedulerVectors, recorded_steps
from kvreplay.conformance.random_workloads import FEATURES, LAYOUTS, random_workload
from kvreplay.conformance.suite import default_places
from kvreplay.conformance.vector import FORMAT, find_files, read_documents, read_vector
from kvreplay.errors import ConfigError, KvReplayError
from kvreplay.record.oracle import VllmOracle
from kvreplay.user_files import reason

if TYPE_CHECKING:
    from collections.abc import Callable

Fields = dict[str, Any]

_RANK: Final = {name: rank for rank, name in enumerate(FIELD_ORDER)}
_MAX_SHOWN: Final = 5


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        status: int = options.command(VllmOracle(), options)
    except KvReplayError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename}: {reason(error)}"
    else:
        return status
    sys.stderr.write(f"error: {message}\n")
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvreplay.record.vllm_vectors", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="make|check|fuzz")
    make = commands.add_parser("make", help="record workloads, as vectors")
    make.add_argument("workloads", nargs="*", type=Path, metavar="WORKLOAD", help="workloads or vectors, as JSON")
    make.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    make.add_argument("--random", type=int, default=0, metavar="N", help="draw N workloads")
    _add_draw_options(make)
    make.set_defaults(command=make_vectors)
    check = commands.add_parser("check", help="record again, and compare")
    check.add_argument("places", nargs="*", type=Path, metavar="PLACE", help="files or folders")
    check.set_defaults(command=check_vectors)
    fuzz = commands.add_parser("fuzz", help="random workloads through vLLM and through kvreplay")
    fuzz.add_argument("--count", type=int, default=1000, metavar="N")
    fuzz.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="keep what differs, shrunk, as vectors")
    fuzz.add_argument("--stop-after", type=int, default=10, metavar="N", help="differences to shrink (default 10)")
    _add_draw_options(fuzz)
    fuzz.set_defaults(command=fuzz_engines)
    return parser


def _add_draw_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first workload")
    parser.add_argument("--layouts", type=_names(LAYOUTS), default=tuple(LAYOUTS), metavar="A,B,...")
    parser.add_argument("--features", type=_names(FEATURES), default=FEATURES, metavar="A,B,...|none")


def _names(known: Iterable[str]) -> "Callable[[str], tuple[str, ...]]":
    choices = tuple(known)

    def names(text: str) -> tuple[str, ...]:
        given = () if text == "none" else tuple(text.split(","))
        for name in given:
            if name not in choices:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(choices)}")
        return given

    return names


# -- make --------------------------------------------------------------------------------------------------------


def make_vectors(oracle: VllmOracle, options: argparse.Namespace) -> int:
    named = [_named_workload(path) for path in options.workloads]
    draw = _draw(options)
    named += [
        (workload["name"], workload) for workload in map(draw, range(options.seed, options.seed + options.random))
    ]
    if not named:
        raise ConfigError("make: name a workload, or draw some with --random N")
    options.output.mkdir(parents=True, exist_ok=True)
    for name, workload in named:
        path = options.output / f"{name}.json"
        try:
            text = vector_text(oracle, workload)
        except KvReplayError as error:
            raise type(error)(f"{name}: {error}") from error
        path.write_text(text)
        sys.stdout.write(f"{path}\n")
    return 0


def _named_workload(path: Path) -> tuple[str, Fields]:
    try:
        documents = read_documents(path)
    except KvReplayError as error:
        raise ConfigError(f"{path}: {error}") from error
    workload = documents[0] if documents else None
    if isinstance(workload, dict) and "workload" in workload:
        workload = workload["workload"]
    if not isinstance(workload, dict):
        raise ConfigError(f"{path}: expected a workload, or a vector")
    return path.stem, workload


def vector_text(oracle: VllmOracle, workload: Fields) -> str:
    """A line with what was asked, then one a step. Raises KvReplayError where vLLM cannot run the workload."""
    resolved, steps = oracle.record(workload)
    head = {"format": FORMAT, "oracle": oracle.name, "resolved": resolved, "workload": workload}
    lines = ",\n".join(_dumps(_ordered(step)) for step in steps)
    return f'{_dumps(head)[:-1]},"steps":[\n{lines}\n]}}\n'


def _ordered(step: Mapping[str, Any]) -> Fields:
    fields = {name: step[name] for name in sorted(step, key=lambda name: (name != "k", _RANK.get(name, len(_RANK))))}
    if isinstance(step.get("after"), Mapping):
        fields["after"] = _ordered(step["after"])
    return fields


def _dumps(document: object) -> str:
    return json.dumps(document, separators=(",", ":"))


# -- check -------------------------------------------------------------------------------------------------------


def check_vectors(oracle: VllmOracle, options: argparse.Namespace) -> int:
    kind = SchedulerVectors()
    num_equal = num_different = 0
    for path in find_files(options.places or default_places()):
        try:
            vector = read_vector(path)
            if vector is None or not kind.recognises(vector):
                continue
            recorded = recorded_steps(vector)
            resolved, steps = oracle.record(vector.document["workload"])
            found = first_differences(recorded, json.loads(_dumps(list(steps))))
        except KvReplayError as error:
            raise type(error)(f"{path}: {error}") from error
        if not found and resolved != vector.document.get("resolved", resolved):
            found = [Difference(None, "resolved", vector.document["resolved"], resolved)]
        num_equal += not found
        num_different += bool(found)
        if found:
            sys.stdout.write(f"{path}\n")
            _write_differences(found)
    total = num_equal + num_different
    sys.stdout.write(f"{oracle.name}: {num_equal} of {total} vectors reproduced, {num_different} differ\n")
    return 3 if num_different else 0


def _write_differences(differences: Sequence[Difference]) -> None:
    for difference in differences[:_MAX_SHOWN]:
        expected, got = _dumps(difference.expected), _dumps(difference.got)
        sys.stdout.write(f"  step {difference.step}, {difference.field}: expected {expected}, got {got}\n")
    if len(differences) > _MAX_SHOWN:
        sys.stdout.write(f"  ... and {len(differences) - _MAX_SHOWN} more fields of this step\n")


# -- fuzz --------------------------------------------------------------------------------------------------------


def _draw(options: argparse.Namespace) -> "Callable[[int], Fields]":
    return lambda seed: random_workload(seed, layouts=options.layouts, features=options.features)


def fuzz_engines(oracle: VllmOracle, options: argparse.Namespace) -> int:
    from kvreplay.record.fuzz import FuzzCounts, fuzz

    counts = FuzzCounts()
    seeds = range(options.seed, options.seed + options.count)
    for num_shown, finding in enumerate(fuzz(oracle, seeds, _draw(options), counts), 1):
        sys.stdout.write(f"seed {finding.seed} differs; the smallest workload that does:\n")
        sys.stdout.write(f"  {_dumps(finding.workload)}\n")
        _write_differences(finding.differences)
        sys.stdout.flush()
        if options.output is not None:
            options.output.mkdir(parents=True, exist_ok=True)
            (options.output / f"seed{finding.seed}.json").write_text(vector_text(oracle, finding.workload))
        if num_shown == options.stop_after:
            break
    for why, number in sorted(counts.skipped.items(), key=lambda item: -item[1]):
        sys.stdout.write(f"skipped {number}: {why}\n")
    skipped = sum(counts.skipped.values())
    sys.stdout.write(f"{oracle.name}: {counts.equal} equal, {counts.differ} differ, {skipped} skipped\n")
    return 3 if counts.differ else 0


if __name__ == "__main__":
    sys.exit(main())
