"""A whole cluster of which every instance is a process: clients, proxy, action faults and the trace are here.

The supervisor starts the processes, tells them where the others listen, and ends them: a process whose pipe is closed
ends itself, whatever becomes of the supervisor.

Time goes on from one instant at which something happens to the next, everywhere at once, when all processes have said
that they have dealt with what came before and that nothing is on its way: no timer is early because a message is late.
At an instant they take turns, in the order in which virtual time takes what happens then; what one sends arrives at the
other's next turn. So a run over sockets comes to the same every time.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic
from typing import Any, Final

from kvreplay.connectors.mooncake import addresses
from kvreplay.errors import KvReplayError
from kvreplay.events import Event, EventSink
from kvreplay.faults.injector import Injector
from kvreplay.faults.record import FaultStatistics
from kvreplay.faults.topology import check_possible
from kvreplay.ids import NS_PER_S, plural
from kvreplay.kv.content_index import ContentIndex
from kvreplay.replay.cluster import HEAL_BOUND_NS, RunSettings, Watch, bootstrap_url_of, path_timers_ns, topology_of
from kvreplay.replay.config import Role
from kvreplay.replay.network import LinkNetwork
from kvreplay.replay.node import OnEnd, instance_names
from kvreplay.replay.overrides import overridden
from kvreplay.replay.proxy import Proxy
from kvreplay.replay.remote import messages
from kvreplay.replay.remote.external_bootstrap import ExternalBootstrap
from kvreplay.replay.remote.nursery import Files, Nursery
from kvreplay.replay.remote.shared_blame import HitsToldSink, handle_there
from kvreplay.sim.bus import Bus, Network, owner_of
from kvreplay.sim.envelope import CLIENT_ABORT, NEW_IDENTITY, Command, Envelope
from kvreplay.sim.event_loop import FOREVER_NS, EventLoop
from kvreplay.trace.workload import Workload
from kvreplay.transport.paced import INSTANT_BYTES, Pace, PacedLoop, shared_instant
from kvreplay.transport.pipes import FramedPipes
from kvreplay.transport.traffic import Ledger
from kvreplay.user_files import reason

_START_S: Final = 120.0
"""A process may take so long to come up: it reads the trace, and loads what tensors need."""
_ANSWER_S: Final = 60.0
_LOST_S: Final = 10.0
"""What has been on its way for so long while nobody did anything will not come any more."""
_MAX_WAIT_S: Final = 0.05
_MARGIN_S: Final = 120.0
_REQUEST_S: Final = 1.0
"""The real time that a request may cost."""
_TIMERS: Final = 6
"""A request goes through all of its timers at most so often."""


class RemoteNode:
    """An instance's process, as the proxy sees it (`replay.proxy.Server`)."""

    def __init__(
        self, name: str, role: Role, setup: messages.Setup, cluster: "RemoteCluster", nursery: Nursery
    ) -> None:
        self.name = name
        self.role: Role = role
        self.api_address = f"{name}/api"
        self.incarnation = 0
        self.engine_id = addresses.engine_id_of(name)
        self.is_up = True
        self.is_ready = False
        self.is_serving = False
        """Clients can reach it."""
        self.on_end: OnEnd | None = None
        self.endpoints: dict[str, str] = {}
        self.handles: list[int] = []
        """Event of the process → its handle here."""
        self.said = messages.Settled(
            is_quiet=False,
            has_kept=False,
            next_due=(FOREVER_NS, 0),
            num_heard=0,
            told=None,
            unreported_from_ns=0,
        )
        self.num_told = 0
        self.done: dict[int, messages.Done] = {}
        self.account: messages.Account | None = None
        self._cluster = cluster
        self._live: dict[str, None] = {}
        try:
            their_read_fd, write_fd = os.pipe()
            read_fd, their_write_fd = os.pipe()
        except OSError as error:
            raise KvReplayError(f"--transport zmq: no pipes to a process for {name}: {reason(error)}") from error
        nursery.bear(Files(their_read_fd, their_write_fd, cluster.clock_file.fileno()))
        os.close(their_read_fd)
        os.close(their_write_fd)
        self._fds = (read_fd, write_fd)
        self.pipes = FramedPipes(
            cluster.paced,
            read_fd,
            write_fd,
            lambda data: cluster.hear(self, messages.decode_from_instance(data)),
            lambda: cluster.lost(self),
        )
        self.tell(setup)

    @property
    def num_requests(self) -> int:
        return len(self._live)

    @property
    def is_settled(self) -> bool:
        """It has heard everything, and dealt with it."""
        return self.said.num_heard == self.num_told

    def tell(self, message: messages.ToInstance) -> None:
        self.num_told += 1
        self.pipes.send(messages.encode(message))

    def begin(self, request_id: str) -> None:
        self._live[request_id] = None

    def serves(self, said: messages.Serving) -> None:
        self.is_serving = said.is_serving
        if self.is_up and not said.is_up:
            # However it died, its requests are gone, and its peers' connections.
            self._live.clear()
            self._cluster.publish(messages.Directory(endpoints={}, gone=self.name), self)
        self.is_up = said.is_up

    def ended(self, request_id: str, *, has_finished: bool) -> None:
        self._live.pop(request_id, None)
        if self.on_end is not None:
            self.on_end(request_id, has_finished=has_finished)

    def command(self, command: Command) -> bool:
        """Carry out an action fault there, and wait until it is done."""
        if not self.is_up and command.verb != "restart":
            return False
        done = self._cluster.order(self, command.verb, command.arguments)
        command.victims += done.victims
        if done.ok and command.verb == "restart":
            self._came_back(command.arguments["identity"])
        return done.ok

    def _came_back(self, identity: str = NEW_IDENTITY) -> None:
        self.incarnation += 1
        if identity == NEW_IDENTITY:
            self.engine_id = addresses.engine_id_of(self.name, self.incarnation)
        self._cluster.publish(messages.Directory(endpoints=self.endpoints), self)

    def heal(self) -> None:
        """End the faults there; a process that is down comes back."""
        was_up = self.is_up
        self._cluster.order(self, "heal", {})
        if not was_up:
            self._came_back()

    def end(self) -> None:
        """Ask it to go."""
        self.tell(messages.Quit())
        self.pipes.close()
        for fd in self._fds:
            os.close(fd)


