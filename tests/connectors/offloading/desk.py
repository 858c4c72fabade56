"""An OffloadingScheduler under hand-made calls: the tests play the engine's scheduler, and its workers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from kvreplay.behaviour import profile
from kvreplay.connectors.offloading.arrays import Keys
from kvreplay.connectors.offloading.behaviour import VLLM_0_33, OffloadBehaviour, offload_behaviour
from kvreplay.connectors.offloading.cpu_manager import CPUOffloadingManager
from kvreplay.connectors.offloading.keys import KeySpace
from kvreplay.connectors.offloading.layout import OffloadGroup, OffloadLayout
from kvreplay.connectors.offloading.manager import OffloadingManager
from kvreplay.connectors.offloading.scheduler import OffloadingScheduler
from kvreplay.connectors.offloading.structs import (
    Handoff,
    OffloadingConnectorMetadata,
    OffloadingOutput,
    OffloadStep,
    StepRequest,
    TransferJob,
)
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.kv.content_index import TokenIndex

IDEAL = offload_behaviour(profile("ideal").switches)
Tables = Sequence[Sequence[int]]
Settings: TypeAlias = Any
"""Fields of a record, handed on by name."""


class Blocks:
    """A request's tables, and which of its real blocks have no hash."""

    def __init__(self, tables: Tables, unhashed: Tables | None = None) -> None:
        self.tables = tables
        self.unhashed = tables if unhashed is None else unhashed

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple(list(table) for table in self.tables)

    def get_unhashed_block_ids_all_groups(self) -> tuple[list[int], ...]:
        return tuple([block_id for block_id in ids if block_id] for ids in self.unhashed)


def full(group_id: int = 0, **settings: Settings) -> OffloadGroup:
    return OffloadGroup(**{"group_id": group_id, "tokens_per_block": 4, "bytes_per_block": 1000, **settings})


def window(group_id: int, size: int, **settings: Settings) -> OffloadGroup:
    return full(group_id, kind="sliding_window", window=size, **settings)


def state(group_id: int, **settings: Settings) -> OffloadGroup:
    return full(group_id, kind="mamba", **settings)


