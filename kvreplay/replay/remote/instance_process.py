"""One instance in a process of its own (`remote.nursery`), under a supervisor: when its pipe ends, so does it."""

import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from kvreplay.behaviour import Behaviour
from kvreplay.connectors.mooncake.rank_group import RankGroup
from kvreplay.connectors.mooncake.socket_bus import SocketBus
from kvreplay.connectors.mooncake.worker import MooncakeWorker
from kvreplay.connectors.mooncake.write_frames import TargetMemory
from kvreplay.events import Event
from kvreplay.faults.injector import Injector
from kvreplay.faults.plan import make_plan
from kvreplay.ids import NS_PER_S
from kvreplay.kv.content_index import ContentIndex
from kvreplay.replay.cluster import SAMPLE_NS, topology_of
from kvreplay.replay.config_load import config_from_json
from kvreplay.replay.ends import Ends
from kvreplay.replay.findings import LiveFindings
from kvreplay.replay.network import LinkNetwork
from kvreplay.replay.node import Leg, Node, Surroundings, instance_names, num_pool_blocks, tier_names
from kvreplay.replay.remote import messages
from kvreplay.replay.remote.shared_blame import SharedBlame
from kvreplay.sim.envelope import CLIENT_ABORT, CLIENT_ARRIVAL, Command, Envelope
from kvreplay.sim.event_loop import EventLoop
from kvreplay.trace.reader import read_trace
from kvreplay.trace.workload import read_workload
from kvreplay.transport.paced import Instant, PacedLoop
from kvreplay.transport.pipes import FramedPipes

_MAX_WAIT_S = 0.2
_TIDY_NS: Final = NS_PER_S
"""How often sockets of pulls that are over are looked for, in real seconds."""


class _PipeSink:
    """An `EventSink` whose handles count the events of this process."""

    def __init__(self, detail: int) -> None:
        self.detail = detail
        self.unsent: list[Event] = []
        self._num_events = 0

    def emit(self, event: Event) -> int:
        self.unsent.append(event)
        self._num_events += 1
        return self._num_events - 1