class _ProxyBus(Bus):
    """What clients send goes over a pipe."""

    def __init__(self, loop: EventLoop, network: Network, nodes: dict[str, RemoteNode]) -> None:
        super().__init__(loop, network)
        self._nodes = nodes

    def deliver(self, envelope: Envelope) -> None:
        node = self._nodes[owner_of(envelope.destination)]
        if not node.is_serving:
            self._refuse(envelope)
        elif envelope.kind == CLIENT_ABORT:
            node.tell(messages.Abort(request_id=envelope.payload))
        else:
            leg = envelope.payload
            node.begin(leg.request_id)
            node.tell(
                messages.Arrival(
                    request=leg.request,
                    request_id=leg.request_id,
                    max_tokens=leg.max_tokens,
                    priority=leg.priority,
                    params=leg.params,
                    turned_away=leg.turned_away,
                )
            )


class RemoteCluster:
    """Built for one run, as `replay.cluster.Cluster` is; `run` plays it, and ends every process whatever happens."""

    def __init__(
        self,
        settings: RunSettings,
        workload: Workload,
        sink: EventSink,
        *,
        trace: Path,
        limit: int | None,
        scale: float,
    ) -> None:
        config = overridden(settings.config, settings.plan)
        self._config = config
        self._topology = topology_of(config, workload)
        check_possible(settings.plan, self._topology)
        self.loop = EventLoop()
        self.clock_file = TemporaryFile()  # noqa: SIM115 - open as long as the cluster, and without a name
        self.clock_file.truncate(INSTANT_BYTES)
        self.paced = PacedLoop(self.loop, shared_instant(self.clock_file.fileno()))
        self._nodes: dict[str, RemoteNode] = {}
        self.bus = _ProxyBus(self.loop, LinkNetwork(config.network), self._nodes)
        told = HitsToldSink(sink, self._tell_hit)
        self.injector = Injector(settings.plan, settings.seed, told, self.loop, self.bus)
        self.sink = self.injector.sink
        self.index = ContentIndex(workload.arrivals, config.hash_block_size, config.num_hash_lookahead)
        self.roles = instance_names(config)
        self.malformed: Counter[tuple[str, str]] = Counter()
        """(instance, what) → how many messages came in that no peer sends."""
        self._settings, self._workload = settings, workload
        self._nursery: Nursery | None = None
        self._bootstrap: ExternalBootstrap | None = None
        self._setup: dict[str, Any] = {
            "trace": str(trace.absolute()),
            "limit": limit,
            "profile": settings.behaviour.profile,
            "switches": dict(settings.behaviour.switches),
            "recompute": settings.recompute,
            "faults": [fault.spec for fault in settings.plan],
            "seed": settings.seed,
            "detail": sink.detail,
            "endpoints": self._start_external_bootstrap(),
        }
        last_ns = max((arrival.time_ns for arrival in workload.arrivals), default=0)
        phase_s = (last_ns + _TIMERS * path_timers_ns(config)) / NS_PER_S + 3600
        self._bound_s = _MARGIN_S + phase_s / scale + _REQUEST_S * len(workload.arrivals)
        self._scale = scale
        self._pace = Pace(scale)
        self._ledger = Ledger()
        self._specs = [fault.spec for fault in settings.plan]
        self._num_orders = 0
        self._is_ending = False
        self._failure: str | None = None
        self._heard_s = monotonic()

    def run(self, watch: Watch | None = None) -> None:
        """Both phases, as in virtual time, each no longer than its timers and the number of its requests allow."""
        try:
            self._start()
            self._play(watch)
            self._order_all("report-stalls")
            self.injector.heal()
            for node in self._nodes.values():
                node.heal()
            self._play(watch, self.paced.clock_ns + HEAL_BOUND_NS)
            self._order_all("close-accounts")
        finally:
            self._end()

    @property
    def end_ns(self) -> int:
        """Nothing has happened later."""
        accounts = [node.account for node in self._nodes.values() if node.account is not None]
        return max([self.loop.now_ns, *(account.end_ns for account in accounts)])

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(
            f"{instance}: {plural(count, 'message')} came in that no peer sends ({what})"
            for (instance, what), count in sorted(self.malformed.items())
        )

    def statistics(self) -> list[FaultStatistics]:
        """Of the plan's faults: what fired here, and in every process."""
        accounts = [node.account for node in self._nodes.values() if node.account is not None]
        return [
            FaultStatistics(
                own.spec,
                own.fired + sum(account.fired[place] for account in accounts),
                sorted({*own.requests, *(name for account in accounts for name in account.requests[place])}),
            )
            for place, own in enumerate(self.injector.statistics())
        ]

    def _start_external_bootstrap(self) -> dict[str, str]:
        """Where it listens, if the run has one."""
        address = self._config.connector.mooncake.bootstrap_server_address
        if address is None:
            return {}
        replaces = self._settings.behaviour["mooncake_registration"] == "replace"
        self._bootstrap = ExternalBootstrap(self.paced, replaces=replaces)
        return {addresses.bootstrap_address(address.rpartition(":")[0]): self._bootstrap.endpoint}

    # -- life ---------------------------------------------------------------------------------------------

    def _start(self) -> None:
        nursery = self._nursery = Nursery()
        for name, role in self.roles.items():
            own = overridden(self._config, self._settings.plan, name)
            setup = messages.Setup(name=name, config=own.to_json(), **self._setup)
            node = self._nodes[name] = RemoteNode(name, role, setup, self, nursery)
            self.bus.control(name, node.command)
        servers = list(self._nodes.values())
        topology = self._config.topology
        self.proxy = Proxy(
            self._workload,
            servers,
            topology,
            self.bus,
            self.sink,
            self.injector.rewrite_params,
            partial(bootstrap_url_of, self._config),
            aborts_both=self._settings.behaviour["proxy_abort"] == "both",
            cancels=self._settings.behaviour["proxy_failed_prefill"] == "cancel",
            in_turn=self._settings.behaviour["proxy_legs"] == "in-turn",
        )
        self._wait(lambda: all(node.is_ready for node in self._nodes.values()), _START_S, "to start")
        for node in self._nodes.values():
            self.publish(messages.Directory(endpoints=node.endpoints), node)
        self._wait(self._get_ready, _START_S, "to register")
        self._pace = Pace(self._scale)
        self.injector.arm(self._topology)
        self.proxy.start()

    def _end(self) -> None:
        self._is_ending = True
        if self._bootstrap is not None:
            self._bootstrap.close()
        for node in self._nodes.values():
            node.end()
        if self._nursery is not None:
            self._nursery.close()
        self.clock_file.close()

    def _get_ready(self) -> bool:
        """Let one more thing happen that has to before a run can begin; whether there is none left."""
        if not self._is_settled():
            return False
        node, (time_ns, rank) = self._next()
        if time_ns > 0:
            return True
        self._take_turn(node, time_ns, rank)
        return False

    def _play(self, watch: Watch | None, until_ns: int = FOREVER_NS) -> None:
        """Until nothing but daemons is left anywhere, and nothing is on its way; or all of the rest is later."""
        end_s = monotonic() + self._bound_s
        self._heard_s = monotonic()
        while True:
            if not self._is_settled():
                self._listen(_MAX_WAIT_S)
            elif self._is_quiet or self._next()[1][0] > until_ns:
                return
            else:
                self._go_on()
            if monotonic() > end_s:
                raise KvReplayError(f"--transport zmq: not over after {self._bound_s:.0f} s, the longest it may take")
            if watch is not None:
                watch(self.proxy.num_ended, self._reported_ns())

    @property
    def _is_quiet(self) -> bool:
        return not self.loop.num_live and all(node.said.is_quiet for node in self._nodes.values())

    def _reported_ns(self) -> int:
        """No event of before is still to come."""
        return min([self.paced.clock_ns, *(node.said.unreported_from_ns for node in self._nodes.values())])

    def _is_settled(self) -> bool:
        """Whatever has happened up to now has had all its effects."""
        if not all(node.is_settled for node in self._nodes.values()):
            return False
        told = self._bootstrap.traffic.tell() if self._bootstrap is not None else None
        if told is not None:
            self._ledger.hear(told)
        if not self._ledger.is_even and monotonic() - self._heard_s > _LOST_S:
            self._ledger.give_up()
        return self._ledger.is_even

    def _go_on(self) -> None:
        """Let the next thing happen, when its time has come."""
        node, (next_ns, rank) = self._next()
        wait_s = self._pace.seconds_until(next_ns)
        if wait_s > 0:
            self._listen(min(wait_s, _MAX_WAIT_S))
        else:
            self._take_turn(node, next_ns, rank)

    def _next(self) -> tuple[RemoteNode | None, tuple[int, int]]:
        """Whose turn is next, None for what is here; and (time, rank) of what happens then.

        Clients and action faults come first, as in virtual time, where all of them were set before the run began.
        """
        node, due = None, self.loop.peek()
        for other in self._nodes.values():
            others = (self.paced.clock_ns, 0) if other.said.has_kept else other.said.next_due
            if others < due:
                node, due = other, others
        return node, due

    def _take_turn(self, node: RemoteNode | None, time_ns: int, rank: int) -> None:
        self.paced.grant(time_ns, rank)
        if node is not None:
            node.tell(messages.Grant(rank=rank))
        while node is None and self.paced.is_due:
            self.paced.run_due()

    def _listen(self, max_wait_s: float) -> None:
        self.paced.listen(max_wait_s)
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def _wait(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        end_s = monotonic() + limit_s
        while not condition():
            if monotonic() > end_s:
                raise KvReplayError(f"--transport zmq: the instances' processes took more than {limit_s:.0f} s {what}")
            self._listen(_MAX_WAIT_S)

    # -- orders -------------------------------------------------------------------------------------------

    def order(self, node: RemoteNode, verb: str, arguments: dict[str, Any]) -> messages.Done:
        """Have something done there; whatever else comes in meanwhile waits for the loop, but for what is written."""
        self._num_orders += 1
        number = self._num_orders
        node.tell(messages.Order(number=number, verb=verb, arguments=arguments))
        end_s = monotonic() + _ANSWER_S
        while number not in node.done:
            if monotonic() > end_s:
                raise KvReplayError(f"--transport zmq: {node.name} has not carried out {verb} in {_ANSWER_S:.0f} s")
            self.paced.listen(_MAX_WAIT_S)
            if self._failure is not None:
                raise RuntimeError(self._failure)
        return node.done.pop(number)

    def _order_all(self, verb: str) -> None:
        for node in self._nodes.values():
            self.order(node, verb, {})

    def publish(self, message: messages.Directory, of: RemoteNode) -> None:
        for node in self._nodes.values():
            if node is not of:
                node.tell(message)

    # -- what the processes say ---------------------------------------------------------------------------

    def hear(self, node: RemoteNode, message: messages.FromInstance) -> None:
        match message:
            case messages.Ready():
                node.is_ready = True
            case messages.Listening():
                node.endpoints = message.endpoints
                for endpoint in message.endpoints.values():
                    self._ledger.listens(endpoint)
            case messages.Serving():
                node.serves(message)
            case messages.Happened():
                self._take_events(node, message.events)
            case messages.Ended():
                node.ended(message.request_id, has_finished=message.has_finished)
            case messages.Settled():
                self._heard_s = monotonic()
                node.said = message
                if message.told is not None:
                    self._ledger.hear(message.told)
            case messages.Done():
                node.done[message.number] = message
            case messages.Question():
                hits = self.injector.decide(message.place, message.conversation)
                node.tell(messages.Decision(number=message.number, hits=hits))
            case messages.Account():
                node.account = message
                self.malformed.update({(node.name, what): count for what, count in message.malformed.items()})
            case messages.Failed():
                self._failure = f"{node.name}: {message.traceback}"

    def lost(self, node: RemoteNode) -> None:
        if not self._is_ending and self._failure is None:
            self._failure = f"the process of {node.name} has ended unasked"

    def _take_events(self, node: RemoteNode, events: Sequence[Event]) -> None:
        seen: list[Event] = []
        kinds = self.injector.observed_kinds
        for event in events:
            cause = event.cause_handle
            if cause is not None:
                event = event._replace(cause_handle=handle_there(cause, node.handles))
            handle = self.sink.emit(event)
            node.handles.append(handle)
            if event.kind == "fault.injected":
                self._note_fault(event, handle)
            if event.kind in kinds:
                seen.append(event._replace(cause_handle=None))
        if seen:
            for other in self._nodes.values():
                if other is not node:
                    other.tell(messages.Seen(events=seen))

    def _tell_hit(self, event: Event, handle: int) -> None:
        if event.cause in self._specs:
            place = self._specs.index(event.cause)
            instances = [name for name in (event.instance, event.peer) if name is not None]
            hit = messages.Hit(place=place, handle=handle, request_id=event.request_id, instances=instances)
            for node in self._nodes.values():
                node.tell(hit)

    def _note_fault(self, event: Event, handle: int) -> None:
        if event.cause in self._specs:
            place = self._specs.index(event.cause)
            self.injector.blame.note(place, handle, event.request_id, (event.instance, event.peer))
