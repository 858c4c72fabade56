"""Plays a Mooncake scenario with our connector, and records the transcript."""

from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any, Final

import msgspec

from kvreplay.behaviour import profile
from kvreplay.conformance.mooncake_engine import ScriptedEngine
from kvreplay.conformance.mooncake_front import BootstrapFront
from kvreplay.conformance.mooncake_memory import page_bytes
from kvreplay.conformance.mooncake_scenario import SIDES, Scenario
from kvreplay.conformance.mooncake_side import Conditions, Side
from kvreplay.conformance.mooncake_transcript import Transcript
from kvreplay.conformance.mooncake_wire import Proxy, Rules, SteadyNetwork
from kvreplay.conformance.mooncake_world import WIRE, SocketWorld, VirtualWorld, World
from kvreplay.conformance.vector import Json
from kvreplay.connectors.mooncake.identity import WorkerIdentity
from kvreplay.connectors.mooncake.structs import STRAY_FRAMES
from kvreplay.errors import ConfigError, EngineFatal
from kvreplay.ids import NS_PER_MS, nanoseconds
from kvreplay.sim.envelope import Envelope

_POLL_NS: Final = 10 * NS_PER_MS
_POKE_NS: Final = 100 * NS_PER_MS


@dataclass(slots=True)
class Played:
    """A transcript: what was there at the start, what happened, and what was left."""

    head: dict[str, Json]
    transcript: Transcript
    final: dict[str, Json]


