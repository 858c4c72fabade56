"""One side of a scenario: its workers on the bus, and its scheduler, whole or played by the scenario."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvreplay.behaviour import Behaviour
from kvreplay.conformance.mooncake_engine import ScriptedEngine
from kvreplay.conformance.mooncake_front import RegisteredServer
from kvreplay.conformance.mooncake_memory import ByteMemory, layer_names, layout_of, make_tensors
from kvreplay.conformance.mooncake_scenario import NUM_KV_HEADS, ROLES, Env, Scenario
from kvreplay.conformance.mooncake_scheduled import ScheduledHalf
from kvreplay.conformance.mooncake_shown import shown_entries, shown_metadata, shown_output, state_of
from kvreplay.conformance.mooncake_transcript import Transcript, worker_log
from kvreplay.conformance.mooncake_wire import REAL, Timing
from kvreplay.conformance.vector import Json
from kvreplay.connectors.mooncake.bootstrap import BootstrapServer
from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.connectors.mooncake.identity import WorkerIdentity
from kvreplay.connectors.mooncake.plan import HeadLayout
from kvreplay.connectors.mooncake.producer import Producer
from kvreplay.connectors.mooncake.ranks import Ranks
from kvreplay.connectors.mooncake.registration import Registration
from kvreplay.connectors.mooncake.scheduler import MooncakeScheduler
from kvreplay.connectors.mooncake.structs import MooncakeConnectorMetadata, RegisterWorkerPayload
from kvreplay.connectors.mooncake.worker import MooncakeWorker, RegisteredMemory
from kvreplay.engine.aggregator import KVOutputAggregator
from kvreplay.engine.connector import KVConnectorOutput
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.errors import EngineFatal
from kvreplay.events import DETAIL_RUN, Event
from kvreplay.ids import NS_PER_MS
from kvreplay.kv.content_index import TokenIndex
from kvreplay.sim.bus import Bus
from kvreplay.transport.virtual import VirtualDriver

HOST: Final = "127.0.0.1"
STATUSES: Final = {
    "length": RequestStatus.FINISHED_LENGTH_CAPPED,
    "stopped": RequestStatus.FINISHED_STOPPED,
    "abort": RequestStatus.FINISHED_ABORTED,
    "error": RequestStatus.FINISHED_ERROR,
}
_FIRST_PORTS: Final = {"P": 17001, "D": 17101}
_GROUP_KINDS: Final = {"full": "full", "swa": "sliding_window", "mla": "full", "mamba": "mamba"}


class NoEvents:
    """Keeps nothing: the transcript is the record."""

    detail = DETAIL_RUN

    def emit(self, event: Event) -> int:
        return -1


class ScriptedBlocks:
    """A request's blocks, as the scenario gives them (`engine.connector.RequestBlocks`)."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = tuple(list(group) for group in groups)

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self._groups

    def get_unhashed_block_ids_all_groups(self) -> tuple[list[int], ...]:
        return self._groups


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a recording leaves open."""

    timing: Timing = field(default_factory=Timing)
    drop_order: tuple[int, ...] = ()
    """In which order the transfers that are dropped in one step are gone through."""
    joint: frozenset[tuple[str, str]] = frozenset()
    """(worker, request) whose completion comes in one poll with a failure. Others' comes in the next one."""
    reverses_polls: bool = False
    """Whether requests that a poll reports together are gone through from the last to the first: vLLM has sets."""
    reads_both: frozenset[str] = frozenset()
    """Producer workers that have read a pull and its duplicate in one turn of their loop."""


@dataclass(frozen=True, slots=True)
class Group:
    """A KV cache group as the connector sees it (`connectors.mooncake.scheduler.TransferGroup`)."""

    kind: str
    block_size: int
    sliding_window: int | None
    prefix_replay_tokens: int = 0
    drafter_only: bool = False


@dataclass(slots=True)
class Worker:
    name: str
    index: int
    connector: MooncakeWorker
    memory: ByteMemory
    layout_id: int
    put_off: list[str] = field(default_factory=list)
    """Completions that come with the next poll."""


@dataclass(slots=True)
class Polled:
    """What one worker brings home from one step: its report, and its statistics as the transcript shows them."""

    output: KVConnectorOutput
    shown: dict[str, Json] = field(default_factory=dict)