class InstanceProcess:
    """The instance, its half of the bus, and the faults that act there."""

    def __init__(self, setup: messages.Setup, loop: EventLoop, paced: PacedLoop, pipes: FramedPipes) -> None:
        config = config_from_json(setup.config)
        behaviour = Behaviour(setup.profile, setup.switches)
        workload = read_workload(read_trace(Path(setup.trace)), setup.limit)
        self._loop, self._paced, self._pipes = loop, paced, pipes
        self._sink = _PipeSink(setup.detail)
        self.bus = SocketBus(
            setup.name,
            paced,
            announce=self._announce,
            is_open=self._is_open,
            find_target=self._find_target,
            tells_of_gone_peers=behaviour["pull_wait"] == "bounded",
            network=LinkNetwork(config.network),
        )
        self.bus.update_directory(setup.endpoints)
        plan = make_plan(setup.faults)
        self.injector = Injector(plan, setup.seed, self._sink, loop, self.bus)
        sink = self.injector.sink
        index = ContentIndex(workload.arrivals, config.hash_block_size, config.num_hash_lookahead)
        self._blame = blame = SharedBlame(plan, self.injector.blame)
        findings = LiveFindings(loop, sink, blame.of_request, blame.lasting_at)
        surroundings = Surroundings(
            config=config,
            behaviour=behaviour,
            recompute=setup.recompute,
            bus=self.bus,
            sink=sink,
            index=index,
            findings=findings,
            death_at_start=partial(self.injector.death_at_start, topology_of(config, workload).instances),
            sharding=config.sharding,
            tier_names=tier_names(index, workload.arrivals, behaviour),
            seed=setup.seed,
        )
        roles = instance_names(config)
        rank = list(roles).index(setup.name) + 1
        self._num_blocks = num_pool_blocks(config.role(roles[setup.name]).cache, behaviour)
        self._node: Node | None = None
        self._node = self.node = Node(setup.name, roles[setup.name], rank, surroundings)
        self._serving: messages.Serving | None = None
        """What was last said of it."""
        self.node.on_end = self._ended
        self._ends = Ends([self.node], loop, sink, blame, findings)
        self.injector.count_elsewhere(self._ask)
        self.injector.arm_messages()
        self._said: messages.Settled | None = None
        self._num_heard = 1  # the set-up
        self._num_questions = 0
        self._tidy_at_ns = 0
        self._decisions: dict[int, bool] = {}
        self.is_over = False
        self._sample_later()

    # -- what the bus asks --------------------------------------------------------------------------------

    def _announce(self, endpoints: Mapping[str, str]) -> None:
        self._say(messages.Listening(endpoints=dict(endpoints)))

    def _workers(self) -> list[MooncakeWorker]:
        worker = self._node.worker if self._node is not None else None
        if isinstance(worker, RankGroup):
            return list(worker.workers)
        return [worker] if isinstance(worker, MooncakeWorker) else []

    def _is_open(self, source: str, conversation: str, attempt: int) -> bool:
        return any(
            worker.consumer is not None and worker.consumer.is_open(conversation, attempt)
            for worker in self._workers()
            if worker.identity.address == source
        )

    def _find_target(self, address: str) -> TargetMemory | None:
        for worker in self._workers():
            if worker.identity.memory_address == address:
                return TargetMemory(worker.memory.contents, worker.memory.layout.regions, self._num_blocks)
        return None

    # -- the supervisor -----------------------------------------------------------------------------------

    def _say(self, message: messages.FromInstance) -> None:
        self._pipes.send(messages.encode(message))

    def hear(self, message: messages.ToInstance) -> None:
        self._num_heard += 1
        match message:
            case messages.Grant():
                self._paced.take_turn(message.rank)
            case messages.Directory():
                self.bus.update_directory(message.endpoints, message.gone)
            case messages.Arrival():
                leg = Leg(
                    message.request,
                    message.request_id,
                    message.max_tokens,
                    message.priority,
                    message.params,
                    turned_away=message.turned_away,
                )
                self._take(CLIENT_ARRIVAL, leg, message.request_id)
            case messages.Abort():
                self._take(CLIENT_ABORT, message.request_id, message.request_id)
            case messages.Seen():
                for event in message.events:
                    self.injector.observe(event)
            case messages.Hit():
                self._blame.note(message.place, message.handle, message.request_id, message.instances)
            case messages.Order():
                self._carry_out(message)
            case messages.Decision():
                self._decisions[message.number] = message.hits
            case messages.Quit():
                self.is_over = True

    def _ask(self, place: int, conversation: str) -> bool:
        """Wait for the supervisor's word. What else comes meanwhile is for later, if it is for an action."""
        self._num_questions += 1
        number = self._num_questions
        self._say(messages.Question(number=number, place=place, conversation=conversation))
        while number not in self._decisions and not self.is_over and not self._pipes.is_closed:
            self._paced.listen(_MAX_WAIT_S)
        return self._decisions.pop(number, False)

    def _take(self, kind: str, payload: object, request_id: str) -> None:
        address = self.node.api_address
        envelope = Envelope(kind=kind, source="proxy", destination=address, payload=payload, request_ids=(request_id,))

        def take() -> None:
            # What comes too late for an instance that has died is lost with it.
            if self.node.is_up:
                self.bus.deliver(envelope)

        self._paced.arrive(take)

    def _carry_out(self, order: messages.Order) -> None:
        command = Command(order.verb, order.arguments)
        match order.verb:
            case "report-stalls":
                self._ends.report_stalls()
                ok = True
            case "heal":
                self.injector.heal()
                self.node.restart()
                ok = True
            case "close-accounts":
                self._ends.close_accounts()
                self._flush()
                self._say(self._account())
                ok = True
            case _:
                ok = self.node.command(command)
        self._flush()
        self._say_serving()
        self._say(messages.Done(number=order.number, ok=ok, victims=command.victims))

    def _account(self) -> messages.Account:
        statistics = self.injector.statistics()
        return messages.Account(
            end_ns=self._loop.now_ns,
            fired=[fault.fired for fault in statistics],
            requests=[fault.requests for fault in statistics],
            malformed=dict(self.bus.malformed),
        )

    def _ended(self, request_id: str, *, has_finished: bool) -> None:
        self._say(messages.Ended(request_id=request_id, has_finished=has_finished))

    # -- the loop -----------------------------------------------------------------------------------------

    def turn(self) -> None:
        self._paced.run_due()
        if self._loop.now_ns >= self._tidy_at_ns:
            self._tidy_at_ns = self._loop.now_ns + _TIDY_NS
            self.bus.tidy()
        self._flush()
        self._say_serving()
        if self._paced.is_due:
            self._paced.listen(0.0)
        else:
            self._say_settled()
            self._paced.listen(_MAX_WAIT_S)

    def _say_serving(self) -> None:
        node = self.node
        serving = messages.Serving(is_up=node.is_up, is_serving=self.bus.hears(node.api_address))
        if serving != self._serving:
            self._serving = serving
            self._say(serving)

    def _say_settled(self) -> None:
        told = self.bus.traffic.tell()
        has_kept = self._paced.has_kept
        settled = messages.Settled(
            is_quiet=not self._loop.num_live and not has_kept,
            has_kept=has_kept,
            next_due=self._loop.peek(),
            num_heard=self._num_heard,
            told=told,
            unreported_from_ns=self.node.instance.unreported_from_ns,
        )
        if told is not None or settled != self._said:
            self._said = msgspec.structs.replace(settled, told=None)
            self._say(settled)

    def _flush(self) -> None:
        if self._sink.unsent:
            self._say(messages.Happened(events=self._sink.unsent))
            self._sink.unsent = []

    def _sample_later(self) -> None:
        self._loop.call_later(SAMPLE_NS, self._sample, daemon=True)

    def _sample(self) -> None:
        self._ends.sample()
        self._sample_later()


