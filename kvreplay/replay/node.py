"""One instance of a cluster with all its parts, through crashes and restarts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kvreplay.behaviour import Behaviour
from kvreplay.connectors.mooncake import addresses
from kvreplay.connectors.mooncake.rank_group import start_workers
from kvreplay.connectors.mooncake.ranks import all_ranks
from kvreplay.connectors.mooncake.scheduler import MooncakeScheduler, transfer_groups
from kvreplay.connectors.mooncake.sharding import Sharding
from kvreplay.connectors.mooncake.structs import FIRST_TOKEN_STOPS
from kvreplay.connectors.multi.scheduler import MultiScheduler
from kvreplay.connectors.multi.workers import MultiWorkers
from kvreplay.connectors.offloading.rank_memory import RankMemory
from kvreplay.engine.acceptance import DraftCounters, SyntheticAcceptance
from kvreplay.engine.accounts import RecomputeAccounts
from kvreplay.engine.config import CacheConfig, SpeculativeConfig
from kvreplay.engine.connector import EngineWorkers, SchedulerConnector
from kvreplay.engine.history.skipped_waiting import scheduler_kind
from kvreplay.engine.instance import Instance
from kvreplay.engine.log import EngineLog
from kvreplay.engine.options import SchedulerOptions
from kvreplay.engine.overlapped_instance import OverlappedInstance
from kvreplay.engine.recovery import FailureRules
from kvreplay.engine.request import UNDECIDED, Request, RequestStatus
from kvreplay.engine.rules import SchedulerRules
from kvreplay.engine.scheduler import Scheduler
from kvreplay.engine.stepping import Counters
from kvreplay.engine.worker import WorkerModel
from kvreplay.errors import EngineFatal
from kvreplay.events import TIER_GAUGES, EventSink
from kvreplay.kv.attention_managers import make_cache_manager
from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.block_rows import words_per_block
from kvreplay.kv.cache_manager import KVCacheManager
from kvreplay.kv.content import KeyArray
from kvreplay.kv.content_index import ContentIndex, PromptSource
from kvreplay.kv.group_keys import num_group_keys
from kvreplay.kv.memory import KVMemory, NullMemory
from kvreplay.kv.shared_names import shared_names
from kvreplay.kv.specs import KVCacheGroupSpec
from kvreplay.replay.config import ReplayConfig, Role
from kvreplay.replay.findings import LiveFindings
from kvreplay.replay.offload import Offload
from kvreplay.replay.sampler import ANY_TOKEN, TraceSampler
from kvreplay.replay.simple_cpu import SimpleCpu
from kvreplay.replay.tier_owner import TierOwner
from kvreplay.sim.bus import Bus
from kvreplay.sim.catalogue import Death
from kvreplay.sim.envelope import CLIENT_ABORT, CLIENT_ARRIVAL, NEW_IDENTITY, Command, Envelope

_KV_ROLE: Final[Mapping[Role, str]] = {"prefill": "kv_producer", "decode": "kv_consumer"}
_PREFIX: Final[Mapping[Role, str]] = {"prefill": "P", "decode": "D", "engine": "E"}


class OnEnd(Protocol):
    def __call__(self, request_id: str, *, has_finished: bool) -> None: ...


_FINISHED: Final = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)

_GAUGES: Final = [name for gauge in TIER_GAUGES.values() for name in (gauge, f"num_{gauge}")]


def instance_names(config: ReplayConfig) -> dict[str, Role]:
    """Instance → role, in the order of the report: P0, P1, ..., D0, ... or E0, ..."""
    return {
        f"{_PREFIX[role]}{index}": role
        for role in config.topology.roles
        for index in range(config.topology.num_instances(role))
    }


def kv_role_of(role: Role, config: ReplayConfig) -> str:
    """vLLM's `kv_role` of these instances; empty without a connector."""
    if "mooncake" in config.connector.parts and config.connector.mooncake.kv_role is not None:
        return config.connector.mooncake.kv_role
    return _KV_ROLE.get(role, "" if config.connector.kind == "none" else "kv_both")


