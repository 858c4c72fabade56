"""The same vectors with our own scheduler above the connector: everything that the real engine decided around it.

Here nothing is taken from the recording but its workload: who is scheduled, which blocks everyone gets, what is looked
up, loaded, offered, stored, flushed and evicted. The first difference of a vector is shown.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvreplay.conformance import offload_vectors
from kvreplay.conformance.offload_workload import OffloadEvent, read_offload_workload
from kvreplay.conformance.scheduler_vectors import Driver as SchedulerDriver
from kvreplay.conformance.workload import RequestSpec, StepEvent, Workload
from kvreplay.connectors.multi.scheduler import MultiOutput, MultiScheduler
from kvreplay.connectors.offloading.engine_steps import step_of
from kvreplay.connectors.offloading.structs import OffloadingConnectorMetadata, OffloadingOutput
from kvreplay.connectors.offloading.worker import LOADS, SYNC_LOADS
from kvreplay.connectors.scripted.connector import ScriptedConnector
from kvreplay.engine.connector import KVConnectorOutput, RequestBlocks
from kvreplay.engine.output import SchedulerOutput
from kvreplay.engine.request import Request

VECTORS = [path for folder in ("vectors", "more") for path in sorted((Path(__file__).parent / folder).glob("*.json"))]
ENGINE = ("add", "new", "resumed", "run", "preempted", "fin_prev", "cow", "evict", "reset", "out", "upd_of", "after")
OFFLOAD = ("lookup", "load", "offer", "store", "flush", "submit", "done", "cpu_evict", "req_done", "cpu_reset")
TIERS = ("promote", "tier", "tier_done")
STATE = ("off", "cpu", "error")
AFTER = ("running", "waiting", "kvhold", "req", "free", "cached")


class Half:
    """Our connector's half in the scheduler, which writes down what it is asked and what it orders."""

    lookup_is_pure = False  # so that it is asked in every step, as the real one is

    def __init__(self, desk: Any) -> None:  # noqa: ANN401 - the conformance driver, used from inside
        self.desk = desk
        self.connector = desk.connector
        self.outputs: deque[OffloadingOutput] = deque()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self.connector, name)

    @property
    def has_pending(self) -> bool:
        is_busy = any(tier.is_busy for tier in self.desk.tiers)
        return bool(self.outputs) or is_busy or self.connector.has_pending_push_work()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        desk = self.desk
        desk.looked_up = []
        hit: tuple[int | None, bool] = self.connector.get_num_new_matched_tokens(request, num_computed_tokens)
        desk.clock.note("lookup", [request.request_id, num_computed_tokens, *hit, desk.looked_up])
        return hit

    def update_state_after_alloc(self, request: Request, blocks: RequestBlocks, num_external_tokens: int) -> None:
        desk, job_id = self.desk, self.connector.ledger.next_id
        self.connector.update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            job = self.connector.load_jobs[job_id]
            desk.delays.note(job)
            queue = SYNC_LOADS if job.is_sync else LOADS
            columns = offload_vectors._copy_columns(job)
            names = desk.labels.names(desk.manager.last_loaded)
            desk.clock.note("load", [job_id, request.request_id, num_external_tokens, queue, names, *columns])

    def build_connector_meta(self, out: SchedulerOutput) -> OffloadingConnectorMetadata:
        desk = self.desk
        out.finished_req_ids.sort(key=lambda req_id: desk.order[req_id])
        metadata = self.connector.build_meta(step_of(out)) or OffloadingConnectorMetadata()
        for job in metadata.store_jobs.values():
            desk.delays.note(job)
            desk.clock.note("store", desk._store_row(job))
        if metadata.jobs_to_flush:
            desk.clock.record["flush"] = sorted(metadata.jobs_to_flush)
        self.outputs.append(desk._run_workers(metadata))
        return metadata


