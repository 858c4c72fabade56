"""A bus with a plan on it: two producers, two consumers, and a log of what arrives where."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvreplay.connectors.mooncake.plan import WriteSegment
from kvreplay.connectors.mooncake.structs import (
    BootstrapQuery,
    MooncakeXferMetadata,
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
    WriteData,
)
from kvreplay.events import Event
from kvreplay.faults.injector import Injector
from kvreplay.faults.plan import make_plan
from kvreplay.faults.topology import TopologyInfo
from kvreplay.ids import NS_PER_S
from kvreplay.sim.bus import Bus
from kvreplay.sim.envelope import (
    BOOTSTRAP_QUERY,
    PULL_REPLY,
    PULL_REQUEST,
    WRITE_DATA,
    Command,
    Envelope,
)
from kvreplay.sim.event_loop import EventLoop
from tests.list_sink import ListSink

TOPOLOGY = TopologyInfo(
    instances={"P0": "kv_producer", "P1": "kv_producer", "D0": "kv_consumer", "D1": "kv_consumer"},
    connectors=frozenset({"mooncake"}),
    commands=frozenset({"abort", "crash", "restart", "preempt", "arrival", "config"}),
)
FINISH = MooncakeXferResponseStatus.FINISH
CONTINUE = MooncakeXferResponseStatus.CONTINUE
ERROR = MooncakeXferResponseStatus.ERROR


class Bench:
    """`arrived`: (seconds, address, envelope) in order; `commands`: (seconds, address, verb, arguments)."""

    def __init__(self, *specs: str, seed: int = 0) -> None:
        self.loop = EventLoop()
        self.bus = Bus(self.loop)
        self.events = ListSink()
        self.injector = Injector(make_plan(specs), seed, self.events, self.loop, self.bus)
        self.arrived: list[tuple[float, str, Envelope]] = []
        self.commands: list[tuple[float, str, str, dict[str, Any]]] = []
        for instance in TOPOLOGY.instances:
            for place in ("mooncake/0", "mooncake/1", "memory/0", "bootstrap"):
                self.bus.listen(f"{instance}/{place}", self._arrive)
        for address in ("client", *TOPOLOGY.instances):
            self.bus.control(address, self._controller_of(address))
        self.injector.arm(TOPOLOGY)

    def _arrive(self, envelope: Envelope) -> None:
        self.arrived.append((self.loop.now_ns / NS_PER_S, envelope.destination, envelope))

    def _controller_of(self, address: str) -> Any:  # noqa: ANN401
        def carry_out(command: Command) -> None:
            self.commands.append((self.loop.now_ns / NS_PER_S, address, command.verb, command.arguments))

        return carry_out

    # -- what happens ------------------------------------------------------------------------------------

    def at(self, seconds: float) -> None:
        """Let time pass, and everything that is due by then."""
        time_ns = round(seconds * NS_PER_S)
        self.loop.call_at(time_ns, lambda: None)
        self.loop.run_until_quiescent(time_ns)

    def run(self) -> None:
        self.loop.run_until_quiescent()

    def emit(self, kind: str, **columns: Any) -> None:  # noqa: ANN401
        self.injector.sink.emit(Event(kind, self.loop.now_ns, **columns))

    def post(self, *envelopes: Envelope) -> "Bench":
        for envelope in envelopes:
            self.bus.post(envelope)
        self.run()
        return self

    # -- what came of it ---------------------------------------------------------------------------------

    @property
    def payloads(self) -> list[Any]:
        return [envelope.payload for _, _, envelope in self.arrived]

    @property
    def num_arrived(self) -> int:
        return len(self.arrived)

    @property
    def injected(self) -> list[Event]:
        return [event for event in self.events.events if event.kind == "fault.injected"]

    @property
    def faulted(self) -> list[str | None]:
        return [event.request_id for event in self.injected]

    def fired(self) -> list[int]:
        return [statistics.fired for statistics in self.injector.statistics()]


def ids(requests: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Requests and their transfers."""
    return tuple(requests), tuple(f"xfer-{request}" for request in requests)


def pull(*requests: str, by: str = "D0", of: str = "P0", rank: int = 0, attempt: int = 0) -> Envelope:
    request_ids, transfer_ids = ids(requests)
    return Envelope(
        kind=PULL_REQUEST,
        source=f"{by}/mooncake/{rank}",
        destination=f"{of}/mooncake/0",
        payload=MooncakeXferMetadata(
            remote_hostname=by,
            remote_port=1,
            remote_tp_size=1,
            remote_tp_rank=0,
            req_blocks={request: (f"xfer-{request}", [[1]]) for request in requests},
            kv_caches_base_addr=[],
            block_lens=[],
            kv_block_lens=[],
        ),
        request_ids=request_ids,
        transfer_ids=transfer_ids,
        conversation=f"pull/{by}/{requests[0]}",
        attempt=attempt,
    )


def reply(
    *requests: str,
    to: str = "D0",
    of: str = "P0",
    rank: int = 0,
    index: int = 0,
    status: MooncakeXferResponseStatus = FINISH,
    pull_of: str | None = None,
) -> Envelope:
    """`pull_of`: the pull's first request, where this reply names another."""
    request_ids, transfer_ids = ids(requests)
    return Envelope(
        kind=PULL_REPLY,
        source=f"{of}/mooncake/0",
        destination=f"{to}/mooncake/{rank}",
        payload=MooncakeXferResponse(status, ok_reqs=list(requests)),
        request_ids=request_ids,
        transfer_ids=transfer_ids,
        conversation=f"pull/{to}/{pull_of or requests[0]}",
        reply_index=index,
    )


def query(*requests: str, by: str = "D0", of: str = "P0", attempt: int = 0) -> Envelope:
    request_ids, transfer_ids = ids(requests)
    return Envelope(
        kind=BOOTSTRAP_QUERY,
        source=f"{by}/mooncake/0",
        destination=f"{of}/bootstrap",
        payload=BootstrapQuery("/query"),
        request_ids=request_ids,
        transfer_ids=transfer_ids,
        conversation=f"bootstrap/{by}/{requests[0]}",
        attempt=attempt,
    )


def write(*requests: str, to: str = "D0", of: str = "P0", num_blocks: int = 2, number: int = 0) -> Envelope:
    """Each request has `num_blocks` blocks in group 0 and one in group 1."""
    request_ids, transfer_ids = ids(requests)
    segments = tuple(
        WriteSegment(request, f"xfer-{request}", group, np.arange(count), np.arange(count))
        for request in requests
        for group, count in ((0, num_blocks), (1, 1))
    )
    data = WriteData(
        session=f"{to}:1",
        pull=f"pull/{to}/{requests[0]}",
        attempt=0,
        write_id=number,
        segments=segments,
        num_blocks=len(requests) * (num_blocks + 1),
        read=lambda piece: None,
    )
    return Envelope(
        kind=WRITE_DATA,
        source=f"{of}/mooncake/0",
        destination=f"{to}/memory/0",
        payload=data,
        request_ids=request_ids,
        transfer_ids=transfer_ids,
        conversation=f"pull/{to}/{requests[0]}/write{number}",
    )
