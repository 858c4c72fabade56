"""A whole cluster on one event loop, from the first arrival to quiescence, with faults and after them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from kvreplay.behaviour import Behaviour
from kvreplay.connectors.mooncake.bootstrap import serve
from kvreplay.connectors.mooncake.config import BOOTSTRAP_ATTEMPTS
from kvreplay.events import EventSink
from kvreplay.faults.injector import Injector
from kvreplay.faults.plan import FaultPlan
from kvreplay.faults.topology import TopologyInfo, check_possible
from kvreplay.ids import NS_PER_S
from kvreplay.kv.content_index import ContentIndex
from kvreplay.replay.config import ReplayConfig
from kvreplay.replay.ends import Ends
from kvreplay.replay.findings import LiveFindings
from kvreplay.replay.network import LinkNetwork
from kvreplay.replay.node import Node, Surroundings, instance_names, kv_role_of, tier_names
from kvreplay.replay.overrides import overridden
from kvreplay.replay.proxy import Proxy
from kvreplay.sim.bus import Bus
from kvreplay.sim.event_loop import EventLoop
from kvreplay.trace.workload import Workload

SAMPLE_NS: Final = 10 * NS_PER_S
"""vLLM's own log interval (VLLM_LOG_STATS_INTERVAL)."""
_CHUNK: Final = 20_000
"""Actions between two looks at the progress."""
HEAL_BOUND_NS: Final = 24 * 3600 * NS_PER_S
"""What has not ended so long after healing never will."""

Watch = Callable[[int, int], None]
"""(requests ended, instant up to which everything has been reported) → None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Everything that a cluster's course depends on, besides the workload."""

    config: ReplayConfig
    behaviour: Behaviour
    recompute: bool
    plan: FaultPlan
    seed: int = 0
    single_steps: bool = False
    use_lockstep: bool = True


_COMMANDS: Final = frozenset(
    {"abort", "crash", "restart", "preempt", "reset", "evict", "step-raises", "arrival", "config", "startup"}
)


def topology_of(config: ReplayConfig, workload: Workload | None) -> TopologyInfo:
    return TopologyInfo(
        instances={name: kv_role_of(role, config) for name, role in instance_names(config).items()},
        connectors=frozenset(config.connector.parts),
        commands=_COMMANDS,
        request_ids=[arrival.request_id for arrival in workload.arrivals] if workload is not None else None,
        num_ranks=max(config.topology.num_ranks(role) for role in config.topology.roles),
        num_groups=len(config.model.groups),
    )


def bootstrap_url_of(config: ReplayConfig, producer: str) -> str:
    """What the proxy tells a consumer of this producer."""
    return f"http://{config.connector.mooncake.bootstrap_server_of(producer)}"


def start_external_bootstrap(bus: Bus, config: ReplayConfig, behaviour: Behaviour) -> None:
    """The bootstrap server of all producers, where the config has one beside them."""
    if "mooncake" in config.connector.parts:
        address = config.connector.mooncake.bootstrap_server_address
        if address is not None:
            host = address.rpartition(":")[0]
            serve(bus, host, replaces=behaviour["mooncake_registration"] == "replace")


def path_timers_ns(config: ReplayConfig) -> int:
    """What a parked request may wait at most if every timer on its path runs out."""
    if "mooncake" not in config.connector.parts:
        return 0
    options = config.connector.mooncake
    return BOOTSTRAP_ATTEMPTS * options.connector_timeout_ns + options.receive_timeout_ns


class Cluster:
    """Built for one run. `run` plays it; the sink then has everything."""

    def __init__(self, settings: RunSettings, workload: Workload, sink: EventSink) -> None:
        config = overridden(settings.config, settings.plan)
        self._topology = topology_of(config, workload)
        check_possible(settings.plan, self._topology)
        self.loop = EventLoop()
        self.bus = Bus(self.loop, LinkNetwork(config.network))
        self.injector = Injector(settings.plan, settings.seed, sink, self.loop, self.bus)
        self.sink = self.injector.sink
        self.index = ContentIndex(workload.arrivals, config.hash_block_size, config.num_hash_lookahead)
        blame = self.injector.blame
        self.findings = LiveFindings(self.loop, self.sink, blame.of_request, blame.lasting_at)
        self.roles = instance_names(config)
        self.injector.arm_messages()  # instances register when they are built
        start_external_bootstrap(self.bus, config, settings.behaviour)
        surroundings = Surroundings(
            config=config,
            behaviour=settings.behaviour,
            recompute=settings.recompute,
            bus=self.bus,
            sink=self.sink,
            index=self.index,
            findings=self.findings,
            death_at_start=partial(self.injector.death_at_start, self._topology.instances),
            sharding=config.sharding,
            tier_names=tier_names(self.index, workload.arrivals, settings.behaviour),
            seed=settings.seed,
            single_steps=settings.single_steps,
            use_lockstep=settings.use_lockstep,
        )
        self.nodes = [
            Node(name, role, rank, replace(surroundings, config=overridden(config, settings.plan, name)))
            for rank, (name, role) in enumerate(self.roles.items(), 1)
        ]
        self.ends = Ends(self.nodes, self.loop, self.sink, self.injector.blame, self.findings)
        self.proxy = Proxy(
            workload,
            self.nodes,
            config.topology,
            self.bus,
            self.sink,
            self.injector.rewrite_params,
            partial(bootstrap_url_of, config),
            aborts_both=settings.behaviour["proxy_abort"] == "both",
            cancels=settings.behaviour["proxy_failed_prefill"] == "cancel",
            in_turn=settings.behaviour["proxy_legs"] == "in-turn",
        )

    def run(self, watch: Watch | None = None) -> None:
        """Both phases: with faults until nothing can change any more, then without, and at last the accounts."""
        self.injector.arm(self._topology)
        self.proxy.start()
        self._sample_later()
        self._play(watch)
        self.ends.report_stalls()
        self._heal()
        self._play(watch, until_ns=self.loop.now_ns + HEAL_BOUND_NS)
        self.ends.close_accounts()

    # -- phases -----------------------------------------------------------------------------------------------

    def _play(self, watch: Watch | None, until_ns: int | None = None) -> None:
        loop = self.loop
        while not loop.run_until_quiescent(until_ns, max_actions=_CHUNK):
            if until_ns is not None and loop.peek_ns() > until_ns:
                return
            if watch is not None:
                watch(self.proxy.num_ended, self._reported_ns())

    def _heal(self) -> None:
        self.injector.heal()
        for node in self.nodes:
            node.restart()

    def _reported_ns(self) -> int:
        """No event before this instant is still to come."""
        return min([self.loop.now_ns, *(node.instance.reported_ns for node in self.nodes)])

    def _sample_later(self, num_intervals: int = 1) -> None:
        self.loop.call_later(num_intervals * SAMPLE_NS, self._sample, daemon=True)

    def _sample(self) -> None:
        if self.ends.sample() or not self.loop.num_live:
            self._sample_later()
            return
        # All is as it was for long, and stays so until something happens: on to the last sample before that.
        self._sample_later(max((self.loop.peek_ns() - self.loop.now_ns - 1) // SAMPLE_NS, 1))
