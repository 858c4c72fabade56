"""Direct calls of the connector: lookups on a chosen set of chunks, and loads into fabricated block tables."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from kvreplay.conformance.offload_managers import LETTERS
from kvreplay.conformance.offload_tables import TableBlocks
from kvreplay.conformance.offload_workload import OffloadSpec, OffloadWorkload, layout_of
from kvreplay.conformance.vector import Json
from kvreplay.conformance.workload import MAX_PROMPT_TOKENS, Count, EngineSpec
from kvreplay.connectors.offloading.arrays import Keys
from kvreplay.connectors.offloading.context import RequestContext
from kvreplay.connectors.offloading.cpu_manager import CPUOffloadingManager
from kvreplay.connectors.offloading.keys import KeySpace
from kvreplay.connectors.offloading.layout import OffloadGroup
from kvreplay.connectors.offloading.manager import LookupResult
from kvreplay.connectors.offloading.request_state import RequestState
from kvreplay.connectors.offloading.scheduler import OffloadingScheduler
from kvreplay.engine.request import Request
from kvreplay.errors import ConfigError, EngineFatal
from kvreplay.kv.content_index import TokenIndex

_REQUEST: Final = "r"
_CPU_CHUNKS: Final = 400
_ENGINE: Final[Mapping[str, Json]] = {"num_gpu_blocks": 200, "max_model_len": 2048, "max_num_batched_tokens": 2048}

Chunks = Literal["all"] | dict[str, int | list[int]] | None
"""Of each group: ends of chunks, or the last one's of a run from the start."""