class Driver:
    """`over`: the transport, `virtual` or `zmq`."""

    def __init__(self, scenario: Scenario, conditions: Conditions, over: str) -> None:
        self.scenario = scenario
        self.sides: dict[str, Side] = {}
        network = SteadyNetwork(conditions.timing)
        self._world: World = (
            VirtualWorld(network) if over == "virtual" else SocketWorld(network, lambda kind: self.sides[kind].workers)
        )
        self.loop = self._world.loop
        self.transcript = Transcript(self.loop)
        self._env = scenario.env
        self._timing = conditions.timing
        self._reads_both = conditions.reads_both
        self._wire = self._world.bus_of(WIRE)
        transit_ns = 0 if self._world.holds_writes else conditions.timing.transit_ns
        self._engine = ScriptedEngine(
            scenario.engine, self.transcript, transit_ns, self._poke_memory, self._owner_of_memory
        )
        for kind in SIDES:
            self._world.bus_of(kind).interceptor = self._engine
        registrations = count()
        self.sides = {
            kind: Side(
                kind,
                scenario,
                self._world.bus_of(kind),
                self.transcript,
                self._engine,
                profile("vllm-0.33"),
                lambda: next(registrations),
                self._run_until,
                conditions,
            )
            for kind in SIDES
        }

    def play(self) -> Played:
        try:
            if self._start():
                for action in self.scenario.actions:
                    self._act(action)
            return Played(self._head(), self.transcript, self._final())
        finally:
            self._world.close()

    # -- start-up ---------------------------------------------------------------------------------------------

    def _start(self) -> bool:
        producer, consumer = self.sides["P"], self.sides["D"]
        producer.guard("startup", producer.start)
        try:
            consumer.start()
        except EngineFatal as death:
            self.transcript.add("crash", side="?", where="setup", type=death.exception, msg=death.message)
            return False
        rules = Rules(self.scenario.wire)
        for worker in producer.workers:
            Proxy(
                worker.name,
                worker.connector.identity.address,
                rules,
                self._wire,
                self.transcript,
                replace(self._timing, repeat_ns=0) if worker.name in self._reads_both else self._timing,
                self._is_open,
                late_s=self.scenario.late_bind_s,
            )
        BootstrapFront(self.scenario.bootstrap, producer.server, self._wire, self.transcript)
        # The lines of a start-up that went well are the same everywhere.
        events = self.transcript.events
        events[:] = [event for event in events if event["lane"] != "log" or event["lvl"] not in ("INFO", "DEBUG")]
        return True

    def _is_open(self, pull: Envelope) -> bool:
        asked = self._world.as_asked(pull)
        for worker in chain(self.sides["D"].workers, self.sides["P"].workers):  # one with both roles may pull, too
            consumer = worker.connector.consumer
            if asked is not None and worker.connector.identity.address == asked.source and consumer is not None:
                return consumer.is_open(asked.conversation, asked.attempt)
        return False

    def _poke_memory(self, address: int, value: int) -> None:
        for worker in self.sides["D"].workers:
            if worker.memory.has(address):
                worker.memory.poke(address, value)

    def _owner_of_memory(self, address: int) -> WorkerIdentity | None:
        workers = (worker for worker in self.sides["D"].workers if worker.memory.has(address))
        return next((worker.connector.identity for worker in workers), None)

    # -- time -------------------------------------------------------------------------------------------------

    def _run_until(self, time_ns: int) -> None:
        self._world.run_until(time_ns, self._watch)

    def _watch(self) -> None:
        self.sides["P"].watch_entries()

    def _run_for(self, duration_s: float) -> None:
        self._run_until(self.loop.now_ns + nanoseconds(duration_s))

    # -- actions ----------------------------------------------------------------------------------------------

    def _act(self, action: Any) -> None:  # noqa: ANN401 - JSON
        operation, *arguments = action
        perform = getattr(self, f"_do_{operation}", None)
        if perform is None:
            raise ConfigError(f"scenario: unknown action {operation!r}")
        self.transcript.add("act", do=action)
        try:
            perform(*arguments)
        except TypeError as error:
            raise ConfigError(f"scenario: action {operation!r}: {error}") from error
        self._watch()

    def _do_p_alloc(self, request_id: str, blocks: Any = (), num_local: int = 0) -> None:  # noqa: ANN401
        side = self._side_of(request_id)
        side.guard("alloc", lambda: side.allocate(request_id, blocks, num_local))

    _do_d_alloc = _do_p_alloc

    def _do_p_finish(self, request_id: str, status: str, blocks: Any = ()) -> None:  # noqa: ANN401
        side = self._side_of(request_id)
        side.guard("request_finished", lambda: side.finish(request_id, status, blocks))

    _do_d_finish = _do_p_finish

    def _do_add(self, request_id: str) -> None:
        side = self._side_of(request_id)
        half = side.scheduled
        if half is None:
            raise ConfigError("scenario: 'add' needs mode 'sched'")
        side.guard("add_request", lambda: half.add(side.request(request_id)))

    def _do_abort(self, *request_ids: str) -> None:
        side = self._side_of(request_ids[0])
        half = side.scheduled
        if half is None:
            raise ConfigError("scenario: 'abort' needs mode 'sched'")
        side.guard("finish_requests", lambda: half.abort(list(request_ids)))
        if side.crashed is None:
            half.note_state({})

    def _do_step(self, kind: str, times: int = 1) -> None:
        for _ in range(times):
            self.sides[kind].step()

    def _do_run(self, duration_s: float, options: Any = None) -> None:  # noqa: ANN401
        options = options or {}
        until = options.get("until", [])
        conditions = [until] if isinstance(until, str) else until
        end_ns = self.loop.now_ns + nanoseconds(duration_s)
        met = False
        while self.loop.now_ns < end_ns:
            for kind in options.get("sides", "PD"):
                self.sides[kind].step()
            met = bool(conditions) and all(map(self.transcript.holds, conditions))
            if met:
                break
            self._run_until(self.loop.now_ns + _POLL_NS)
        if conditions:
            missing = {} if met else {"missing": [name for name in conditions if not self.transcript.holds(name)]}
            self.transcript.add("until", met=met, **missing)

    def _do_sleep(self, duration_s: float) -> None:
        self._run_for(duration_s)

    def _do_env(self, changes: Any) -> None:  # noqa: ANN401
        self._env = msgspec.structs.replace(self._env, **changes)
        for side in self.sides.values():
            side.configure(self._env)

    def _do_poke(self, frames: Any) -> None:  # noqa: ANN401
        """A stranger sends these frames to the first producer worker's socket."""
        self._wire.post(
            Envelope(
                kind=STRAY_FRAMES,
                source="stranger",
                destination=self.sides["P"].workers[0].connector.identity.address,
                payload=tuple(bytes.fromhex(frame) for frame in frames),
                conversation="stray",
            )
        )
        self._run_until(self.loop.now_ns + _POKE_NS)

    def _do_forget_layout(self) -> None:
        for producer in self.sides["P"].producers.values():
            producer.layouts.forget()

    def _do_block_loop(self, duration_s: float) -> None:
        for worker in self.sides["P"].workers:
            worker.connector.stall_sender(nanoseconds(duration_s))

    def _do_expire_now(self, *transfer_ids: str) -> None:
        for producer in self.sides["P"].producers.values():
            producer.expire_now(transfer_ids)

    def _do_dead(self, kind: str, rank: int) -> None:
        self.sides[kind].dead_ranks.add(rank)

    def _do_mem(self) -> None:
        self.transcript.add("mem", D=self.sides["D"].memory())

    def _side_of(self, request_id: str) -> Side:
        return self.sides[self.scenario.side_of(request_id)]

    # -- results ----------------------------------------------------------------------------------------------

    def _head(self) -> dict[str, Json]:
        sides = self.sides.values()
        workers = [worker for side in sides for worker in side.workers]
        return {
            "bases": {
                worker.name: {tensor.name: tensor.base_addr for tensor in worker.memory.tensors} for worker in workers
            },
            "page_bytes": {side.kind: page_bytes(side.spec) for side in sides},
            "layout_id": {worker.name: worker.layout_id for worker in workers},
        }

    def _final(self) -> dict[str, Json]:
        producer, consumer = self.sides["P"], self.sides["D"]
        final: dict[str, Json] = {}
        if producer.workers:
            producers = producer.producers
            final["P_entries"] = producer.look_at_entries()
            final["P_tasks"] = {name: half.tasks() for name, half in producers.items()}
            final["P_layout_cache"] = {name: len(half.layouts) for name, half in producers.items()}
        consumers = {
            worker.name: worker.connector.consumer
            for worker in consumer.workers
            if worker.connector.consumer is not None
        }
        if consumers:
            final["D_known_engines"] = {name: half.known_engines for name, half in consumers.items()}
            final["D_tasks"] = {name: half.tasks() for name, half in consumers.items()}
            final["D_acked_layout"] = {name: half.acked_layout_peers for name, half in consumers.items()}
            final["D_mem"] = consumer.memory()
        for side in (producer, consumer):
            if side.scheduled is not None and side.crashed is None:
                final[f"{side.kind}_sched"] = side.scheduled.final()
            if side.crashed is not None:
                final[f"{side.kind}_crashed"] = side.crashed
        return final


def play(scenario: Scenario, conditions: Conditions, over: str = "virtual") -> Played:
    return Driver(scenario, conditions, over).play()