class Multi(MultiScheduler):
    """Both children, as the driver of scheduler vectors wants to see one."""

    lookups: Sequence[object] = ()
    allocations: Sequence[object] = ()

    def __init__(self, half: Half, scripted: ScriptedConnector, order: Sequence[str]) -> None:
        named: dict[str, Any] = {"offload": half, "scripted": scripted}
        super().__init__([named[name] for name in order])
        self.half, self.scripted = half, scripted
        self.order = order

    @property
    def step(self) -> int:
        return self.scripted.step

    @step.setter
    def step(self, step: int) -> None:
        self.scripted.step = step

    @property
    def has_pending(self) -> bool:
        return self.half.has_pending or self.scripted.has_pending

    def take_reports(self, view: Any) -> MultiOutput:  # noqa: ANN401
        own = self.half.outputs.popleft()
        theirs = self.scripted.take_reports(view) or KVConnectorOutput()
        named = {"offload": own, "scripted": theirs}
        return MultiOutput(
            theirs.finished_sending,
            [*own.finished_recving, *theirs.finished_recving],
            theirs.failed_recving,
            theirs.invalid_block_ids,
            [named[name] for name in self.order],
        )


class Alone:
    """The half by itself, for that driver."""

    def __init__(self, half: Half) -> None:
        self.half = half
        self.lookups: list[object] = []
        self.allocations: list[object] = []
        self.step = 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self.half, name)

    def take_reports(self, view: object) -> KVConnectorOutput:
        return self.half.outputs.popleft()


class _WithConnector:
    """A workload whose connector is ours."""

    def __init__(self, workload: Workload, connector: object) -> None:
        self._workload, self._connector = workload, connector

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._workload, name)

    def scripted_connector(self) -> object:
        return self._connector


class Driver(SchedulerDriver):
    def __init__(self, document: Mapping[str, Any]) -> None:
        self.offload = read_offload_workload(document["workload"])
        self.desk: Any = offload_vectors._Driver(self.offload, [], document["resolved"]["hash_block_size"])
        offload = self.offload
        workload = Workload(
            engine=offload.engine,
            requests=list(offload.requests),
            events=list(offload.events),
            max_steps=offload.max_steps,
            idle_limit=offload.idle_limit,
        )
        half = Half(self.desk)
        scripted = workload.scripted_connector()
        order = document["workload"]["offload"].get("multi")
        connector: Any = Alone(half) if order is None else Multi(half, scripted, order)  # type: ignore[arg-type]
        super().__init__(_WithConnector(workload, connector))  # type: ignore[arg-type]

    def _apply(self, event: StepEvent, where: list[str]) -> None:
        assert isinstance(event, OffloadEvent)
        if not event.reset_connector:
            super()._apply(event, where)
            return
        super()._apply(msgspec.structs.replace(event, reset_prefix_cache=False), where)
        where[0] = "reset"
        self.record["reset"] = (
            self.scheduler.reset_prefix_cache(reset_running=event.reset_running, reset_connector=True)
            if event.reset_prefix_cache
            else self.desk.connector.reset_cache()
        )

    def _request(self, spec: RequestSpec) -> Request:
        request = Request(
            spec.id,
            self.desk.labels.contents[spec.id],
            num_prompt_tokens=len(spec.prompt_token_ids),
            max_tokens=spec.max_tokens,
            arrival_ns=spec.arrive,
            priority=spec.priority,
            stop_token_ids=tuple(spec.stop or ()),
            kv_transfer_params=self.desk.specs[spec.id].kv_params,
        )
        request.skip_reading_prefix_cache = self.desk.specs[spec.id].skip_read
        return request

    def _accepted(self, out: SchedulerOutput) -> dict[str, int]:
        return {}

    def _one_step(self, step: int, arrivals: list[RequestSpec]) -> bool:
        self.desk.clock.step = step
        self.desk.clock.record = self.record
        goes_on = super()._one_step(step, arrivals)
        if goes_on:
            self.desk._note_state()
        return goes_on


def comparable(step: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is compared of one step."""
    plain: dict[str, Any] = json.loads(json.dumps(step))
    for name in (*ENGINE, *OFFLOAD, *TIERS, *STATE):
        value = plain.get(name)
        if value is None:
            continue
        if name == "after":
            value = {part: value[part] for part in AFTER if part in value}
        if name == "error":
            value = {part: value.get(part) for part in ("where", "type")}
        yield name, value


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_our_engine_decides_as_the_real_one_did(path: Path) -> None:
    document = json.loads(path.read_text())
    found = list(Driver(document).run())
    assert len(found) == len(document["steps"])
    for place, (step, ours) in enumerate(zip(document["steps"], found, strict=True)):
        assert dict(comparable(ours)) == dict(comparable(step)), f"step {place}"
