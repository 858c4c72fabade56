"""Vectors of SimpleCPUOffloadConnector: a scheduler's workload, played with its scheduler half as the connector.

A workload's `simple_cpu` says how many CPU blocks there are, and how many steps after the one that orders it a copy is
reported. A preemption ends all that were ordered before.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, cast

import numpy as np
from msgspec import Meta, Struct, ValidationError, convert

from kvreplay.behaviour import Behaviour
from kvreplay.conformance.scheduler_vectors import Driver, reason_unsupported
from kvreplay.conformance.vector import Json, UnsupportedVectorError
from kvreplay.conformance.workload import Positive, Workload, read_workload
from kvreplay.connectors.scripted.connector import ScriptedConnector
from kvreplay.connectors.simple_cpu.scheduler import SimpleCpuScheduler
from kvreplay.connectors.simple_cpu.structs import CopyEvent, SimpleCpuMetadata, SimpleCpuOutput
from kvreplay.engine.connector import KVConnectorOutput, RequestBlocks
from kvreplay.engine.output import SchedulerOutput
from kvreplay.engine.request import Request
from kvreplay.errors import ConfigError
from kvreplay.kv.managers.mamba import BoundaryState

_KEY: Final = "simple_cpu"


class SimpleCpuSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """`num_cpu_blocks` includes the null block; delays in steps, from 1 on. `lazy_offload`: as vLLM's."""

    num_cpu_blocks: Annotated[int, Meta(ge=2, le=10_000_000)] = 65
    load_steps: Positive = 1
    store_steps: Positive = 1
    lazy_offload: bool = False


def split_workload(document: Json) -> tuple[Workload, SimpleCpuSpec]:
    """Raises ConfigError."""
    if not isinstance(document, Mapping):
        raise ConfigError("workload: expected an object")
    try:
        spec = convert(document.get(_KEY, {}), SimpleCpuSpec)
    except ValidationError as error:
        raise ConfigError(f"workload.{_KEY}: {error}") from error
    workload = read_workload({key: value for key, value in document.items() if key != _KEY})
    if not workload.has_connector:
        raise ConfigError("workload.engine.connector: expected true")
    return workload, spec


class Delays:
    """When copies are reported. `loads` and `stores`: events that are under way, with the step of their report."""

    def __init__(self, spec: SimpleCpuSpec) -> None:
        self._spec = spec
        self.loads: dict[int, int] = {}
        self.stores: dict[int, int] = {}

    @property
    def are_pending(self) -> bool:
        return bool(self.loads or self.stores)

    def order(self, step: int, load: int | None, store: int | None, *, must_flush: bool) -> None:
        if must_flush:
            self.loads = dict.fromkeys(self.loads, step)
            self.stores = dict.fromkeys(self.stores, step)
        if load is not None:
            self.loads[load] = step + self._spec.load_steps
        if store is not None:
            self.stores[store] = step + self._spec.store_steps

    def take_done(self, step: int) -> tuple[list[int], list[int]]:
        """Loads and stores that are reported in this step."""
        loads = [event for event, at in self.loads.items() if at <= step]
        stores = [event for event, at in self.stores.items() if at <= step]
        for event in loads:
            del self.loads[event]
        for event in stores:
            del self.stores[event]
        return loads, stores


class _Front(SimpleCpuScheduler):
    """The connector as the driver wants it: it notes what it is asked, and knows what is under way."""

    lookup_is_pure = False
    """All questions are to be noted, also those that could be left out."""

    def __init__(self, driver: "SimpleCpuDriver", spec: SimpleCpuSpec) -> None:
        super().__init__(
            driver.kv,
            spec.num_cpu_blocks,
            0,
            looks_again=False,
            forgives_lost_keys=False,
            observer=driver,
            lazy_batch_tokens=driver.workload.engine.max_num_batched_tokens if spec.lazy_offload else None,
            stops_circles=False,
        )
        self.step = 0
        self.lookups: list[list[Json]] = []
        self.allocations: list[list[Json]] = []
        self.delays = Delays(spec)
        self._req_ids: dict[int, Sequence[str]] = {}
        self._driver = driver

    @property
    def has_pending(self) -> bool:
        return self.delays.are_pending or self.has_pending_push_work()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.lookups.append([request.request_id, num_computed_tokens, *answer])
        return answer

    def update_state_after_alloc(self, request: Request, blocks: RequestBlocks, num_external_tokens: int) -> None:
        tables = [list(ids) for ids in blocks.get_block_ids()]
        self.allocations.append([request.request_id, num_external_tokens, tables])
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, out: SchedulerOutput) -> SimpleCpuMetadata | None:
        metadata = super().build_connector_meta(out)
        if metadata is None:
            return None
        load, store = metadata.load, metadata.store
        if load is not None:
            self._req_ids[load.number] = load.req_ids
        numbers = [event.number if event is not None else None for event in (load, store)]
        self.delays.order(self.step, *numbers, must_flush=metadata.must_flush)
        fields = {"load": _event_row(load), "store": _event_row(store), "flush": metadata.must_flush}
        self._driver.record.update({name: value for name, value in fields.items() if value})
        return metadata

    def take_reports(self, driver: object) -> SimpleCpuOutput | None:
        loads, stores = self.delays.take_done(self.step)
        if not loads and not stores:
            return None
        finished = [req_id for event in loads for req_id in self._req_ids.pop(event)]
        return SimpleCpuOutput(finished_recving=finished, stored=stores)


def _event_row(event: CopyEvent | None) -> list[Json] | None:
    return None if event is None else [event.number, event.pairs.gpu, event.pairs.cpu]


class SimpleCpuDriver(Driver):
    def __init__(self, workload: Workload, spec: SimpleCpuSpec, behaviour: Behaviour | None = None) -> None:
        self._spec = spec
        super().__init__(workload, behaviour)

    def make_connector(self) -> ScriptedConnector:
        self._front = _Front(self, self._spec)
        return cast(ScriptedConnector, self._front)

    # -- StoreObserver ----------------------------------------------------------------------------------------

    def started(self, event: CopyEvent) -> None: ...

    def ended(self, event: CopyEvent, failure: str | None) -> None: ...

    def loses_found(self, req_id: str) -> bool:
        return False

    # -- the record -------------------------------------------------------------------------------------------

    def _reports(self) -> KVConnectorOutput | None:
        reports = super()._reports()
        if not self.record.get("deliver"):
            self.record.pop("deliver", None)  # of stores nothing is said to the scheduler
        return reports

    def _state(self) -> dict[str, Any]:
        pool = self._front.pool
        held = np.flatnonzero(pool.ref_counts[1:]) + 1
        cpu = {
            "free": pool.num_free,
            "cached": pool.num_cached_keys,
            "fq": pool.free_queue().tolist(),
            "ref": {str(block): int(pool.ref_counts[block]) for block in held.tolist()},
        }
        return {**super()._state(), "cpu": cpu}

    def _record_block_work(self, out: SchedulerOutput) -> None:
        super()._record_block_work(out)
        self.record.pop("boundary", None)  # what becomes of them shows in what is stored

    def _on_partial_tails(self, request: Request, tails: list[BoundaryState]) -> bool:
        return False  # this connector does not want them


def run_simple_cpu(document: Json) -> Iterator[dict[str, Json]]:
    """What our own engine does with a workload, step by step."""
    workload, spec = split_workload(document)
    reason = reason_unsupported(workload)
    if reason is not None:
        raise UnsupportedVectorError(reason)
    return iter(SimpleCpuDriver(workload, spec).run())
