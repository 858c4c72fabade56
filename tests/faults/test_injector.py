"""The injector: who is chosen, how faults compose, when they end."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreplay.faults.record import FaultStatistics
from kvreplay.sim.envelope import PULL_REPLY, PULL_REQUEST
from tests.faults.bench import CONTINUE, ERROR, Bench, pull, reply, write

REQUESTS = [f"r{number}" for number in range(300)]


def hit_by(*specs: str, seed: int = 0, requests: list[str] = REQUESTS) -> dict[str, set[str]]:
    """Fault → the requests it names, where each request is one pull with one reply and one write."""
    bench = Bench(*specs, seed=seed)
    for request in requests:
        bench.post(pull(request), write(request), reply(request))
    return {statistics.spec: set(statistics.requests) for statistics in bench.injector.statistics()}


# -- choice ----------------------------------------------------------------------------------------------


def test_without_a_choice_every_conversation_is_hit() -> None:
    assert hit_by("timeout")["timeout"] == set(REQUESTS)


def test_nth_counts_matching_conversations_from_1() -> None:
    assert hit_by("timeout:nth=1,3..4,request=r1?")["timeout:nth=1,3..4,request=r1?"] == {"r10", "r12", "r13"}


def test_nth_counts_a_conversation_once_however_many_messages_it_has() -> None:
    bench = Bench("timeout:nth=2").post(
        reply("a", status=CONTINUE), reply("b", index=1, pull_of="a"), reply("c"), reply("d")
    )
    assert bench.faulted == ["c"]


def test_count_ends_it() -> None:
    assert hit_by("timeout:count=2")["timeout:count=2"] == {"r0", "r1"}
    assert len(hit_by("timeout:p=0.5,count=3")["timeout:p=0.5,count=3"]) == 3


def test_p_hits_about_its_part_and_each_seed_another() -> None:
    spec = "timeout:p=0.2"
    hits = [hit_by(spec, seed=seed)[spec] for seed in (0, 1)]
    assert all(30 < len(hit) < 90 for hit in hits)
    assert hits[0] != hits[1]


def test_an_id_draws_its_own_luck() -> None:
    hits = hit_by("error-response:p=0.2", "slow:p=0.2", "slow:p=0.2,id=b")
    assert hits["slow:p=0.2"] != hits["slow:p=0.2,id=b"] != hits["error-response:p=0.2"]


def test_luck_does_not_depend_on_the_order_of_conversations() -> None:
    spec = "timeout:p=0.2"
    assert hit_by(spec)[spec] == hit_by(spec, requests=REQUESTS[::-1])[spec]


others = st.sampled_from(
    ["slow:p=0.3", "corrupt", "abort:p=0.5", "timeout:p=0.3,id=b", "mooncake.resp-garbage:nth=1..50"]
)


@settings(deadline=None)
@given(before=st.lists(others, max_size=3, unique=True), after=st.lists(others, max_size=3, unique=True))
def test_adding_faults_leaves_the_others_as_they_were(before: list[str], after: list[str]) -> None:
    """Even a fault whose message an earlier one has swallowed goes on counting as it did."""
    requests = REQUESTS[:40]
    for spec in ("timeout:p=0.1", "timeout:nth=3..9", "mooncake.resp-delayed:count=5"):
        alone = hit_by(spec, requests=requests)[spec]
        assert hit_by(spec, *after, requests=requests)[spec] == alone
        amongst = hit_by(*before, spec, *(other for other in after if other not in before), requests=requests)
        swallowed = {name for other in before if other.startswith("timeout") for name in amongst[other]}
        assert amongst[spec] == alone - swallowed


@pytest.mark.parametrize(
    ("key", "hits"),
    [
        ("instance=D1", ["d1"]),
        ("instance=D*", ["d0", "d1", "p1", "rank1"]),
        ("peer=P1", ["p1"]),
        ("rank=1", ["rank1"]),
        ("request=p?", ["p1"]),
    ],
)
@pytest.mark.parametrize("kind", ["timeout", "error-response"])
def test_instance_is_the_consumer_of_a_pull_and_peer_its_producer(kind: str, key: str, hits: list[str]) -> None:
    bench = Bench(f"{kind}:{key}")
    for name, consumer, producer, rank in [
        ("d0", "D0", "P0", 0),
        ("d1", "D1", "P0", 0),
        ("p1", "D0", "P1", 0),
        ("rank1", "D0", "P0", 1),
    ]:
        if kind == "timeout":
            bench.post(reply(name, to=consumer, of=producer, rank=rank))
        else:
            bench.post(pull(name, by=consumer, of=producer, rank=rank))
    assert bench.faulted == hits
    assert {(event.instance or "?")[0] for event in bench.injected} == {"D"}


# -- time ------------------------------------------------------------------------------------------------


def test_a_window_of_time_begins_and_ends() -> None:
    bench = Bench("timeout:after=10s,until=20s")
    for seconds in (9.0, 10.0, 19.0, 20.0):
        bench.at(seconds)
        bench.post(reply(f"at{seconds:g}"))
    assert bench.faulted == ["at10", "at19"]


def test_events_open_and_close_a_window() -> None:
    bench = Bench("timeout:after=request.routed@D0,until=request.finished#x*")
    bench.post(reply("a"))
    bench.emit("request.routed", instance="D1", request_id="x1")
    bench.post(reply("b"))
    bench.emit("request.routed", instance="D0", request_id="x1")
    bench.post(reply("c"))
    bench.emit("request.finished", instance="D0", request_id="y1")
    bench.post(reply("d"))
    bench.emit("request.finished", instance="D0", request_id="x1")
    bench.post(reply("e"))
    assert bench.faulted == ["c", "d"]


def test_a_chosen_conversation_stays_chosen_when_the_window_closes() -> None:
    bench = Bench("timeout:until=10s").post(reply("a", status=CONTINUE))
    bench.at(20.0)
    bench.post(reply("b", index=1, pull_of="a"), reply("c"))
    assert bench.faulted == ["a", "b"]


# -- composition -----------------------------------------------------------------------------------------


def test_faults_act_in_the_plans_order_each_on_what_is_left() -> None:
    both = Bench("slow:delay=1s", "corrupt").post(write("a"))
    ((seconds, _, envelope),) = both.arrived
    assert (seconds, len(envelope.corruptions)) == (1.0, 1)
    assert Bench("mooncake.engine-hang", "corrupt").post(write("a")).fired() == [1, 0]
    assert Bench("corrupt", "mooncake.engine-hang").post(write("a")).fired() == [1, 1]


def test_delays_add_up() -> None:
    bench = Bench("slow:delay=1s", "mooncake.engine-slow:delay=2s").post(write("a"))
    assert [seconds for seconds, _, _ in bench.arrived] == [3.0]


def test_a_fault_meets_what_an_earlier_one_has_made() -> None:
    assert Bench("error-response", "mooncake.resp-lost").post(pull("a")).num_arrived == 0
    assert Bench("mooncake.resp-lost", "error-response").post(pull("a")).payloads[0].status == ERROR


def test_two_corruptions_name_their_own_faults() -> None:
    ((_, _, envelope),) = Bench("corrupt:id=a", "corrupt:id=b").post(write("a")).arrived
    signed = [(corruption.fault_spec, corruption.fault_handle) for corruption in envelope.corruptions]
    assert signed == [("corrupt:id=a", 0), ("corrupt:id=b", 1)]


def test_a_copy_of_a_message_does_not_use_up_another_choice() -> None:
    bench = Bench("mooncake.resp-duplicate", "mooncake.resp-garbage").post(reply("a"))
    assert [payload == b"\xc1" for payload in bench.payloads] == [True, False]


# -- the end ---------------------------------------------------------------------------------------------


def test_only_kinds_that_a_fault_acts_on_pass_the_injector() -> None:
    assert Bench("timeout", "abort").injector.kinds == {PULL_REPLY}
    assert Bench("partial-error").injector.kinds == {PULL_REPLY, PULL_REQUEST}
    idle = Bench("abort")
    assert (idle.injector.kinds, idle.bus.interceptor) == (frozenset(), None)


def test_a_conversation_is_left_alone_once_every_fault_has_decided_against_it() -> None:
    bench = Bench("timeout:nth=2", "timeout:nth=3")
    messages = [reply("a"), reply("b"), reply("c"), reply("d")]
    keys = [message.conversation for message in messages]
    assert not bench.injector.has_passed(PULL_REPLY, keys[0])  # nobody has been asked yet
    bench.post(*messages)
    assert [bench.injector.has_passed(PULL_REPLY, key) for key in keys] == [True, False, False, True]


def test_a_conversation_is_lost_once_a_fault_drops_all_of_it_and_no_other_may_act_on_it() -> None:
    messages = [reply("a"), reply("b")]
    keys = [message.conversation for message in messages]
    bench = Bench("timeout:nth=1")
    assert not bench.injector.swallows(PULL_REPLY, keys[0])
    bench.post(*messages)
    assert [bench.injector.swallows(PULL_REPLY, key) for key in keys] == [True, False]
    beside = Bench("timeout:nth=1", "mooncake.resp-duplicate:nth=2").post(*messages)
    assert [beside.injector.swallows(PULL_REPLY, key) for key in keys] == [True, False]


def test_only_events_that_a_fault_waits_for_are_observed() -> None:
    assert Bench("timeout:p=0.1").injector.observed_kinds == frozenset()
    assert Bench("timeout").injector.sink is not None
    assert Bench("abort").injector.observed_kinds == {"pull.sent", "request.routed"}
    assert Bench("slow:until=pull.*").injector.observed_kinds == {"pull.sent", "pull.replied", "pull.settled"}


def test_healing_ends_all_faults_and_lets_go_what_is_held() -> None:
    bench = Bench("timeout", "slow:until=engine.crashed", "abort").post(write("a"), reply("a"))
    assert bench.num_arrived == 0
    bench.at(5.0)
    bench.injector.heal()
    bench.post(reply("b"))
    bench.emit("pull.sent", request_id="b", instance="D0")
    bench.run()
    assert [address for _, address, _ in bench.arrived] == ["D0/memory/0", "D0/mooncake/0"]
    assert bench.commands == []
    assert bench.injector.num_held == 0


def test_statistics_say_what_fired_and_what_did_not() -> None:
    bench = Bench("timeout:request=a*", "corrupt").post(pull("a2", "a1"), reply("a2", "a1"), reply("b"), reply("a3"))
    assert bench.injector.statistics() == [
        FaultStatistics("timeout:request=a*", 2, ["a1", "a2", "a3"]),
        FaultStatistics("corrupt", 0, []),
    ]


PROGRAM = """
from tests.faults.bench import *
bench = Bench("timeout:p=0.3", "corrupt:p=0.3", "partial-error:p=0.5", seed=7)
for number in range(50):
    bench.post(pull(f"r{number}", "x"), write(f"r{number}"), reply(f"r{number}", "x"))
print([tuple(event) for event in bench.events.events])
print([(at, to, envelope.corruptions, str(envelope.payload)[:60]) for at, to, envelope in bench.arrived])
"""


def test_the_same_plan_and_seed_do_the_same_in_every_process() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1")
    }
    assert len(outputs) == 1
    assert "fault.injected" in outputs.pop()
