"""The connector's and the CPU tier's state in the form of the vectors."""

from typing import Any

from kvreplay.conformance.offload_managers import counts_of, manager_state
from kvreplay.conformance.offload_recording import ContentLabels
from kvreplay.connectors.offloading.cpu_manager import CPUOffloadingManager
from kvreplay.connectors.offloading.ledger import Job
from kvreplay.connectors.offloading.request_state import RequestState
from kvreplay.connectors.offloading.scheduler import OffloadingScheduler
from kvreplay.connectors.offloading.worker import LOADS, STORES, SYNC_LOADS

State = dict[str, Any]


def connector_state(connector: OffloadingScheduler, labels: ContentLabels) -> State:
    ledger = connector.ledger
    state: State = {}
    if ledger.jobs:
        state["jobs"] = {str(job_id): [job.req_id, _kind(job), job.pending] for job_id, job in ledger.jobs.items()}
    if ledger.fences:
        state["fence"] = {str(block_id): sorted(job_ids) for block_id, job_ids in ledger.fences.items()}
    if connector.chunks_being_loaded:
        state["loading"] = sorted(labels.name(key) for key in connector.chunks_being_loaded)
    if ledger.reset_fence:
        state["reset_fence"] = {str(job_id): count for job_id, count in ledger.reset_fence.items()}
    if connector.states:
        state["req"] = {req_id: _request_row(of_request) for req_id, of_request in connector.states.items()}
    return state


def _request_row(state: RequestState) -> list[Any]:
    return [
        [group.next_stored_chunk_idx for group in state.groups],
        [group.num_keys for group in state.groups],
        [group.table.ids.tolist() for group in state.groups],
        sorted(state.jobs),
        int(state.finished_signaled),
    ]


def _kind(job: Job) -> str:
    if job.is_store:
        return STORES
    return SYNC_LOADS if job.is_sync_load else LOADS


def cpu_state(manager: CPUOffloadingManager, labels: ContentLabels) -> State:
    chunks = manager.chunks
    state = manager_state(manager, labels)
    state["cpu_free"] = chunks.num_free
    if len(chunks.free_list):
        state["cpu_fl"] = chunks.free_list.tolist()
    state["evictable"] = chunks.num_evictable
    counts = counts_of(manager, labels)
    if counts is not None:
        state["counts"] = counts
    return state
