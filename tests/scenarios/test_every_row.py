"""Every row of Mooncake's catalogue: what it does to each generation, and that ideally it is survived.

`before` is before vllm#50984, `after` with it alone, and 0.33 the release. Times and details have tests of their own.
"""

from dataclasses import dataclass, replace
from typing import Final

import pytest

from kvreplay.faults.catalogue import catalogue
from kvreplay.replay.config import ReplayConfig
from kvreplay.sim.catalogue import FaultRow
from kvreplay.trace.workload import Workload
from tests.scenarios.stage import Play, pair, play, request, role, workload
from tests.scenarios.test_hybrid_pulls import STATES, hybrid

ROWS: Final[dict[str, FaultRow]] = {name: row for name, row in catalogue().items() if row.needs == "mooncake"}
GENERATIONS: Final = ("pre-50984", "post-50984", "vllm-0.33")

ONE_AFTER_ANOTHER = workload(request("a"), request("b", 100))
TOGETHER = workload(request("a"), request("b"))
QUEUED = workload(
    request("a", prompt_tokens=40, output_tokens=20), request("b", 5, prompt_tokens=40), aborts=[("b", 60)]
)
REUSED = workload(request("a", prompt_tokens=40), request("b", 60, prompt_tokens=40, output_tokens=8))
PAIR = pair()
TIGHT = pair(decode=role(num_gpu_blocks=17))
"""The second prompt of a pair does not fit beside the first."""
TWO_PEERS = pair(ranks=((2, 1), (1, 1)))
TWO_PULLERS = pair(ranks=((1, 1), (2, 1)))
CHAIN = replace(hybrid(STATES), connector=pair(kv_role="kv_both").connector)


@dataclass(frozen=True)
class Story:
    """What becomes of it before, after, and in 0.33: how requests end, `crash`, and laws that are broken."""

    before: str
    after: str
    release: str
    config: ReplayConfig = PAIR
    requests: Workload = ONE_AFTER_ANOTHER
    settings: str = ""


def _always(ends: str, *, config: ReplayConfig = PAIR, requests: Workload = ONE_AFTER_ANOTHER) -> Story:
    return Story(ends, ends, ends, config, requests)


STALLED = "stalled CONSERVATION"
FIXED = Story(STALLED, "failed", "failed")
"""What #50984 is for."""
UNSEEN = Story("finished CONTENT", "finished CONTENT", "finished CONTENT")
"""Nobody notices but the checker."""
HARMLESS = Story("finished", "finished", "finished")
PARKED = Story(STALLED, STALLED, STALLED)
OMITTED = Story(STALLED, STALLED, "failed")
DOWN = Story(f"crash {STALLED}", "crash failed", "crash failed")