class Child:
    """The process: made before anything is known, and gone when its supervisor is."""

    def __init__(self, read_fd: int, write_fd: int, clock: Instant) -> None:
        self._loop = EventLoop()
        self._instance: InstanceProcess | None = None
        self._is_orphan = False
        self._pipes: FramedPipes
        self._paced: PacedLoop
        self._fds = (read_fd, write_fd)
        self._clock = clock

    def run(self) -> int:
        self._paced = PacedLoop(self._loop, self._clock, takes_turns=True)
        self._pipes = FramedPipes(self._paced, *self._fds, self._hear, self._orphan)
        try:
            while not self._is_over:
                if self._instance is None:
                    self._paced.turn(1.0)
                else:
                    self._instance.turn()
            self._send_the_rest()
        except Exception:
            self._pipes.send(messages.encode(messages.Failed(traceback=traceback.format_exc())))
            self._send_the_rest()
            return 1
        finally:
            if self._instance is not None:
                self._instance.bus.close()
        return 0

    def _send_the_rest(self) -> None:
        """Until the supervisor has read it, or is gone. Nothing else happens here any more."""
        while self._pipes.has_unsent and not self._is_orphan:
            self._paced.listen(0.1)

    @property
    def _is_over(self) -> bool:
        return self._is_orphan or (self._instance is not None and self._instance.is_over)

    def _orphan(self) -> None:
        self._is_orphan = True

    def _hear(self, data: bytes) -> None:
        message = messages.decode_to_instance(data)
        if isinstance(message, messages.Setup):
            self._instance = InstanceProcess(message, self._loop, self._paced, self._pipes)
            self._pipes.send(messages.encode(messages.Ready()))
        else:
            assert self._instance is not None
            self._instance.hear(message)
