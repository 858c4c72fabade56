"""Small clusters, workloads and fault plans by chance: pools too small, prompts that share, turns that hit outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hypothesis import strategies as st

from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.ids import NS_PER_MS
from kvreplay.replay.config import ReplayConfig, RoleConfig, TopologyConfig
from kvreplay.trace.workload import Arrival, Workload
from tests.scenarios.stage import TIMING, UNEVEN_TIMING, Play, pair, play, request, role, single, workload

ENGINE_FAULTS: Final = (
    "abort:p=0.3,when=running",
    "abort:p=0.3,when=queued",
    "scheduler.preempt:at=request.first_token,p=0.5",
    "cache.evict:at=60ms,blocks=2",
    "peer-crash:at=50ms",
    "peer-crash:at=50ms,down=100ms",
)
MESSAGE_FAULTS: Final = (
    "timeout:p=0.3",
    "error-response:p=0.3",
    "partial-error:p=0.3",
    "bootstrap-failure:nth=1",
    "bootstrap-failure:how=hang,p=0.5",
    "slow:p=0.5,delay=50ms",
    "corrupt:p=0.5",
    "mooncake.engine-corrupt:p=0.5,blocks=3",
    "mooncake.engine-partial:p=0.5",
    "mooncake.engine-ret:p=0.3",
    "mooncake.engine-slow:p=0.5,delay=35s",
    "mooncake.resp-delayed:p=0.3",
    "mooncake.resp-duplicate:p=0.5",
    "mooncake.resp-omit:p=0.3",
    "mooncake.resp-garbage:p=0.3",
    "mooncake.conn-refused:p=0.3",
    "mooncake.missing-params:p=0.3,instance=D0",
)
PAIR_FAULTS: Final = (
    *MESSAGE_FAULTS,
    "abort:p=0.3",
    "abort:p=0.3,when=running",
    "abort:p=0.3,when=queued",
    "cache.evict:at=60ms,blocks=2",
    "peer-crash:at=30ms,down=1s",
    "peer-crash:at=40ms,instance=D0",
    "peer-crash:at=40ms,instance=D0,down=1s",
)

_GAPS_MS: Final = (0, 0, 3, 10, 11, 40, 200)
_TURN_GAPS_MS: Final = (20, 100, 300, 600)


@dataclass(frozen=True)
class World:
    config: ReplayConfig
    workload: Workload
    inject: tuple[str, ...]
    behaviour: str
    recompute: bool
    seed: int

    def __repr__(self) -> str:
        """What one needs to see of a failing example."""
        requests = " ".join(
            f"{arrival.request_id}@{arrival.time_ns / NS_PER_MS:g}:{arrival.prompt_tokens}+{arrival.output_tokens}"
            + "/"
            + ",".join(f"{value % 997:03}" for value in arrival.prefix_hashes.tolist())
            for arrival in self.workload.arrivals
        )
        aborts = [f"{abort.request_id}@{abort.time_ns / NS_PER_MS:g}" for abort in self.workload.aborts]
        roles = {
            name: (part.cache.num_gpu_blocks, part.scheduler.token_budget, part.scheduler.max_num_seqs, part.timing)
            for name, part in self.config.roles.items()
        }
        return (
            f"<World {requests} aborts={aborts} {roles} {self.config.connector.options} inject={self.inject} "
            f"{self.behaviour} recompute={self.recompute} seed={self.seed}>"
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ANN401 - hypothesis asks for it
        printer.text(repr(self))

    def play(self, **changes: Any) -> Play:  # noqa: ANN401 - settings of `stage.play`
        settings: dict[str, Any] = {
            "behaviour": self.behaviour,
            "recompute": self.recompute,
            "seed": self.seed,
            **changes,
        }
        return play(self.config, self.workload, *self.inject, **settings)

    def with_kv(self, **changes: Any) -> "World":  # noqa: ANN401 - fields of KvConfig
        return replace(self, config=replace(self.config, kv=replace(self.config.kv, **changes)))


@st.composite
def worlds(
    draw: st.DrawFn,
    *,
    is_pair: bool = False,
    faults: Sequence[str] = (),
    behaviours: Sequence[str] = ("vllm-0.33",),
    max_faults: int = 2,
) -> World:
    config = draw(pair_configs()) if is_pair else single(draw(roles()))
    return World(
        config,
        draw(workloads()),
        tuple(draw(st.lists(st.sampled_from(faults), max_size=max_faults, unique=True))) if faults else (),
        draw(st.sampled_from(behaviours)),
        draw(st.booleans()),
        draw(st.integers(0, 3)),
    )


@st.composite
def roles(draw: st.DrawFn) -> RoleConfig:
    return role(
        num_gpu_blocks=draw(st.sampled_from([18, 20, 24, 40])),
        timing=draw(st.sampled_from([TIMING, UNEVEN_TIMING])),
        max_num_batched_tokens=draw(st.sampled_from([8, 16, 32])),
        max_num_seqs=draw(st.sampled_from([2, 4, 8])),
    )


@st.composite
def pair_configs(draw: st.DrawFn, *, max_instances: int = 1) -> ReplayConfig:
    config = pair(prefill=draw(roles()), decode=draw(roles()))
    num_instances = st.integers(1, max_instances)
    config = replace(config, topology=TopologyConfig(prefill=draw(num_instances), decode=draw(num_instances)))
    if draw(st.booleans()):
        return config
    options = MooncakeConfig(
        receive_timeout=draw(st.sampled_from([0.02, 0.2, 1.0])),
        abort_request_timeout=draw(st.sampled_from([0.05, 0.5, 480])),
        transfer_timeout=draw(st.sampled_from([0.01, 30.0])),
    )
    return replace(config, connector=replace(config.connector, options=options))


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    texts = draw(st.lists(st.text("ab", min_size=8, max_size=8), min_size=1, max_size=3))
    arrivals: list[Arrival] = []
    at_ms = 0
    for index in range(draw(st.integers(1, 7))):
        at_ms += draw(st.sampled_from(_GAPS_MS))
        arrivals.append(_arrival(draw, f"r{index}", at_ms, texts))
    for index in range(draw(st.integers(0, 2))):  # the same prompt once more
        model = draw(st.sampled_from(arrivals))
        delay_ms = draw(st.sampled_from([0, 10, 100, 400]))
        arrivals.append(replace(model, request_id=f"twin{index}", time_ns=model.time_ns + delay_ms * NS_PER_MS))
    arrivals += _session(draw, at_ms)
    aborts = [
        (arrival.request_id, arrival.time_ns / NS_PER_MS + draw(st.sampled_from([0, 5, 10, 50, 100])))
        for arrival in arrivals
        if draw(st.integers(0, 6)) == 6
    ]
    return workload(*arrivals, aborts=aborts)


def _arrival(draw: st.DrawFn, name: str, at_ms: float, texts: list[str]) -> Arrival:
    prompt_tokens, output_tokens = draw(st.integers(1, 30)), draw(st.integers(1, 30))
    num_shared = draw(st.integers(0, 8))
    text = draw(st.sampled_from(texts))[:num_shared].ljust(8, name[-1])
    return request(name, at_ms, prompt_tokens=prompt_tokens, output_tokens=output_tokens, text=text)


def _session(draw: st.DrawFn, at_ms: float) -> list[Arrival]:
    """Turns that contain the earlier ones' outputs, perhaps before these are there."""
    turns: list[Arrival] = []
    length = 0
    for turn in range(draw(st.sampled_from([0, 0, 2, 3]))):
        prompt_tokens = length + draw(st.integers(1, 8))
        output_tokens = draw(st.integers(1, 12))
        turns.append(
            request(
                f"turn{turn}",
                at_ms,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                session="s",
                turn=turn,
            )
        )
        length = prompt_tokens + output_tokens
        at_ms += draw(st.sampled_from(_TURN_GAPS_MS))
    return turns