@dataclass(frozen=True, slots=True)
class Leg:
    """One instance's part of a client's request: `request` is its place in the workload."""

    request: int
    request_id: str
    max_tokens: int
    priority: int
    params: dict[str, Any] | None
    is_producers: bool = False
    """Whether it computes the prompt for another instance, whatever its parameters say by now."""
    turned_away: str = ""
    """Why the engine is not to have it: its client has gone while it was in the `gateway` or in the `api` server, or it
    is answered with an `error`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all instances of a run share."""

    config: ReplayConfig
    behaviour: Behaviour
    recompute: bool
    bus: Bus
    sink: EventSink
    index: ContentIndex
    findings: LiveFindings
    death_at_start: Callable[[str], Death | None] = lambda instance: None
    sharding: Sharding = field(default_factory=Sharding)
    """How the KV memory of all engines is cut into the shares of their ranks."""
    tier_names: KeyArray | None = None
    """What offloading tiers know the keys of `index` by; None: by themselves."""
    seed: int = 0
    single_steps: bool = False
    use_lockstep: bool = True
    """Off, together with `single_steps`: the plain way, to test the shortcuts against."""


def num_pool_blocks(cache: CacheConfig, behaviour: Behaviour) -> int:
    return cache.pool_blocks(as_first_rank=behaviour["rank_blocks"] == "first")


def tier_names(index: ContentIndex, arrivals: Sequence[PromptSource], behaviour: Behaviour) -> KeyArray | None:
    """`Surroundings.tier_names`."""
    return shared_names(index, arrivals) if behaviour["offload_keys"] == "tokens" else None


