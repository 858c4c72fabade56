"""What a producer knows of each transfer, and of each pull that it services."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvreplay.connectors.mooncake import log
from kvreplay.connectors.mooncake.log import LogSink
from kvreplay.connectors.mooncake.plan import BrokenPlanError, TransferPlan, WriteSegment
from kvreplay.connectors.mooncake.structs import MooncakeXferMetadata
from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.sim.envelope import Envelope
from kvreplay.transport.machine import Deadline

GROUP_MISMATCH: Final = "KV group count mismatch"
TOO_FEW_BLOCKS: Final = "P num blocks less than D"
NULL_SOURCE: Final = "P has freed a block that D wants"


@dataclass(slots=True, eq=False)
class SendBlockMeta:
    """One transfer, by its id.

    A *placeholder* (`p_req_id` empty) was made by a pull that came before the request; *announced* is a request in
    prefill; *ready* one that has finished and whose blocks are held. A placeholder stays nameless until it is ready,
    announced or not.
    """

    p_req_id: str
    transfer_id: str
    local_block_ids: Sequence[Sequence[int]] = field(default_factory=list)
    ready: bool = False
    announced_by: str | None = None
    """The request in prefill; `p_req_id` has it only if no pull came before."""
    dropped: bool = False
    """The request ended without anything to send, and whoever waits for it shall be told."""
    need_send: int = 0
    """Consumer ranks that will ask; 0: not known before the first of them does."""
    sent: int = 0
    sending: int = 0
    waiters: dict["Service", None] = field(default_factory=dict)
    """Pulls that wait for it."""
    expiry: Deadline | None = None

    @property
    def owner(self) -> str:
        """Whose transfer it is, as far as is known."""
        return self.announced_by or self.p_req_id

    @property
    def is_over(self) -> bool:
        """Nothing is to be waited for any more."""
        return self.ready or self.dropped

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.local_block_ids))


@dataclass(slots=True, eq=False)
class Service:
    """One pull in the hands of one sender task."""

    envelope: Envelope
    pull: MooncakeXferMetadata
    plan: TransferPlan
    pending: dict[str, SendBlockMeta]
    """Consumer's request id → its transfer, while not ready."""
    remote_ranks: list[int]
    unanswered: dict[str, None]
    deadline: Deadline | None = None
    write: "Write | None" = None
    num_writes: int = 0
    num_replies: int = 0


@dataclass(slots=True, eq=False)
class Write:
    """One engine call: a batch of requests that were ready at the same time, and what it copies for them."""

    service: Service
    conversation: str
    batch: list[tuple[str, SendBlockMeta]] = field(default_factory=list)
    segments: tuple[WriteSegment, ...] = ()
    num_blocks: int = 0
    size_bytes: int = 0
    err_reqs: list[str] = field(default_factory=list)
    """Those of the batch that have failed already, and why."""
    err_msg: str | None = None
    is_last: bool = False
    write_id: int = -1
    """Its number, while the engine call is running."""
    start_ns: int = 0
    deadline: Deadline | None = None
    handles: dict[str, int] = field(default_factory=dict)
    """Consumer's request id → the event that says that its write started."""
    blocks_written: dict[str, int] = field(default_factory=dict)

    def fail(self, req_id: str, reason: str) -> None:
        """The first reason of a batch is the one that its reply gives."""
        self.err_reqs.append(req_id)
        if self.err_msg is None:
            self.err_msg = reason

    def fail_rest(self, reason: str) -> None:
        """Everything of the batch that has not failed, also what asked for no bytes."""
        self.err_reqs += [d_req_id for d_req_id, _ in self.batch if d_req_id not in self.err_reqs]
        self.err_msg = reason if self.err_msg is None else f"{self.err_msg}; {reason}"


class CopyPlanner:
    """Decides which blocks the engine copies for a batch; requests for which that cannot be are failed.

    `kernel_ratios`: by KV cache group, into how many blocks of the registered memory a block is cut. `state_groups`:
    groups of Mamba states, whose null blocks are placeholders. `refuses_nulls`: the switch mooncake_null_blocks.
    """

    def __init__(
        self,
        *,
        kernel_ratios: Sequence[int],
        state_groups: frozenset[int],
        refuses_nulls: bool,
        log_line: LogSink | None,
    ) -> None:
        self._ratios = kernel_ratios
        self._state_groups = state_groups
        self._refuses_nulls = refuses_nulls
        self._log = log_line

    def plan(self, write: Write) -> None:
        """A consumer that has the start of a prompt asks for fewer blocks, and gets the producer's last ones.

        Raises BrokenPlanError where vLLM's own planning breaks.
        """
        service = write.service
        pull, plan = service.pull, service.plan
        segments: list[WriteSegment] = []
        for d_req_id, entry in write.batch:
            transfer_id, wanted = pull.req_blocks[d_req_id]
            if entry.dropped or not any(wanted):
                continue
            pairs = self._matched(write, d_req_id, entry.local_block_ids, wanted)
            if pairs is None:
                continue
            of_request = [
                WriteSegment(d_req_id, transfer_id, group, source, target)
                for group, (source, target) in enumerate(pairs)
                if len(source)
            ]
            if of_request:
                plan.check(of_request, len(pairs))
                segments += [segment for segment in of_request if segment.group in plan.costs]
                if self._log is not None and self._log.debug:
                    num_blocks = sum(len(segment.block_ids) for segment in of_request)
                    session = f"{pull.remote_hostname}:{pull.remote_port}"
                    self._log(log.SENDER, log.DEBUG, log.SEND_BLOCKS, d_req_id, num_blocks, session)
        write.segments = tuple(segments)
        write.num_blocks = sum(len(segment.block_ids) for segment in segments)
        write.size_bytes = plan.num_bytes(segments)

    def _matched(
        self, write: Write, d_req_id: str, have: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]] | None:
        """Per group: source and destination, of equal lengths. None: the request has failed."""
        if len(have) != len(wanted):
            self._error(log.GROUP_COUNT, d_req_id, len(have), len(wanted))
            write.fail(d_req_id, GROUP_MISMATCH)
            return None
        pairs: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        for group, (own, peers) in enumerate(zip(have, wanted, strict=True)):
            if group >= len(self._ratios):
                raise BrokenPlanError("list index out of range")
            is_state = group in self._state_groups
            if is_state:
                own = [block_id for block_id in own if block_id != NULL_BLOCK_ID]
                peers = [block_id for block_id in peers if block_id != NULL_BLOCK_ID]
            if len(own) < len(peers):
                self._error(log.BLOCK_COUNT, d_req_id, len(own), len(peers), is_state)
                write.fail(d_req_id, TOO_FEW_BLOCKS)
                return None
            own = own[-len(peers) :] if peers else []
            if self._refuses_nulls and NULL_BLOCK_ID in own:
                write.fail(d_req_id, NULL_SOURCE)
                return None
            pairs.append((self._kernel_blocks(group, own), self._kernel_blocks(group, peers)))
        return pairs

    def _kernel_blocks(self, group: int, block_ids: Sequence[int]) -> NDArray[np.int64]:
        ids = np.asarray(block_ids, dtype=np.int64)
        ratio = self._ratios[group]
        if ratio == 1:
            return ids
        return (ids[:, None] * ratio + np.arange(ratio)).reshape(-1)

    def _error(self, template: str, *arguments: object) -> None:
        if self._log is not None:
            self._log(log.SENDER, log.ERROR, template, *arguments)
