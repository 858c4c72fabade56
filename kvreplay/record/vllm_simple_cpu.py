"""Records vectors of vLLM's SimpleCPUOffloadConnector: the real scheduler with its real scheduler half.

Run it with the Python that has vLLM, and kvreplay on PYTHONPATH:

    python -m kvreplay.record.vllm_simple_cpu make WORKLOAD.json ... -o FOLDER
    python -m kvreplay.record.vllm_simple_cpu fuzz --count 100 [--seed N] [-o FOLDER]

A workload is a scheduler's, with `connector` on and `simple_cpu` beside its engine (`kvreplay.conformance
.simple_cpu_vectors`). Nothing is copied: what the workers would report is told after as many steps as it says. `fuzz`
compares vLLM with kvreplay's own, and with -o keeps what differs. Exit status: 0, 2 bad input, 3 something differs.
"""

# mypy: disable-error-code="import-not-found, import-untyped"

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

from kvreplay.conformance.compare import first_differences
from kvreplay.conformance.random_workloads import random_workload
from kvreplay.conformance.simple_cpu_vectors import Delays, SimpleCpuSpec, run_simple_cpu, split_workload
from kvreplay.conformance.vector import FORMAT, Json, UnsupportedVectorError
from kvreplay.conformance.workload import Workload
from kvreplay.errors import ConfigError, KvReplayError
from kvreplay.record.vllm_driver import WorkloadDriver
from kvreplay.record.vllm_setup import VLLM_VERSION, known

_LAYOUTS: Final = (
    *("full", "mla", "full_swa", "full_fine_swa", "full_coarse_swa", "full_swa_fine_hash", "full_two_swa"),
    *("full_chunked", "full_swa_chunked", "mamba", "mamba_fine_hash", "mamba_swa", "mla_replay", "ring", "five_groups"),
)