class Node:
    """An instance's life: it is built, may die, and may be built again with the next incarnation."""

    def __init__(self, name: str, role: Role, rank: int, surroundings: Surroundings) -> None:
        self.name = name
        self.role: Role = role
        self.api_address = f"{name}/api"
        self.incarnation = 0
        self.engine_id = addresses.engine_id_of(name, 0)
        self.on_end: OnEnd | None = None
        """Told of each request that ends here, and of a producer's also if they go down with it."""
        self._rank = rank
        self._around = surroundings
        self._counters = Counters()
        self._draft_counters = DraftCounters()
        self._earlier_usage: dict[str, int] = {}
        self.instance: Instance
        self.worker: EngineWorkers | None = None
        self.offload: Offload | SimpleCpu | None = None
        self._start()
        surroundings.bus.control(name, self.command)

    @property
    def kv_role(self) -> str:
        return kv_role_of(self.role, self._around.config)

    @property
    def is_up(self) -> bool:
        return not self.instance.is_dead

    @property
    def num_requests(self) -> int:
        return self.instance.num_requests if self.is_up else 0

    # -- life -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        around = self._around
        role = around.config.role(self.role)
        groups = self._groups
        rules = SchedulerRules.of(around.behaviour)
        log = EngineLog(around.sink, self.name)
        pool = BlockPool(
            num_pool_blocks(role.cache, around.behaviour),
            num_group_keys(around.index.num_keys, len(groups)),
            enable_caching=role.cache.enable_prefix_caching,
        )
        kv = make_cache_manager(
            groups,
            pool,
            max_model_len=role.scheduler.max_model_len,
            max_in_flight_tokens=role.scheduler.max_in_flight_tokens,
            watermark=role.scheduler.watermark,
            retention_interval=role.cache.prefix_cache_retention_interval,
            hash_block_size=role.cache.prefix_match_unit,
            drafts=around.config.draft_rules(self.role),
            exact_estimates=rules.exact_estimates,
            looks_at_whole_chunks=rules.looks_at_whole_chunks,
            adopts_per_group=rules.adopts_per_group,
            keeps_state_below_mark=around.behaviour["offload_state_below_mark"] == "unhashed",
            has_connector=around.config.connector.kind != "none",
        )
        connector = self._connector(kv, log)
        scheduler = scheduler_kind(around.behaviour)(
            role.scheduler,
            kv,
            connector,
            TraceSampler(),
            log,
            SchedulerOptions(
                rules=rules,
                failure_rules=FailureRules.of(around.behaviour),
                recompute_load_failures=around.recompute,
                kv_role=self.kv_role,
                speculation=role.speculative,
                use_lockstep=around.use_lockstep,
                output_is_shared=around.index.shares_generated,
            ),
            RecomputeAccounts(log),
        )
        model = self._model(scheduler)
        if self.kv_role:
            self.worker = self._workers(model)
            scheduler.subscribe(failure_reason=self.worker.failure_reason)
        kind = OverlappedInstance if role.scheduler.async_scheduling else Instance
        self.instance = kind(
            self.name,
            self._rank,
            around.bus.loop,
            scheduler,
            role.timing,
            log,
            workers=self.worker,
            model=model,
            findings=around.findings,
            counters=self._counters,
            acceptance=self._acceptance(role.speculative),
            single_steps=around.single_steps,
        )
        self.instance.on_finished = self._ended
        self.instance.on_lost = self._lost if self.role == "prefill" else None
        self.instance.on_death = self._silence
        offload, accounts = self.offload, scheduler.accounts
        if offload is not None and accounts is not None:
            self.instance.more_usage = lambda: self._with_earlier(
                {"hit_tokens": accounts.num_hit_tokens, **offload.usage()}
            )
        death = around.death_at_start(self.name)
        if death is not None:
            self._fail_to_start(death)
        elif not self._registers:
            self._come_up()

    @property
    def _groups(self) -> tuple[KVCacheGroupSpec, ...]:
        return self._around.config.groups_of(self.role)

    def _acceptance(self, speculation: SpeculativeConfig | None) -> SyntheticAcceptance | None:
        if speculation is None:
            return None
        return SyntheticAcceptance(speculation.acceptance_rates, self._around.seed, self._draft_counters)

    @property
    def _registers(self) -> bool:
        """It comes up when all its ranks have registered with their bootstrap server (`_registered`)."""
        return "mooncake" in self._around.config.connector.parts and self.kv_role != "kv_consumer"

    def _registered(self, failure: EngineFatal | None) -> None:
        if failure is None:
            self._come_up()
            return
        assert self.worker is not None
        self.worker.shutdown()
        self.instance.die(failure)

    def _come_up(self) -> None:
        self._around.bus.listen(self.api_address, self._receive)

    def _fail_to_start(self, death: Death) -> None:
        """It never comes up, though it may take a while to notice."""
        if self.worker is not None:
            self.worker.shutdown()
        fatal = EngineFatal(death.exception, death.message)
        self._around.bus.loop.call_later(death.after_ns, lambda: self.instance.die(fatal))

    def _connector(self, kv: KVCacheManager, log: EngineLog) -> SchedulerConnector | None:
        """The connector's half in the scheduler."""
        around = self._around
        halves: list[SchedulerConnector] = []
        for part in around.config.connector.parts:
            if part == "mooncake":
                halves.append(MooncakeScheduler(self.kv_role, self._groups, around.behaviour))
                continue
            self.offload = self._cpu_tier(part, kv, log)
            halves.append(self.offload.scheduler)
        if len(halves) > 1:
            return MultiScheduler(halves, losers_load=around.behaviour["multi_losers"] == "load")
        return halves[0] if halves else None

    def _workers(self, model: WorkerModel | None) -> EngineWorkers:
        """Its half in the ranks."""
        memory: KVMemory = model if model is not None else NullMemory()
        parts = [
            self._mooncake(memory) if part == "mooncake" else self._offload_workers(model, memory)
            for part in self._around.config.connector.parts
        ]
        return parts[0] if len(parts) == 1 else MultiWorkers(parts)

    def _offload_workers(self, model: WorkerModel | None, memory: KVMemory) -> EngineWorkers:
        assert self.offload is not None
        words = [0 if model is None else words_per_block(group) for group in self._groups]
        shares = [self._around.sharding.shares_of(ranks) for ranks in all_ranks(*self._sizes)]
        widths = [len(own) for own in shares]
        memories = [memory] * len(shares)
        if model is not None and len(shares) > 1:
            memories = [RankMemory(memory, sum(widths[:rank]), width, words) for rank, width in enumerate(widths)]
        if isinstance(self.offload, SimpleCpu):
            return self.offload.start_workers(memories, [[count * width for count in words] for width in widths])
        return self.offload.start_workers(memories, max(words) * max(widths))

    @property
    def _sizes(self) -> tuple[int, int]:
        """Tensor and pipeline parallel size."""
        return self._around.config.topology.parallel_sizes(self.role)

    @property
    def _num_ranks(self) -> int:
        return self._around.config.topology.num_ranks(self.role)

    def _cpu_tier(self, kind: str, kv: KVCacheManager, log: EngineLog) -> Offload | SimpleCpu:
        around = self._around
        owner = TierOwner(
            instance=self.name,
            kv=kv,
            num_keys=around.index.num_keys,
            names=around.tier_names,
            behaviour=around.behaviour,
            bus=around.bus,
            log=log,
            on_report=lambda: self.instance.poke(),
        )
        connector = around.config.connector
        if kind == "simple_cpu":
            return SimpleCpu(
                owner,
                config=connector.simple_cpu,
                max_num_batched_tokens=around.config.role(self.role).scheduler.max_num_batched_tokens,
                num_ranks=self._num_ranks,
                num_parts=around.config.num_parts(self.role),
            )
        return Offload(
            owner,
            config=connector.offloading,
            findings=around.findings,
            num_ranks=self._num_ranks,
            num_parts=around.config.num_parts(self.role),
            is_replicated=around.config.is_replicated(self.role),
        )

    def _model(self, scheduler: Scheduler) -> WorkerModel | None:
        around = self._around
        if around.config.kv.check == "off":
            return None
        # Imported where tensors live: torch takes a second to load.
        from kvreplay.connectors.mooncake.sharded_buffers import make_buffers

        shares = around.sharding.row_shares(*around.config.topology.parallel_sizes(self.role))
        of_ranks = around.config.role(self.role).cache.rank_gpu_blocks
        sizes = around.sharding.by_share(of_ranks, *self._sizes) if of_ranks is not None else None
        buffers = make_buffers(scheduler.pool.num_blocks, self._groups, shares, sizes)
        return WorkerModel(scheduler, buffers, every_read=around.config.kv.check == "every-read")

    def _mooncake(self, memory: KVMemory) -> EngineWorkers:
        around = self._around
        tp_size, pp_size = around.config.topology.parallel_sizes(self.role)
        return start_workers(
            self.name,
            self.incarnation,
            self.kv_role,
            engine_id=self.engine_id,
            tp_size=tp_size,
            pp_size=pp_size,
            sharding=around.sharding,
            groups=transfer_groups(self._groups, around.behaviour),
            config=around.config.connector.mooncake,
            behaviour=around.behaviour,
            bus=around.bus,
            memory=memory,
            sink=around.sink,
            on_report=lambda: self.instance.poke(),
            dp_rank=self._dp_rank,
            on_registered=self._registered,
            starves=self._starves if around.recompute and around.behaviour["waiting_pulls"] == "yield" else None,
        )

    def _starves(self) -> bool:
        """Nothing runs, and somebody without blocks waits for some, and not for a lookup."""
        scheduler = self.instance.scheduler
        return not scheduler.running and any(request.lookup_answer != UNDECIDED for request in scheduler.waiting)

    @property
    def _dp_rank(self) -> int:
        """Of the deployment that it registers with: it is alone in its own."""
        config = self._around.config
        if config.connector.mooncake.bootstrap_server_address is None:
            return 0
        return [name for name, role in instance_names(config).items() if role == self.role].index(self.name)

    def _silence(self) -> None:
        """The process is gone, whatever killed it."""
        around = self._around
        around.bus.silence(self.api_address)
        if self.worker is not None:
            self.worker.shutdown()
        if self.offload is not None:
            self.instance.sample_usage()  # what it had counted ends with it
            self.offload.close()

    def crash(self, command: Command) -> bool:
        """The process dies, and with it everything that was queued, running, or kept for a puller."""
        if not self.is_up:
            return False
        command.victims += self.instance.request_ids
        self.instance.kill("instance crashed")
        return True

    def restart(self, identity: str = NEW_IDENTITY) -> bool:
        """A new process with empty memory and new ports, under a new engine id, or under the same: a configured one."""
        if self.is_up:
            return False
        self.incarnation += 1
        if identity == NEW_IDENTITY:
            self.engine_id = addresses.engine_id_of(self.name, self.incarnation)
        self.instance.tell_evictions()
        self._counters.preemptions += self.instance.scheduler.num_preemptions
        if self.instance.more_usage is not None:
            self._earlier_usage = self.instance.more_usage()
        self._start()
        return True

    def _with_earlier(self, usage: dict[str, int]) -> dict[str, int]:
        """Counters go on from those of the process before; what is in use does not."""
        return {
            name: value if name in _GAUGES else value + self._earlier_usage.get(name, 0)
            for name, value in usage.items()
        }

    def command(self, command: Command) -> bool:
        """Carry out an action fault. False if there was nothing to act on."""
        arguments = command.arguments
        match command.verb:
            case "crash":
                return self.crash(command)
            case "restart":
                return self.restart(arguments["identity"])
        if not self.is_up:
            return False
        match command.verb:
            case "abort":
                request_id = arguments["request_id"]
                is_live = self.instance.has_unfinished(request_id)
                if is_live:
                    self.instance.abort(request_id)
                return is_live
            case "preempt":
                return self.instance.preempt(arguments["request_id"])
            case "reset":
                self.instance.reset_caches(**arguments)
                return True
            case "evict":
                return self.instance.evict(arguments["num_blocks"])
            case "step-raises":
                self.instance.raise_in_next_step(
                    arguments.get("exception", "RuntimeError"), arguments.get("message", "injected")
                )
                return True
        return False

    # -- what reaches it --------------------------------------------------------------------------------------

    def _receive(self, envelope: Envelope) -> None:
        if envelope.kind == CLIENT_ABORT:
            self.instance.abort(envelope.payload)
            return
        assert envelope.kind == CLIENT_ARRIVAL, envelope.kind
        leg: Leg = envelope.payload
        content = self._around.index.content(leg.request)
        request = Request(
            leg.request_id,
            content,
            num_prompt_tokens=content.num_prompt_tokens,
            max_tokens=leg.max_tokens,
            arrival_ns=self._around.bus.loop.now_ns,
            priority=leg.priority,
            kv_transfer_params=leg.params,
            stop_token_ids=_stop_token_ids(leg.params),
        )
        if not leg.turned_away:
            self.instance.submit(request)
        elif leg.turned_away == "error":
            self.instance.refuse(request, "500 Internal Server Error")
        else:
            self.instance.forget(request, is_known=leg.turned_away == "api")

    def _ended(self, request: Request) -> None:
        self._tell_end(request, has_finished=request.status in _FINISHED)

    def _lost(self, request: Request) -> None:
        self._tell_end(request, has_finished=False)

    def _tell_end(self, request: Request, *, has_finished: bool) -> None:
        if self.on_end is not None:
            self.on_end(request.request_id, has_finished=has_finished)


def _stop_token_ids(params: dict[str, Any] | None) -> tuple[int, ...]:
    """The sampler's one token id, where a fault wants the first token to be a stop token."""
    return (ANY_TOKEN,) if params and params.pop(FIRST_TOKEN_STOPS, None) else ()
