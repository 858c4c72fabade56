"""Clients and the proxy before the instances: who gets which request, and what a disaggregated pair is told.

The proxy sends both legs of a pair at once, as the reference proxy of vLLM's Mooncake connector does: the producer's
with one output token, the consumer's with the producer's engine id and bootstrap address. Nobody waits for the
producer's answer.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

from kvreplay.connectors.mooncake.addresses import bootstrap_url
from kvreplay.events import CONNECTION_REFUSED, PREFILL_FAILED, Event, EventSink
from kvreplay.replay.config import Role, Routing, TopologyConfig
from kvreplay.replay.node import Leg, OnEnd
from kvreplay.sim.bus import Bus, owner_of
from kvreplay.sim.envelope import CLIENT_ABORT, CLIENT_ARRIVAL, Command, Envelope
from kvreplay.sim.event_loop import Timer
from kvreplay.trace.workload import Arrival, Workload

PROXY = "proxy"
CLIENT = "client"

RewriteParams: TypeAlias = Callable[[Mapping[str, Any], str, str], Mapping[str, Any]]
"""(kv_transfer_params, request id, instance) → the parameters as they reach that instance."""


class Server(Protocol):
    """An instance, as far as who routes requests must know it (`replay.node.Node`)."""

    name: str
    role: Role
    api_address: str
    on_end: OnEnd | None

    @property
    def engine_id(self) -> str: ...

    @property
    def num_requests(self) -> int:
        """How many have not ended on it."""
        ...


class Picker:
    """Chooses an instance for each request."""

    def __init__(self, nodes: Sequence[Server], routing: Routing) -> None:
        assert nodes
        self._nodes = nodes
        self._routing = routing
        self._next = 0

    def pick(self) -> Server:
        if self._routing == "least_loaded":
            return min(self._nodes, key=lambda node: node.num_requests)  # the first of equals
        node = self._nodes[self._next]
        self._next = (self._next + 1) % len(self._nodes)
        return node


class Proxy:
    """Takes clients' requests and aborts at their times."""

    def __init__(
        self,
        workload: Workload,
        nodes: Sequence[Server],
        topology: TopologyConfig,
        bus: Bus,
        sink: EventSink,
        rewrite_params: RewriteParams | None = None,
        bootstrap_of: Callable[[str], str] = bootstrap_url,
        *,
        aborts_both: bool = False,
        cancels: bool = False,
        in_turn: bool = False,
    ) -> None:
        """`bootstrap_of`: producer → the URL at which its ranks can be asked for. `aborts_both`, `cancels` and
        `in_turn` are the switches proxy_abort, proxy_failed_prefill and proxy_legs."""
        self._workload = workload
        self._bus = bus
        self._sink = sink
        self._rewrite_params = rewrite_params
        self._bootstrap_of = bootstrap_of
        self._cancels = cancels
        self._in_turn = in_turn
        self._unsent: dict[str, Leg] = {}
        """Legs of serving instances that wait for their producers' to end."""
        self._producers = (
            Picker([node for node in nodes if node.role == "prefill"], topology.proxy_prefill)
            if topology.is_disaggregated
            else None
        )
        self._servers = Picker([node for node in nodes if node.role != "prefill"], topology.proxy_decode)
        self._serving: dict[str, Server] = {}
        """Requests that have not ended yet → the instance that serves the client."""
        self._aborts_both = aborts_both
        self._computing: dict[str, Server] = {}
        """The same → the producer of each, where it is to hear of an abort; once it has been told it is not here."""
        self._patience: dict[str, Timer] = {}
        """When clients go away: nobody waits for that once their requests are over."""
        self.num_ended = 0
        for node in nodes:
            node.on_end = partial(self._ended, node)
        bus.listen(PROXY, lambda envelope: None, refused=self._refused)
        bus.control(CLIENT, self.command)

    def start(self) -> None:
        """Schedule everything that clients do."""
        loop = self._bus.loop
        for place, arrival in enumerate(self._workload.arrivals):
            loop.call_at(arrival.time_ns, partial(self._arrive, place, arrival))
        for abort in self._workload.aborts:
            timer = loop.call_at(abort.time_ns, partial(self._abort_at_its_time, abort.request_id))
            self._patience.setdefault(abort.request_id, timer)

    # -- requests ---------------------------------------------------------------------------------------------

    def _arrive(self, place: int, arrival: Arrival) -> None:
        self._sink.emit(arrival.event())
        server = self._servers.pick()
        producer = self._producers.pick() if self._producers is not None else None
        transfer_id = f"xfer-{arrival.request_id}" if producer is not None else None
        self._serving[arrival.request_id] = server
        self._sink.emit(
            Event(
                "request.routed",
                arrival.time_ns,
                instance=server.name,
                request_id=arrival.request_id,
                transfer_id=transfer_id,
                peer=producer.name if producer is not None else None,
            )
        )
        if producer is None:
            own = arrival.params.get("kv_transfer_params")
            params = dict(own) if isinstance(own, dict) else None
            self._send(server, Leg(place, arrival.request_id, arrival.output_tokens, arrival.priority, params))
            return
        for_producer = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        for_server = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_engine_id": producer.engine_id,
            "remote_bootstrap_addr": self._bootstrap_of(producer.name),
        }
        if self._aborts_both:
            self._computing[arrival.request_id] = producer
        for node, max_tokens, params in ((producer, 1, for_producer), (server, arrival.output_tokens, for_server)):
            if self._rewrite_params is not None:
                params = dict(self._rewrite_params(params, arrival.request_id, node.name))
            is_producers = node is producer
            leg = Leg(place, arrival.request_id, max_tokens, arrival.priority, params, is_producers)
            if self._in_turn and not is_producers:
                self._unsent[arrival.request_id] = leg
            else:
                self._send(node, leg)

    def _send(self, node: Server, leg: Leg) -> None:
        transfer_id = (leg.params or {}).get("transfer_id")
        self._bus.post(
            Envelope(
                kind=CLIENT_ARRIVAL,
                source=PROXY,
                destination=node.api_address,
                payload=leg,
                request_ids=(leg.request_id,),
                transfer_ids=(transfer_id,) if transfer_id else (),
                conversation=f"{leg.request_id}>{node.name}",
            )
        )

    def _refused(self, envelope: Envelope) -> None:
        """Nobody listens at the instance: the client of a serving one gets an error, the producer's is not missed."""
        if envelope.kind != CLIENT_ARRIVAL:
            return
        name = owner_of(envelope.destination)
        request_id = envelope.request_ids[0]
        server = self._serving.get(request_id)
        if server is None:
            return
        if server.name != name:
            self._prefill_failed(request_id)
        else:
            self._reject(request_id, CONNECTION_REFUSED)

    def _reject(self, request_id: str, cause: str) -> None:
        server = self._serving[request_id]
        self._forget(request_id)
        now = self._bus.loop.now_ns
        self._sink.emit(Event("request.rejected", now, instance=server.name, request_id=request_id, cause=cause))

    def _ended(self, node: Server, request_id: str, *, has_finished: bool) -> None:
        server = self._serving.get(request_id)
        if server is node:
            self._forget(request_id)
        elif server is not None and not has_finished:
            self._prefill_failed(request_id)
        elif server is not None and request_id in self._unsent:
            self._send(server, self._unsent.pop(request_id))

    def _forget(self, request_id: str) -> None:
        del self._serving[request_id]
        self._computing.pop(request_id, None)
        self._unsent.pop(request_id, None)
        self._bus.loop.cancel(self._patience.pop(request_id, None))
        self.num_ended += 1

    def _prefill_failed(self, request_id: str) -> None:
        was_told = self._aborts_both and request_id not in self._computing
        if request_id in self._unsent:
            self._reject(request_id, PREFILL_FAILED)
        elif self._cancels and not was_told:
            self.abort(request_id)

    # -- aborts -----------------------------------------------------------------------------------------------

    def abort(self, request_id: str) -> bool:
        """The client goes away: the serving instance is told, and the producer only by some. False if it has ended."""
        server = self._serving.get(request_id)
        if server is None:
            return False
        now = self._bus.loop.now_ns
        self._sink.emit(Event("request.aborted", now, request_id=request_id))
        producer = self._computing.pop(request_id, None)
        told = [server] if producer is None else [server, producer]
        if request_id in self._unsent:
            # The serving instance has never heard of it.
            told.remove(server)
            self._forget(request_id)
            self._sink.emit(Event("request.aborted", now, instance=server.name, request_id=request_id, num_tokens=0))
        for node in told:
            self._bus.post(
                Envelope(
                    kind=CLIENT_ABORT,
                    source=PROXY,
                    destination=node.api_address,
                    payload=request_id,
                    request_ids=(request_id,),
                    conversation=f"{request_id}>{node.name}",
                )
            )
        return True

    def _abort_at_its_time(self, request_id: str) -> None:
        self.abort(request_id)

    def command(self, command: Command) -> bool:
        """Carry out an action fault at the client."""
        return command.verb == "abort" and self.abort(command.arguments["request_id"])