class Side:
    """An engine. `registrations` numbers the registrations of memory in the whole run."""

    def __init__(
        self,
        kind: str,
        scenario: Scenario,
        bus: Bus,
        transcript: Transcript,
        engine: ScriptedEngine,
        behaviour: Behaviour,
        registrations: Callable[[], int],
        run_until: Callable[[int], None],
        conditions: Conditions,
    ) -> None:
        self.kind = kind
        self.scenario = scenario
        self.spec = scenario.sides[kind]
        self.role = self.spec.role or ROLES[kind]
        self.engine_id = self.spec.engine_id or f"{kind}-engine"
        self.crashed: str | None = None
        self.workers: list[Worker] = []
        self.server: BootstrapServer | None = None
        self.dead_ranks: set[int] = set()
        self.requests: dict[str, Request] = {}
        self._bus = bus
        self._transcript = transcript
        self._engine = engine
        self._behaviour = behaviour
        self._registrations = registrations
        self._run_until = run_until
        self._conditions = conditions
        self._config = config_of(scenario.env, self.spec.num_workers)
        self._log = worker_log(transcript, kind, both_roles=False, debug=scenario.debug)
        self._aggregator = KVOutputAggregator(self.spec.tp * self.spec.pp)
        self._last_entries: Json = None
        self._index = TokenIndex(self.spec.block_size)
        self.groups = [
            Group(_GROUP_KINDS[group.type], group.block_size or self.spec.block_size, group.sliding_window)
            for group in self.spec.groups
        ]
        self.connector = MooncakeScheduler(self.role, self.groups, behaviour, self._log)
        self.scheduled = ScheduledHalf(self, transcript) if scenario.is_scheduled else None

    # -- start-up ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bring up every worker. Raises EngineFatal if one does not come up."""
        for tp_rank in range(self.spec.tp):
            for pp_rank in range(self.spec.pp):
                self._start_worker(tp_rank, pp_rank)

    def _start_worker(self, tp_rank: int, pp_rank: int) -> None:
        spec = self.spec
        index = tp_rank * spec.pp + pp_rank
        name = f"{self.kind}{tp_rank}" + (f".{pp_rank}" if spec.pp > 1 else "")
        transcript = self._transcript
        transcript.add("engine", who=name, call="initialize", args=[HOST, "P2PHANDSHAKE", "rdma", ""])
        if self._engine.start_up_result(name, "initialize"):
            raise EngineFatal("RuntimeError", "Mooncake Transfer Engine initialization failed.")
        if index == 0:
            self._start_server()
        tensors = make_tensors(self.kind, spec, index, pp_rank)
        layout = layout_of(tensors, self._registrations())
        if not tensors:
            raise EngineFatal("RuntimeError", "No KV cache tensors were registered with Mooncake.")
        transcript.add(
            "engine",
            who=name,
            call="register",
            ptrs=[tensor.base_addr for tensor in tensors],
            lens=[tensor.rows.size for tensor in tensors],
        )
        if self._engine.start_up_result(name, "register"):
            raise EngineFatal("RuntimeError", "Mooncake batch memory registration failed.")
        ranks = Ranks(tp_rank=tp_rank, tp_size=spec.tp, pp_rank=pp_rank, pp_size=spec.pp)
        identity = WorkerIdentity(
            self.kind,
            ranks=ranks,
            configured_engine_id=self.engine_id,
            hostname=HOST,
            rpc_port=_FIRST_PORTS[self.kind] + index,
            address=f"{name}{REAL}" if self.kind == "P" else name,
        )
        log_line = worker_log(transcript, name, both_roles=self.role == "kv_both", debug=self.scenario.debug)
        if self.role != "kv_consumer":
            self._register(identity, log_line)
        has_states = any(group.type == "mamba" for group in spec.groups)
        memory = ByteMemory(tensors)
        connector = MooncakeWorker(
            identity,
            self.role,
            groups=self.groups,
            config=self._config,
            behaviour=self._behaviour,
            bus=self._bus,
            memory=RegisteredMemory(
                contents=memory,
                layout=layout,
                heads=HeadLayout(num_kv_heads=NUM_KV_HEADS, has_states=has_states),
                kernel_ratio=spec.kernel_ratio,
            ),
            sink=NoEvents(),
            on_report=lambda: None,
            registers=False,
            encodes_messages=True,
            log_line=log_line,
        )
        if connector.producer is not None:
            connector.producer.on_change = self.watch_entries
        self.workers.append(Worker(name, index, connector, memory, layout.layout_id))

    def _start_server(self) -> None:
        if self.role == "kv_consumer" or self.spec.bootstrap_server_address is not None:
            return
        self.server = BootstrapServer()
        RegisteredServer(self.server, self._bus, self._server_host)
        for payload in self.scenario.pre_register if self.kind == "P" else ():
            self.server.register(RegisterWorkerPayload(**payload))

    @property
    def _server_host(self) -> str:
        address = self.spec.bootstrap_server_address
        if address is not None:
            return self.scenario.variables.get(address, address)
        return "BOOTREAL" if self.kind == "P" else "BOOTREAL-D"

    def _register(self, identity: WorkerIdentity, log_line: Any) -> None:  # noqa: ANN401 - a LogSink
        ranks = identity.ranks
        registration = Registration(
            RegisterWorkerPayload(
                engine_id=identity.engine_id,
                dp_rank=0,
                tp_rank=ranks.tp_rank,
                pp_rank=ranks.pp_rank,
                addr=f"tcp://{identity.address}",
            ),
            self._server_host,
            address=identity.address,
            config=self._config,
            log_line=log_line,
        )
        driver = VirtualDriver(registration, self._bus)
        self._bus.listen(identity.address, driver.receive, refused=driver.refused)
        registration.start(self._bus.loop.now_ns)
        driver.pump()
        while not registration.is_over:
            self._run_until(self._bus.loop.now_ns + 10 * NS_PER_MS)
        self._bus.silence(identity.address)
        driver.close()
        if registration.failure is not None:
            raise registration.failure

    # -- requests ---------------------------------------------------------------------------------------------

    def request(self, request_id: str) -> Request:
        """The request of that id, made at its first mention."""
        known = self.requests.get(request_id)
        if known is not None:
            return known
        spec = self.scenario.request(request_id)
        content = self._index.content(spec.tokens)
        request = Request(
            request_id,
            content,
            num_prompt_tokens=len(spec.tokens),
            max_tokens=spec.max_tokens or (1 if self.kind == "P" else 3),
            stop_token_ids=tuple(spec.stop or ()),
            kv_transfer_params=self.scenario.params_of(request_id),
        )
        request.skip_reading_prefix_cache = spec.prompt_logprobs is not None
        self.requests[request_id] = request
        return request

    def allocate(self, request_id: str, blocks: Sequence[Sequence[int]], num_local: int) -> None:
        """What a scheduler does with its connector when it admits a request."""
        is_new = request_id not in self.requests
        request = self.request(request_id)
        if is_new:
            self.connector.on_new_request(request)
        count, is_async = self.connector.get_num_new_matched_tokens(request, num_local)
        self.connector.update_state_after_alloc(request, ScriptedBlocks(blocks), count or 0)
        self._transcript.add("lookup", side=self.kind, req=request_id, local=num_local, n=count, is_async=is_async)

    def finish(self, request_id: str, status: str, blocks: Sequence[Sequence[int]]) -> None:
        request = self.request(request_id)
        request.status = STATUSES[status]
        delay_free = self.connector.request_finished(request, ScriptedBlocks(blocks))
        self._transcript.add(
            "finished", side=self.kind, req=request_id, status=status, delay_free=delay_free, params=None
        )

    # -- steps ------------------------------------------------------------------------------------------------

    def step(self) -> None:
        if self.crashed is not None:
            return
        self.guard("step", self._step)
        self.look_at_entries()

    def _step(self) -> None:
        if self.scheduled is not None:
            self.scheduled.step()
            return
        metadata = self.connector.build_connector_meta()
        if metadata is not None:
            self._transcript.add("meta", side=self.kind, meta=shown_metadata(metadata))
        polled = self.poll(metadata)
        self.report(polled, self.aggregate(polled))

    def poll(self, metadata: MooncakeConnectorMetadata | None) -> list[Polled | None]:
        """One step of every worker: None for ranks that are dead."""
        alive = [worker for worker in self.workers if worker.index not in self.dead_ranks]
        stalled_ns = max((worker.connector.sender_stalled_until_ns for worker in alive), default=0)
        now_ns = self._bus.loop.now_ns
        if stalled_ns > now_ns:
            # The main thread waits for the loop, on which its calls come before whatever waits there.
            self._run_until(stalled_ns - 2)
        if metadata is not None:
            dropped = list(metadata.reqs_not_processed)
            in_order = [dropped[place] for place in self._conditions.drop_order if place < len(dropped)]
            metadata.reqs_not_processed = dict.fromkeys([*in_order, *dropped])
            for worker in alive:
                worker.connector.start_load_kv(metadata)
            self.watch_entries()
        self._run_until(self._bus.loop.now_ns + (1 if stalled_ns > now_ns else self._conditions.timing.work_ns))
        polled = [self._poll_worker(worker) if worker in alive else None for worker in self.workers]
        self.watch_entries()
        return polled

    def _poll_worker(self, worker: Worker) -> Polled:
        output = worker.connector.get_finished(()) or KVConnectorOutput()
        self._put_off_completions(worker, output)
        if self._conditions.reverses_polls:
            output.finished_sending.reverse()
            output.finished_recving.reverse()
        shown = shown_output(output)
        stats = worker.connector.stats.drain()
        counts: dict[str, Json] = {
            "transfers": stats.num_successful_transfers,
            "bytes": stats.bytes_transferred,
            "descs": stats.num_descriptors,
            "failed_transfers": stats.num_failed_transfers,
            "failed_recvs": stats.num_failed_recvs,
            "kv_expired": stats.num_kv_expired_reqs,
        }
        counts = {name: count for name, count in counts.items() if count}
        if counts:
            shown["stats"] = counts
        return Polled(output, shown)

    def _put_off_completions(self, worker: Worker, output: KVConnectorOutput) -> None:
        """What completed together with a failure may wait for the next poll."""
        waiting, worker.put_off = worker.put_off, []
        finished = output.finished_recving
        if output.invalid_block_ids or output.failed_recving:
            joint = self._conditions.joint
            worker.put_off = [name for name in finished if (worker.name, name) not in joint]
            finished = [name for name in finished if (worker.name, name) in joint]
        output.finished_recving = [*waiting, *finished]

    def aggregate(self, polled: Sequence[Polled | None]) -> KVConnectorOutput | None:
        """What the scheduler of several workers hears; None while a rank is silent."""
        outputs = [each.output for each in polled if each is not None]
        if len(polled) < 2 or len(outputs) < len(polled):
            return None
        return self._aggregator.aggregate(outputs)

    def report(self, polled: Sequence[Polled | None], aggregated: KVConnectorOutput | None) -> None:
        workers = {
            worker.name: each.shown
            for worker, each in zip(self.workers, polled, strict=True)
            if each is not None and each.shown
        }
        if not workers:
            return
        more: dict[str, Json] = {}
        heard = next(iter(workers.values()))
        if len(self.workers) > 1:
            heard = more["aggregated"] = shown_output(aggregated) if aggregated is not None else {}
        keys = [
            f"{prefix}{request_id}"
            for name, prefix in (
                ("finished_recving", "recv:"),
                ("finished_sending", "sent:"),
                ("failed_recving", "failed:"),
            )
            for request_id in heard.get(name, ())
        ]
        if heard.get("invalid_block_ids"):
            keys.append("invalid")
        if any("stats" in shown for shown in workers.values()):
            keys.append(f"stats:{self.kind}")
        self._transcript.add("report", keys, side=self.kind, workers=workers, **more)

    # -- death ------------------------------------------------------------------------------------------------

    def guard(self, where: str, action: Callable[[], None]) -> None:
        """Do it; an exception out of connector or scheduler is the death of the engine."""
        try:
            action()
        except EngineFatal as death:
            self.crash(where, death)

    def crash(self, where: str, death: EngineFatal) -> None:
        self.crashed = where
        keys = [f"crash:{self.kind}"]
        self._transcript.add("crash", keys, side=self.kind, where=where, type=death.exception, msg=death.message)

    # -- what can be seen -------------------------------------------------------------------------------------

    @property
    def producers(self) -> dict[str, Producer]:
        return {
            worker.name: worker.connector.producer for worker in self.workers if worker.connector.producer is not None
        }

    def entries(self) -> dict[str, Json]:
        """Worker → transfer id → state."""
        return {name: shown_entries(producer) for name, producer in self.producers.items()}

    def look_at_entries(self) -> Json:
        """As a poll does: note them if they have changed since the last look."""
        if self.role == "kv_consumer":
            return {}
        entries = self.entries()
        if entries != self._last_entries:
            self._last_entries = entries
            transcript = self._transcript
            transcript.add("entries", p=entries)
            transcript.unmark("entry:")
            transcript.mark(
                f"entry:{name}:{transfer_id}:{state_of(entry)}"
                for name, of_worker in entries.items()
                for transfer_id, entry in of_worker.items()
            )
        return entries

    def watch_entries(self) -> None:
        """Remember every state that the transfers are in, whether or not a poll sees it."""
        for name, producer in self.producers.items():
            states = self._transcript.entry_states.setdefault(name, [])
            shown = shown_entries(producer)
            if not states or states[-1] != shown:
                states.append(shown)

    def memory(self) -> dict[str, Json]:
        runs = {worker.name: worker.memory.runs() for worker in self.workers}
        return {name: layers for name, layers in runs.items() if layers}

    def fill(self, group: int, block_id: int, value: int) -> None:
        """Every layer of the group, on every worker."""
        names = set(layer_names(self.spec, group))
        for worker in self.workers:
            for tensor in worker.memory.tensors:
                if tensor.name in names:
                    tensor.rows[block_id] = value

    def configure(self, env: Env) -> None:
        self._config = replace(config_of(env, self.spec.num_workers))
        for worker in self.workers:
            worker.connector.configure(self._config)


def config_of(env: Env, num_workers: int) -> MooncakeConfig:
    receive = env.p_abort + 60 if isinstance(env.d_recv, str) else env.d_recv
    return MooncakeConfig(
        abort_request_timeout=env.p_abort,
        receive_timeout=receive,
        connector_timeout=env.http,
        num_workers=num_workers,
    )
