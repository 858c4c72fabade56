"""Action faults: when they are due, whom they hit, what they command."""

import pytest

from kvreplay.events import Event
from kvreplay.sim.envelope import Command
from tests.faults.bench import Bench, reply


def route(bench: Bench, request: str, instance: str = "D0") -> None:
    bench.emit("request.routed", request_id=request, instance=instance, peer="P0")


# -- abort -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("when", "at"), [("queued", 1.0), ("pulling", 2.0), ("running", 4.0)])
def test_a_client_aborts_at_the_stage_asked_for(when: str, at: float) -> None:
    bench = Bench(f"abort:when={when}")
    bench.at(1.0)
    route(bench, "a")
    bench.at(2.0)
    bench.emit("pull.sent", request_id="a", instance="D0")
    bench.at(3.0)
    bench.emit("request.first_token", request_id="a", instance="P0")
    bench.at(4.0)
    bench.emit("request.first_token", request_id="a", instance="D0")
    bench.run()
    assert bench.commands == [(at, "client", "abort", {"request_id": "a"})]
    assert [(event.request_id, event.time_ns) for event in bench.injected] == [("a", round(at * 1e9))]


def test_an_abort_is_never_carried_out_from_within_the_event() -> None:
    """Whoever reports an event is in the middle of something."""
    bench = Bench("abort:when=queued")
    route(bench, "a")
    assert bench.commands == []
    bench.run()
    assert len(bench.commands) == 1


def test_an_abort_can_come_later() -> None:
    bench = Bench("abort:when=queued,delay=500ms")
    route(bench, "a")
    bench.run()
    assert [at for at, *_ in bench.commands] == [0.5]


def test_an_abort_hits_each_request_once_and_those_that_it_chooses() -> None:
    bench = Bench("abort:nth=2,request=r*")
    for request in ("x", "r1", "r1", "r2", "r2", "r3"):
        bench.emit("pull.sent", request_id=request, instance="D0")
    bench.run()
    assert [arguments for *_, arguments in bench.commands] == [{"request_id": "r2"}]


def test_an_abort_by_probability_depends_on_the_request_alone() -> None:
    def aborted(requests: list[str]) -> set[str | None]:
        bench = Bench("abort:p=0.3,instance=D0")
        for request in requests:
            bench.emit("pull.sent", request_id=request, instance="D0")
            bench.emit("pull.sent", request_id=f"{request}-elsewhere", instance="D1")
        bench.run()
        return set(bench.faulted)

    requests = [f"r{number}" for number in range(100)]
    assert aborted(requests) == aborted(requests[::-1])
    assert 10 < len(aborted(requests)) < 60


def test_an_event_reported_ahead_of_the_clock_is_acted_on_at_its_time() -> None:
    bench = Bench("abort")
    bench.injector.sink.emit(Event("pull.sent", 7_000_000_000, "D0", request_id="a"))
    bench.run()
    assert [at for at, *_ in bench.commands] == [7.0]


def test_an_abort_that_finds_nothing_to_abort_has_not_fired() -> None:
    bench = Bench("abort")
    bench.bus.control("client", lambda command: False)
    bench.emit("pull.sent", request_id="a", instance="D0")
    bench.run()
    assert bench.fired() == [0]


# -- crash -----------------------------------------------------------------------------------------------


def test_a_peer_crash_takes_the_first_producer_at_its_time() -> None:
    bench = Bench("peer-crash:at=90s")
    bench.run()
    assert bench.commands == [(90.0, "P0", "crash", {})]
    assert [(event.instance, event.request_id, event.status) for event in bench.injected] == [
        ("P0", None, "peer-crash")
    ]


def test_a_crashed_instance_comes_back_under_a_new_identity() -> None:
    bench = Bench("peer-crash:at=1m,down=30s,instance=D*")
    bench.run()
    assert bench.commands == [
        (60.0, "D0", "crash", {}),
        (60.0, "D1", "crash", {}),
        (90.0, "D0", "restart", {"identity": "new"}),
        (90.0, "D1", "restart", {"identity": "new"}),
    ]
    assert bench.fired() == [2]


def test_a_crash_can_wait_for_the_nth_event() -> None:
    bench = Bench("peer-crash:at=pull.sent@D0,nth=2")
    for request in "abc":
        bench.at(ord(request) - ord("a") + 1.0)
        bench.emit("pull.sent", request_id=request, instance="D0")
    bench.run()
    assert bench.commands == [(2.0, "P0", "crash", {})]


def test_without_a_choice_only_the_first_such_event_counts() -> None:
    bench = Bench("peer-crash:at=pull.sent")
    for _ in range(3):
        bench.emit("pull.sent", request_id="a", instance="D0")
    bench.run()
    assert len(bench.commands) == 1


def test_a_crash_loses_the_traffic_of_its_instance() -> None:
    bench = Bench("peer-crash:at=1s,instance=D0", "mooncake.resp-delayed:delay=5s")
    bench.at(0.5)
    bench.bus.post(reply("a", to="D0"))
    bench.bus.post(reply("b", to="D1"))
    bench.run()
    assert [address for _, address, _ in bench.arrived] == ["D1/mooncake/0"]


def test_a_crash_of_what_is_down_neither_fires_nor_restarts_it() -> None:
    bench = Bench("peer-crash:down=10s")
    bench.bus.control("P0", lambda command: command.verb != "crash")
    bench.run()
    assert bench.fired() == [0]


def test_healing_brings_the_dead_back_at_once_and_only_once() -> None:
    bench = Bench("peer-crash:at=1s,down=1h", "peer-crash:at=1s,instance=D0,id=b", "peer-crash:at=2h,id=c")
    bench.at(2.0)
    bench.injector.heal()
    bench.run()
    assert [command[:3] for command in bench.commands] == [
        (1.0, "P0", "crash"),
        (1.0, "D0", "crash"),
        (2.0, "P0", "restart"),
        (2.0, "D0", "restart"),
    ]
    assert bench.loop.now_ns == 2_000_000_000


@pytest.mark.parametrize("identity", ["same", "new"])
def test_a_restart_says_which_identity_it_comes_back_with(identity: str) -> None:
    bench = Bench(f"engine.restart:at=1s,down=2s,identity={identity}")
    bench.run()
    assert bench.commands == [(1.0, "P0", "crash", {}), (3.0, "P0", "restart", {"identity": identity})]


# -- the others ------------------------------------------------------------------------------------------


def test_a_preemption_reaches_the_instance_of_the_event() -> None:
    bench = Bench("scheduler.preempt:request=a")
    route(bench, "a")
    bench.emit("request.first_token", request_id="a", instance="P0")
    bench.emit("request.first_token", request_id="a", instance="D0")
    bench.run()
    assert [command[1:] for command in bench.commands] == [("D0", "preempt", {"request_id": "a"})]


@pytest.mark.parametrize(
    ("spec", "command"),
    [
        ("cache.reset:at=1s", Command("reset", {"gpu": True})),
        ("cache.reset:at=1s,what=both", Command("reset", {"gpu": True, "connector": True})),
        ("cache.evict:at=1s,blocks=7", Command("evict", {"num_blocks": 7})),
        ("engine.step-raises:at=1s", Command("step-raises")),
    ],
)
def test_an_instance_is_told_what_to_do(spec: str, command: Command) -> None:
    bench = Bench(spec)
    bench.run()
    assert bench.commands == [(1.0, "P0", command.verb, command.arguments)]