class SimpleCpuRecorder(WorkloadDriver):
    def __init__(self, workload: Workload, spec: SimpleCpuSpec) -> None:
        settings = {
            "cpu_bytes_to_use": 1 << 30,
            "num_cpu_blocks": spec.num_cpu_blocks,
            "lazy_offload": spec.lazy_offload,
        }
        super().__init__(workload, {"kv_connector": "SimpleCPUOffloadConnector", "kv_connector_extra_config": settings})
        self._manager = self.scheduler.connector.scheduler_manager
        self._delays = Delays(spec)
        self._metadata: Any = None
        self._lookups: list[Json] = []
        self._allocations: list[Json] = []
        self._watch()

    def _watch(self) -> None:
        manager = self._manager
        look_up, allocate, build = (
            manager.get_num_new_matched_tokens,
            manager.update_state_after_alloc,
            manager.build_connector_meta,
        )

        def watched_look_up(request: Any, num_computed_tokens: int) -> Any:  # noqa: ANN401
            answer = look_up(request, num_computed_tokens)
            self._lookups.append([request.request_id, num_computed_tokens, *answer])
            return answer

        def watched_allocate(request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401
            tables = [list(ids) for ids in blocks.get_block_ids()]
            self._allocations.append([request.request_id, num_external_tokens, tables])
            allocate(request, blocks, num_external_tokens)

        def watched_build(output: Any) -> Any:  # noqa: ANN401
            self._metadata = metadata = build(output)
            self._note(metadata)
            return metadata

        manager.get_num_new_matched_tokens = watched_look_up
        manager.update_state_after_alloc = watched_allocate
        manager.build_connector_meta = watched_build

    def _note(self, metadata: Any) -> None:  # noqa: ANN401 - SimpleCPUOffloadMetadata
        events = [event if event >= 0 else None for event in (metadata.load_event, metadata.store_event)]
        self._delays.order(self.record["k"], *events, must_flush=metadata.need_flush)
        load, store = events
        fields = {
            "load": None if load is None else [load, metadata.load_gpu_blocks, metadata.load_cpu_blocks],
            "store": None if store is None else [store, metadata.store_gpu_blocks, metadata.store_cpu_blocks],
            "flush": metadata.need_flush,
        }
        self.record.update({name: value for name, value in fields.items() if value})

    def _start_record(self, step: int) -> None:
        super()._start_record(step)
        self._lookups, self._allocations = [], []

    def _record_connector(self) -> None:
        fields = {"lookup": self._lookups, "alloc": self._allocations}
        self.record.update({name: value for name, value in fields.items() if value})

    def _reports(self) -> Any:  # noqa: ANN401 - KVConnectorOutput
        loads, stores = self._delays.take_done(self.record["k"])
        if not loads and not stores:
            return None
        waiting = self._manager._load_event_to_reqs
        finished = [req_id for event in loads for req_id in waiting.get(event, ())]
        if finished:
            self.record["deliver"] = {"recv": sorted(finished)}
        return known(
            KVConnectorOutput,
            finished_recving=finished or None,
            kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(dict.fromkeys(stores, 1)) if stores else None,
        )

    def _state(self) -> dict[str, Any]:
        pool = self._manager.cpu_block_pool
        cpu = {
            "free": pool.get_num_free_blocks(),
            "cached": len(pool.cached_block_hash_to_block),
            "fq": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "ref": {str(block.block_id): block.ref_cnt for block in pool.blocks if block.ref_cnt and not block.is_null},
        }
        return {**super()._state(), "cpu": cpu}

    def _nothing_to_come(self, step: int) -> bool:
        is_pending = self._delays.are_pending or self._manager.has_pending_stores()
        return step >= self.workload.last_step and not is_pending


def record(document: Json) -> tuple[dict[str, int], Iterator[dict[str, Any]]]:
    """What vLLM made of the settings, and its steps. Raises ConfigError."""
    recorder = SimpleCpuRecorder(*split_workload(document))
    resolved = {
        "scheduler_block_size": recorder.scheduler_block_size,
        "hash_block_size": recorder.hash_block_size,
    }
    return resolved, recorder.steps()


def draw(seed: int, layouts: Sequence[str], *, is_lazy: bool = False) -> Json:
    """A random workload without scripts, whose requests often share their prompts."""
    rng = Random(seed)
    document = random_workload(seed, layouts=layouts, features=("priority", "async", "spec"))
    engine = document["engine"]
    for name in ("kv_role", "requires_kv_delivery", "divergent_hits", "hisparse_host_blocks"):
        engine.pop(name, None)
    engine["connector"] = True
    engine["enable_prefix_caching"] = True
    prompts = [request["prompt"] for request in document["requests"]]
    for request in document["requests"]:
        for name in ("external", "load", "lookups", "delay_free", "send_after", "script"):
            request.pop(name, None)
    document["requests"] += [
        {
            "id": f"again{place}",
            "prompt": rng.choice(prompts),
            "max_tokens": rng.choice([1, 2, 4, 9]),
            "arrive": rng.randrange(4, 60),
        }
        for place in range(rng.randrange(1, 5))
    ]
    document["events"] = [
        {key: value for key, value in event.items() if key in ("step", "abort", "abort_mid", "reset_prefix_cache")}
        for event in document.get("events", [])
    ]
    document["simple_cpu"] = {
        "num_cpu_blocks": rng.choice([4, 9, 17, 40]),
        "load_steps": rng.choice([1, 1, 2, 4]),
        "store_steps": rng.choice([1, 1, 2, 5]),
        "lazy_offload": is_lazy,
    }
    return document


def vector_of(document: Json) -> dict[str, Json]:
    resolved, steps = record(document)
    oracle = f"vllm {VLLM_VERSION}"
    return {"format": FORMAT, "oracle": oracle, "resolved": resolved, "workload": document, "steps": list(steps)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvreplay.record.vllm_simple_cpu")
    commands = parser.add_subparsers(required=True, dest="command")
    make = commands.add_parser("make", help="record workloads, or vectors anew")
    make.add_argument("workloads", nargs="+", type=Path)
    make.add_argument("-o", "--output", type=Path, required=True)
    fuzz = commands.add_parser("fuzz", help="random workloads through vLLM and through kvreplay")
    fuzz.add_argument("--count", type=int, default=100)
    fuzz.add_argument("--seed", type=int, default=0)
    fuzz.add_argument("--layouts", default=",".join(_LAYOUTS))
    fuzz.add_argument("--lazy", action="store_true", help="with lazy_offload")
    fuzz.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    try:
        return _make(options) if options.command == "make" else _fuzz(options)
    except KvReplayError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def _make(options: argparse.Namespace) -> int:
    options.output.mkdir(parents=True, exist_ok=True)
    for path in options.workloads:
        document = json.loads(path.read_text())
        _write(options.output / path.name, vector_of(document.get("workload", document)))
    return 0


def _fuzz(options: argparse.Namespace) -> int:
    num_played, num_different = 0, 0
    for seed in range(options.seed, options.seed + options.count):
        document = draw(seed, options.layouts.split(","), is_lazy=options.lazy)
        try:
            _, steps = record(document)
            expected = list(steps)
            found = first_differences(expected, run_simple_cpu(document))
        except (UnsupportedVectorError, ConfigError) as error:
            sys.stdout.write(f"{seed}: {error}\n")
            continue
        num_played += 1
        if found:
            num_different += 1
            sys.stdout.write(f"{seed}: step {found[0].step} {found[0].field}: {found[0].expected} {found[0].got}\n")
            if options.output is not None:
                _write(options.output / f"{seed}.json", vector_of(document))
    sys.stdout.write(f"{num_played} played, {num_different} differ\n")
    return 3 if num_different else 0


def _write(path: Path, document: Mapping[str, Json]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {key: value for key, value in document.items() if key != "steps"}
    steps = ",\n".join(json.dumps(step, separators=(",", ":")) for step in document["steps"])
    path.write_text(json.dumps(head, separators=(",", ":"))[:-1] + ',"steps":[\n' + steps + "\n]}\n")


if __name__ == "__main__":
    sys.exit(main())
