"""What is left to say of instances when nothing more will happen on them."""

from collections.abc import Sequence

from kvreplay.engine.instance import Instance
from kvreplay.engine.request import UNDECIDED, Request, RequestStatus
from kvreplay.engine.sched.state import LIVELOCK_ATTEMPTS
from kvreplay.events import Event, EventSink
from kvreplay.faults.blame import Blame
from kvreplay.replay.findings import LiveFindings
from kvreplay.replay.node import Node
from kvreplay.sim.event_loop import EventLoop


class Ends:
    """Of the instances of one process."""

    def __init__(
        self, nodes: Sequence[Node], loop: EventLoop, sink: EventSink, blame: Blame, findings: LiveFindings
    ) -> None:
        self._nodes = nodes
        self._loop = loop
        self._sink = sink
        self._blame = blame
        self._findings = findings

    def sample(self) -> bool:
        """Returns whether any instance had something to tell."""
        told = False
        for node in self._nodes:
            if node.is_up:
                told |= node.instance.sample_again()
        return told

    def report_stalls(self) -> None:
        """Nothing is left that could happen: who has not ended never will, as things are."""
        for node in self._nodes:
            if not node.is_up:
                continue
            behind = self._fault_behind_holders(node)
            for request in node.instance.unfinished:
                self._report_stall(node, request, behind)

    def close_accounts(self) -> None:
        for node in self._nodes:
            node.instance.sample_usage()
            if node.is_up:
                self._findings.recount(node.instance)
                self._findings.check_drained(node.instance)

    def _report_stall(self, node: Node, request: Request, fault_behind_holders: int | None) -> None:
        held = node.instance.scheduler.kv.num_blocks_held(request.request_id)
        parked = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        self._sink.emit(
            Event(
                "request.stalled",
                self._loop.now_ns,
                node.name,
                node.instance.scheduler.step,
                request.request_id,
                request.transfer_id,
                peer=_peer_of(node, request) if parked else None,
                num_tokens=request.parked_since_ns if parked else request.arrival_ns,
                num_blocks=held,
                status=request.status.name,
                cause=_waiting_on(node.instance, request, held),
                cause_handle=self._fault_behind(node, request, fault_behind_holders if not held else None),
            )
        )

    def _fault_behind_holders(self, node: Node) -> int | None:
        """The fault that holds up one who has blocks: those who wait for blocks wait for its end."""
        for request in node.instance.unfinished:
            handle = self._fault_behind(node, request, None)
            if handle is not None and node.instance.scheduler.kv.num_blocks_held(request.request_id):
                return handle
        return None

    def _fault_behind(self, node: Node, request: Request, otherwise: int | None) -> int | None:
        """The last fault that named the request, else one that has harmed an instance of its pair for good."""
        handle = self._blame.of_request(request.request_id)
        if handle is None:
            peer = _peer_of(node, request)
            handle = self._blame.lasting_at([name for name in (peer, node.name) if name is not None])
        return handle if handle is not None else otherwise


def _peer_of(node: Node, request: Request) -> str | None:
    connector = node.instance.scheduler.connector
    return connector.peer_of(request) if connector is not None else None


def _waiting_on(instance: Instance, request: Request, num_blocks_held: int) -> str:
    if instance.is_hung:
        return "a step that never ends"
    if instance.is_asleep:
        return "an engine that sleeps"
    scheduler = instance.scheduler
    if request.attempts >= LIVELOCK_ATTEMPTS:
        return f"progress: {request.attempts:,} times parked or preempted without a token"
    if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS and request.request_id not in scheduler.finished_recving:
        return "remote KV"
    if request.request_id in scheduler.deferred_waiting and request.lookup_answer == UNDECIDED:
        assert scheduler.connector is not None, "who else leaves it undecided"
        if scheduler.connector.is_going_in_circles(request.request_id):
            return "progress: its lookup keeps the connector busy, and is never decided"
        return "an undecided lookup"
    return "a turn to run" if num_blocks_held else "free blocks"
