"""Runs in which between them every fault of the catalogue fires that sockets can show: most hit a request of their own.

Of a request that a fault hits, its name is the row's. Where a row goes beyond its request, it has a run for itself.
"""

from dataclasses import dataclass, replace
from typing import Final

from kvreplay.replay.config import ReplayConfig
from kvreplay.trace.workload import Workload
from tests.scenarios.stage import pair, request, role, workload
from tests.scenarios.test_every_row import PAIR, STORIES, TWO_PEERS, TWO_PULLERS

_LONG_MS: Final = 600_000
"""No timer of a request that is held up is longer."""


ROOMY: Final = pair(prefill=role(num_gpu_blocks=1000), decode=role(num_gpu_blocks=1000, max_num_seqs=32))
"""Who waits for a lost reply keeps nobody out."""


@dataclass(frozen=True)
class Run:
    """`rows`: row → its settings."""

    rows: dict[str, str]
    requests: Workload
    config: ReplayConfig = PAIR

    @property
    def inject(self) -> tuple[str, ...]:
        return tuple(f"{name}:{settings}" if settings else name for name, settings in self.rows.items())


def own_request(row: str) -> str:
    return row.removeprefix("mooncake.")


def _each_its_own(*rows: str, space_ms: int = 2_000, config: ReplayConfig = ROOMY, has_first: bool = True) -> Run:
    """A request for each row, one after the other, which that row alone hits; and others that none does."""
    names = [*["first"] * has_first, *map(own_request, rows), "last"]
    # Long enough for what happens during prefill.
    arrivals = [request(name, place * space_ms, prompt_tokens=60) for place, name in enumerate(names)]
    return Run({row: f"request={own_request(row)}" for row in rows}, workload(*arrivals), config)


_QUERIES = (
    "bootstrap-failure",
    "mooncake.bootstrap-refused",
    "mooncake.bootstrap-http-error",
    "mooncake.bootstrap-bad-json",
    "mooncake.bootstrap-engine-missing",
    "mooncake.bootstrap-hang",
    "mooncake.bootstrap-slow",
)
"""Nobody remembers that a query has failed: the next request asks again, until an answer comes."""
_PULLS = (
    "timeout",
    "error-response",
    "partial-error",
    "slow",
    "corrupt",
    "mooncake.conn-refused",
    "mooncake.mixed-bootstrap-addr",
    "mooncake.layout-miss",
    "mooncake.missing-params",
    "mooncake.resp-lost",
    "mooncake.resp-delayed",
    "mooncake.resp-duplicate",
    "mooncake.resp-reordered",
    "mooncake.resp-omit",
    "mooncake.resp-unknown-id",
    "mooncake.resp-error",
    "mooncake.resp-partial-err",
    "mooncake.resp-garbage",
    "mooncake.engine-ret",
    "mooncake.engine-slow",
    "mooncake.engine-hang",
    "mooncake.engine-corrupt",
    "mooncake.engine-partial",
    "mooncake.engine-raise",
    "mooncake.p-never-ready",
    "mooncake.p-slow-prefill",
    "mooncake.p-expire-before-pull",
    "mooncake.p-stop-token",
    "mooncake.p-abort-while-waiting",
    "mooncake.p-refused",
    "mooncake.d-left-early",
    "mooncake.tp-mismatch",
    "mooncake.group-mismatch",
    "mooncake.blocks-short",
    "abort",
    "scheduler.preempt",
)


def _alone(row: str, settings: str = "") -> Run:
    """Its story."""
    story = STORIES[row]
    return Run({row: settings or story.settings}, story.requests, story.config)


ACTIONS: Final = Run(
    {
        "cache.evict": "at=3s,blocks=2,instance=D0",
        "cache.reset": "at=5s,instance=P0",
        "config.override": "key=scheduler.max_num_seqs,value=4",
        "engine.restart": "at=7010ms,instance=P0,down=500ms",
        "peer-crash": "at=9010ms,instance=P1,down=1s",
        "engine.step-raises": "at=13010ms,instance=D1",
    },
    workload(*(request(f"r{place}", place * 500, prompt_tokens=30, output_tokens=20) for place in range(40))),
    replace(ROOMY, topology=replace(ROOMY.topology, prefill=2, decode=2)),
)

RUNS: Final[dict[str, Run]] = {
    "queries": _each_its_own(*_QUERIES, space_ms=_LONG_MS, has_first=False),
    "pulls": _each_its_own(*_PULLS),
    "peers": _each_its_own("mooncake.peer-one-of-k", "mooncake.peer-silent-one-of-k", config=TWO_PEERS),
    "actions": ACTIONS,
    "one transfer for two": Run(
        {"mooncake.dup-transfer-id": ""},
        workload(request("a"), request("b", 5)),  # at one instant, either could be first
    ),
    "ranks": _each_its_own("mooncake.rank-silent", "mooncake.rank-late", "mooncake.rank-early", config=TWO_PULLERS),
    **{
        row: _alone(row)
        for row in (
            "mooncake.bootstrap-partial-ranks",
            "mooncake.p-expire-at-ready",
            "mooncake.release-only-fail",
            "mooncake.release-only-ok",
            "mooncake.engine-late",
            "mooncake.listener-dead",
            "mooncake.bootstrap-stale-addr",
            "mooncake.queue-saturation",
            "mooncake.rank-duplicate",
            "mooncake.role-mismatch",
            "mooncake.kv-both-chain",
            "mooncake.register-conflict",
            "mooncake.register-timeout",
            "mooncake.engine-init",
            "mooncake.register-mem",
        )
    },
}

WITHOUT_SOCKETS: Final = {
    "offloading": "chunks are copied inside an instance",
    "simple_cpu": "blocks are copied inside an instance",
}
"""Connectors whose rows no socket can show, and why."""