class Desk:
    """One engine with blocks of 4 tokens, unless its groups say otherwise."""

    def __init__(
        self,
        *groups: OffloadGroup,
        num_chunks: int = 100,
        behaviour: OffloadBehaviour = VLLM_0_33,
        manager: OffloadingManager | None = None,
        eviction_policy: str = "lru",
        clock: "Clock | None" = None,
        **layout: Settings,
    ) -> None:
        groups = groups or (full(),)
        settings = {"tokens_per_hash": min(group.tokens_per_block for group in groups), **layout}
        self.layout = OffloadLayout(groups=groups, **settings)
        self.index = TokenIndex(self.layout.tokens_per_hash)
        self.space = KeySpace(len(groups))
        self.cpu = CPUOffloadingManager(num_chunks, self.space, eviction_policy=eviction_policy, enable_events=True)
        self.connector = OffloadingScheduler(
            self.layout,
            manager or self.cpu,
            self.space,
            behaviour=behaviour,
            now_ns=None if clock is None else clock.now,
            wake_at=None if clock is None else clock.alarms.append,
            lookup_timeout_ns=5_000,
        )
        self.requests: dict[str, Request] = {}

    # -- requests ---------------------------------------------------------------------------------------------

    def add(
        self, req_id: str, tokens: int | Iterable[int], *, params: Mapping[str, Any] | None = None, max_tokens: int = 64
    ) -> Request:
        """`tokens`: the prompt, or how many from 0 on."""
        prompt = list(range(tokens) if isinstance(tokens, int) else tokens)
        request = Request(
            req_id,
            self.index.content(prompt, None),
            num_prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            kv_transfer_params=dict(params) if params is not None else None,
        )
        self.requests[req_id] = request
        self.connector.on_new_request(request)
        return request

    def ask(self, req_id: str, local: int = 0) -> int | None:
        """Tokens that the connector offers beyond the local ones."""
        return self.connector.get_num_new_matched_tokens(self.requests[req_id], local)[0]

    def allocate(
        self, req_id: str, *tables: Sequence[int], external: int = 0, unhashed: Tables | None = None
    ) -> TransferJob | None:
        """The request gets its blocks; the load that is to fill some."""
        before = set(self.connector.load_jobs)
        self.connector.update_state_after_alloc(self.requests[req_id], Blocks(tables, unhashed), external)
        started = self.connector.load_jobs.keys() - before
        return self.connector.load_jobs[started.pop()] if started else None

    def run(self, req_id: str, num_tokens: int, *tables: Sequence[int], start: int = 0) -> StepRequest:
        """A share: with tables it is admitted with these, else it goes on with what it has."""
        return StepRequest(req_id, start, num_tokens, tables or None, is_full_table=bool(tables))

    def grow(self, req_id: str, num_tokens: int, *new_blocks: Sequence[int], start: int) -> StepRequest:
        """A share of a running request that gets more blocks."""
        return StepRequest(req_id, start, num_tokens, new_blocks)

    def step(
        self,
        *shares: StepRequest,
        preempted: Sequence[str] = (),
        finished: Sequence[str] = (),
        copied_to: Sequence[int] = (),
        handoffs: Mapping[str, Sequence[Handoff]] | None = None,
    ) -> OffloadingConnectorMetadata:
        metadata = self.connector.build_meta(
            OffloadStep(shares, preempted, finished, copied_to, handoffs or {}, has_forward=bool(shares))
        )
        for share in shares:
            self.requests[share.request_id].num_computed_tokens = share.num_computed_tokens + share.num_scheduled_tokens
        return metadata or OffloadingConnectorMetadata()

    def admit(self, req_id: str, *tables: Sequence[int], start: int = 0) -> OffloadingConnectorMetadata:
        """All of a request's tokens from `start` on in one step."""
        self.allocate(req_id, *tables)
        return self.step(self.run(req_id, self.requests[req_id].num_tokens - start, *tables, start=start))

    def sample(self, req_id: str, count: int = 1) -> None:
        request = self.requests[req_id]
        for _ in range(count):
            request.content.append(1000 + request.num_tokens)  # type: ignore[attr-defined]
            request.num_tokens += 1
            request.num_output_tokens += 1

    def finish(self, req_id: str, status: RequestStatus = RequestStatus.FINISHED_STOPPED) -> None:
        request = self.requests[req_id]
        request.status = status
        self.connector.request_finished(request, None)

    def report(self, *job_ids: int, times: int = 1) -> None:
        """Workers say that these jobs are over."""
        self.connector.update_connector_output(OffloadingOutput(completed_jobs=dict.fromkeys(job_ids, times)))

    def report_all(self) -> None:
        jobs = self.connector.ledger.jobs
        self.connector.update_connector_output(
            OffloadingOutput(completed_jobs={job_id: job.pending for job_id, job in list(jobs.items())})
        )

    def store(self, req_id: str, tokens: int | Iterable[int], *tables: Sequence[int]) -> None:
        """A request that comes, computes its prompt, has it stored and ends."""
        self.add(req_id, tokens)
        self.ask(req_id)
        self.admit(req_id, *tables)
        self.sample(req_id)
        self.finish(req_id)
        self.step(finished=[req_id])
        self.report_all()

    # -- what there is ----------------------------------------------------------------------------------------

    def keys(self, req_id: str, group: int = 0) -> Keys:
        """Of the request's chunks."""
        state = self.connector.states[req_id]
        state.notice_keys()
        return state.groups[group].keys

    def held(self, keys: Keys) -> list[bool]:
        """Which chunks the CPU tier has, ready or not."""
        found: list[bool] = (self.cpu.chunks.find(keys) >= 0).tolist()
        return found

    def num_stored(self) -> int:
        """Chunks that the CPU tier has, ready or not."""
        return int(np.count_nonzero(self.cpu.chunks.ref_counts[:-1] >= -1))


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0
        self.alarms: list[int] = []

    def now(self) -> int:
        return self.now_ns


def blocks_of(job: TransferJob | None) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
    """GPU blocks, how many of each group, and where each group's first stands in its table."""
    assert job is not None
    return job.gpu.block_ids.tolist(), job.gpu.group_sizes, job.gpu.block_indices


def only_store(metadata: OffloadingConnectorMetadata) -> TransferJob:
    (job,) = metadata.store_jobs.values()
    return job