STORIES: Final[dict[str, Story]] = {
    "timeout": FIXED,
    "error-response": FIXED,
    "partial-error": FIXED,
    "bootstrap-failure": FIXED,
    "slow": HARMLESS,
    "corrupt": UNSEEN,
    "mooncake.bootstrap-refused": FIXED,
    "mooncake.bootstrap-hang": FIXED,
    "mooncake.bootstrap-slow": HARMLESS,
    "mooncake.bootstrap-http-error": FIXED,
    "mooncake.bootstrap-bad-json": FIXED,
    "mooncake.bootstrap-engine-missing": FIXED,
    "mooncake.bootstrap-partial-ranks": replace(UNSEEN, config=TWO_PEERS),
    "mooncake.bootstrap-stale-addr": FIXED,
    "mooncake.mixed-bootstrap-addr": FIXED,
    "mooncake.conn-refused": FIXED,
    "mooncake.release-only-fail": _always("aborted finished", config=TIGHT, requests=QUEUED),
    "mooncake.release-only-ok": Story(
        "crash aborted failed", "crash aborted failed", "aborted finished", config=TIGHT, requests=QUEUED
    ),
    "mooncake.layout-miss": HARMLESS,
    "mooncake.missing-params": PARKED,
    "mooncake.resp-lost": FIXED,
    "mooncake.resp-delayed": FIXED,
    "mooncake.resp-duplicate": HARMLESS,
    "mooncake.resp-reordered": HARMLESS,
    "mooncake.resp-omit": OMITTED,
    "mooncake.resp-unknown-id": Story("finished", "failed", "finished"),
    "mooncake.resp-error": FIXED,
    "mooncake.resp-partial-err": FIXED,
    "mooncake.resp-garbage": FIXED,
    "mooncake.engine-ret": FIXED,
    "mooncake.engine-slow": FIXED,
    "mooncake.engine-hang": FIXED,
    "mooncake.engine-corrupt": UNSEEN,
    "mooncake.engine-partial": UNSEEN,
    "mooncake.engine-late": Story(
        STALLED,
        "failed finished CONTENT FENCE",
        "failed finished CONTENT FENCE",
        config=TIGHT,
        requests=REUSED,
        settings="request=a,delay=75ms",
    ),
    "mooncake.engine-raise": Story(STALLED, "failed CONSERVATION", "failed CONSERVATION"),
    "mooncake.peer-one-of-k": replace(FIXED, config=TWO_PEERS),
    "mooncake.peer-silent-one-of-k": replace(FIXED, config=TWO_PEERS),
    "mooncake.listener-dead": FIXED,
    "mooncake.rank-silent": replace(PARKED, config=TWO_PULLERS),
    "mooncake.rank-late": replace(HARMLESS, config=TWO_PULLERS),
    "mooncake.rank-duplicate": _always("crash failed rejected", config=TWO_PULLERS),
    "mooncake.rank-early": replace(HARMLESS, config=TWO_PULLERS),
    "mooncake.p-never-ready": FIXED,
    "mooncake.p-slow-prefill": FIXED,
    "mooncake.p-expire-before-pull": FIXED,
    "mooncake.p-expire-at-ready": OMITTED,
    "mooncake.p-stop-token": FIXED,
    "mooncake.p-abort-while-waiting": replace(FIXED, requests=workload(request("a", prompt_tokens=60))),
    "mooncake.p-refused": FIXED,
    "mooncake.d-left-early": replace(_always("aborted finished"), settings="request=a"),
    "mooncake.dup-transfer-id": _always("finished CONSERVATION CONTENT", requests=TOGETHER),
    "mooncake.role-mismatch": _always("crash failed rejected"),
    "mooncake.kv-both-chain": replace(UNSEEN, config=CHAIN),
    "mooncake.tp-mismatch": FIXED,
    "mooncake.group-mismatch": FIXED,
    "mooncake.blocks-short": FIXED,
    "mooncake.queue-saturation": Story("finished stalled CONSERVATION", "failed finished", "failed finished"),
    "mooncake.register-conflict": DOWN,
    "mooncake.register-timeout": DOWN,
    "mooncake.engine-init": replace(DOWN, settings="instance=P0"),
    "mooncake.register-mem": replace(DOWN, settings="instance=P0"),
}


def told(name: str, behaviour: str, *, recompute: bool = False) -> tuple[Play, str]:
    story = STORIES[name]
    fault = f"{name}:{story.settings}" if story.settings else name
    played = play(story.config, story.requests, fault, behaviour=behaviour, recompute=recompute)
    assert played.of("fault.injected"), "it has tested nothing"
    crash = ["crash"] if played.of("engine.crashed") else []
    laws = sorted({str(event.status) for event in played.violations})
    return played, " ".join([*crash, *sorted({kind for kind, _, _ in played.ends().values()}), *laws])


def test_every_row_has_a_story() -> None:
    assert list(STORIES) == sorted(ROWS, key=list(STORIES).index)
    assert set(STORIES) == set(ROWS)


@pytest.mark.parametrize("name", STORIES)
def test_what_it_does_to_each_generation(name: str) -> None:
    story = STORIES[name]
    assert [told(name, generation)[1] for generation in GENERATIONS] == [story.before, story.after, story.release]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("name", STORIES)
def test_ideally_it_is_survived(name: str, policy: str) -> None:
    """Nothing is held, no law is broken, nobody waits for ever; who recomputes finishes, but for clients that leave."""
    played, ends = told(name, "ideal", recompute=policy == "recompute")
    crash = "crash " if STORIES[name].before.startswith("crash stalled") else ""  # an operator's business
    aborted = "aborted " if STORIES[name].release.startswith("aborted") else ""
    assert ends in ([f"{crash}{aborted}finished"] if policy == "recompute" else _survivals(crash, aborted))
    for node in played.cluster.nodes:
        pool = node.instance.scheduler.pool
        assert pool.num_free == pool.num_blocks - 1


def _survivals(crash: str, aborted: str) -> list[str]:
    return [f"{crash}{aborted}{ends}" for ends in ("finished", "failed", "failed finished")]