class Case(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    kind: Literal["alloc", "lookup"]
    engine: dict[str, Json]
    prompt: Annotated[int, Meta(ge=1, le=MAX_PROMPT_TOKENS)]
    local: Count
    note: str = ""
    external: Count = 0
    blocks: list[list[int | tuple[int, bool]]] = []
    offload: dict[str, Json] = {}
    have: Chunks = "all"
    pending: Chunks = None
    kv_params: dict[str, Json] | None = None
    sync: bool = False
    partial_tail: bool = False


def expected_results(document: Mapping[str, Json]) -> list[dict[str, Json]]:
    """One step for each case, under its name; of an error only its type counts."""
    return [{"k": index, **_without_place(entry["result"])} for index, entry in enumerate(document["cases"])]


def replayed_results(document: Mapping[str, Json]) -> Iterator[dict[str, Json]]:
    for index, entry in enumerate(document["cases"]):
        try:
            call = _Call(msgspec.convert(entry.get("case"), Case))
        except msgspec.ValidationError as error:
            raise ConfigError(f"cases[{index}]: {error}") from error
        yield {"k": index, **call.run()}


def _without_place(result: Mapping[str, Json]) -> dict[str, Json]:
    kept = dict(result)
    if "error" in kept:
        kept["error"] = {"type": kept["error"]["type"]}
    return kept


class _Call:
    """One request, and a CPU tier that holds what the case says."""

    def __init__(self, case: Case) -> None:
        self.case = case
        engine = msgspec.convert({**_ENGINE, **case.engine}, EngineSpec)
        offload = msgspec.convert({"cpu_chunks": _CPU_CHUNKS, **case.offload}, OffloadSpec)
        workload = OffloadWorkload(engine, offload, requests=[])
        self.layout = layout_of(workload, _tokens_per_hash(workload))
        self.space = KeySpace(len(self.layout.groups))
        self.manager = CPUOffloadingManager(offload.cpu_chunks, self.space)
        self.connector = OffloadingScheduler(self.layout, self.manager, self.space)
        content = TokenIndex(self.layout.tokens_per_hash).content(range(1, case.prompt + 1))
        self.prefixes = content.block_keys
        self.request = Request(
            _REQUEST, content, num_prompt_tokens=case.prompt, max_tokens=1, kv_transfer_params=case.kv_params
        )
        self.connector.on_new_request(self.request)
        self.state: RequestState = self.connector.states[_REQUEST]
        self.state.notice_keys()
        self._fill()

    def run(self) -> dict[str, Json]:
        groups = [
            [group.tokens_per_block, group.tokens_per_chunk, group.window_chunks if group.is_windowed else None]
            for group in self.layout.groups
        ]
        try:
            answer = self._look_up() if self.case.kind == "lookup" else self._load()
        except EngineFatal as death:
            answer = {"error": {"type": death.exception}}
        return {"groups": groups, **answer}

    # -- the tier's contents ----------------------------------------------------------------------------------

    def _fill(self) -> None:
        context = RequestContext("filler")
        ready = self._keys(self.case.have)
        if len(ready):
            self.manager.prepare_store(ready, context)
            self.manager.complete_store(ready, context)
        pending = self._keys(self.case.pending)
        if len(pending):
            self.manager.prepare_store(pending, context)

    def _keys(self, chunks: Chunks) -> Keys:
        return np.concatenate(
            [self._group_keys(index, group, chunks) for index, group in enumerate(self.layout.groups)]
        )

    def _group_keys(self, index: int, group: OffloadGroup, chunks: Chunks) -> Keys:
        size = group.tokens_per_chunk
        ends = self.case.prompt if chunks == "all" else (chunks or {}).get(str(group.group_id), [])
        places = np.arange(size, ends + 1, size) if isinstance(ends, int) else np.array(ends, np.int64)
        return self.space.make(self.prefixes[places // self.layout.tokens_per_hash - 1], index, places)

    def _name(self, key: int) -> str:
        prefix, index = divmod(key, self.space.num_groups)
        place = int((self.prefixes == prefix).nonzero()[0][0])
        return f"{_REQUEST}@{(place + 1) * self.layout.tokens_per_hash}/{self.layout.groups[index].group_id}"

    # -- the calls --------------------------------------------------------------------------------------------

    def _look_up(self) -> dict[str, Json]:
        asked: list[list[str]] = []

        def note(key: int, result: LookupResult) -> None:
            asked.append([self._name(key), LETTERS[result]])

        self.connector.lookup.observer = note
        answer, is_async = self.connector.get_num_new_matched_tokens(self.request, self.case.local)
        return {
            "result": answer,
            "is_async": is_async,
            "lookups": asked,
            "partial_tail": self.state.partial_tail_boundary,
        }

    def _load(self) -> dict[str, Json]:
        case, connector = self.case, self.connector
        self.state.num_local_tokens = case.local
        if case.sync:
            connector.sync_loads.add(_REQUEST)
        if case.partial_tail:
            self.state.partial_tail_boundary = case.local + case.external
        connector.update_state_after_alloc(self.request, _blocks(case), case.external)
        answer: dict[str, Any] = {}
        for job_id, job in connector.load_jobs.items():
            answer = {
                "keys": [self._name(key) for key in connector.ledger.jobs[job_id].keys.tolist()],
                "chunks": job.chunk_ids.tolist(),
                "dst": job.gpu.block_ids.tolist(),
                "sizes": list(job.gpu.group_sizes),
                "indices": list(job.gpu.block_indices),
                "sync": job.is_sync,
            }
        answer["next_stored"] = [group.next_stored_chunk_idx for group in self.state.groups]
        answer["allocated"] = connector.allocated_ids.tolist()
        answer["loading"] = sorted(self._name(key) for key in connector.chunks_being_loaded or ())
        return answer


def _blocks(case: Case) -> TableBlocks:
    """A block is given by its id, or as `[id, true]` if it has a hash."""
    tables = [[entry if isinstance(entry, int) else entry[0] for entry in row] for row in case.blocks]
    unhashed = [[entry for entry in row if isinstance(entry, int) and entry] for row in case.blocks]
    return TableBlocks(tables, unhashed)


def _tokens_per_hash(workload: OffloadWorkload) -> int:
    """As the engine resolves it: one group's block size, or what is set, or the greatest common divisor."""
    sizes = [group.block_size or workload.engine.block_size for group in workload.groups]
    return workload.engine.hash_block_size or int(np.gcd.reduce(sizes))
