"""What a producer knows of each transfer, and of each pull that it services."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvreplay.connectors.mooncake.structs import MooncakeXferMetadata, WriteSegment
from kvreplay.kv.memory import BlockIds
from kvreplay.sim.envelope import Envelope
from kvreplay.transport.machine import Deadline

GROUP_MISMATCH = "KV group count mismatch"
TOO_FEW_BLOCKS = "P num blocks less than D"


@dataclass(slots=True, eq=False)
class SendBlockMeta:
    """One transfer, by its id.

    A *placeholder* (`p_req_id` empty) was made by a pull that came before the request; *announced* is a request in
    prefill; *ready* one that has finished and whose blocks are held. vLLM leaves a placeholder nameless until it is
    ready, announced or not.
    """

    p_req_id: str
    transfer_id: str
    local_block_ids: list[list[int]] = field(default_factory=list)
    ready: bool = False
    announced: bool = False
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
    pending: dict[str, SendBlockMeta]
    """Consumer's request id → its transfer, while not ready."""
    num_remote_ranks: int
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


def plan_copies(write: Write, pull: MooncakeXferMetadata, page_bytes: Sequence[int]) -> None:
    """Decide what the engine shall copy for a batch; requests for which that cannot be are failed.

    A consumer that has the start of a prompt asks for fewer blocks, and gets the producer's last ones.
    """
    segments: list[WriteSegment] = []
    for d_req_id, entry in write.batch:
        transfer_id, wanted = pull.req_blocks[d_req_id]
        if entry.dropped or not any(wanted):
            continue
        have = entry.local_block_ids
        if len(have) != len(wanted):
            write.fail(d_req_id, GROUP_MISMATCH)
        elif any(len(own) < len(peers) for own, peers in zip(have, wanted, strict=True)):
            write.fail(d_req_id, TOO_FEW_BLOCKS)
        else:
            for group, (own, peers) in enumerate(zip(have, wanted, strict=True)):
                if peers:
                    source = np.asarray(own[-len(peers) :], dtype=np.int64)
                    target = np.asarray(peers, dtype=np.int64)
                    segments.append(WriteSegment(d_req_id, transfer_id, group, source, target))
                    write.num_blocks += len(peers)
                    write.size_bytes += len(peers) * page_bytes[group]
    write.segments = tuple(segments)


def num_descriptors(segments: Sequence[WriteSegment], num_regions: Sequence[int]) -> int:
    """How many copies the engine makes: runs of blocks that are adjacent on both sides, in each of their regions."""
    return sum(
        num_regions[segment.group] * (1 + _num_breaks(segment.source_block_ids, segment.block_ids))
        for segment in segments
    )


def _num_breaks(source: BlockIds, target: BlockIds) -> int:
    source, target = np.asarray(source), np.asarray(target)
    return int(np.count_nonzero((source[1:] - source[:-1] != 1) | (target[1:] - target[:-1] != 1)))
