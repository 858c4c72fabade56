"""The summary: every number of it from a trace's own rows."""

import json
from collections.abc import Callable

import pytest

from kvreplay.checkers.finding import Finding
from kvreplay.errors import TraceError
from kvreplay.events import Event
from kvreplay.ids import NS_PER_S
from kvreplay.verdict.model import Summary, summary_from_json
from kvreplay.verdict.summary import PlannedFault

SumUp = Callable[..., Summary]


def arrived(request_id: str, at_s: float = 0) -> Event:
    return Event("request.arrived", ns(at_s), request_id=request_id, prompt_tokens=64, output_tokens=5)


def routed(request_id: str, at_s: float = 0) -> Event:
    return Event("request.routed", ns(at_s), "D0", request_id=request_id, peer="P0", transfer_id=f"x-{request_id}")


def on(instance: str, kind: str, request_id: str, at_s: float, **columns: object) -> Event:
    return Event(kind, ns(at_s), instance, 1, request_id, **columns)  # type: ignore[arg-type]


def ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)


def finished(request_id: str, at_s: float, first_token_s: float, num_tokens: int = 5) -> list[Event]:
    """Both legs of a pair; the producer's comes first and does not count."""
    return [
        on("P0", "request.first_token", request_id, first_token_s / 2),
        on("P0", "request.finished", request_id, first_token_s / 2, num_tokens=1, status="length"),
        on("D0", "request.first_token", request_id, first_token_s),
        on("D0", "request.finished", request_id, at_s, num_tokens=num_tokens, status="length"),
    ]


def stalled(request_id: str, at_s: float, since_s: float, instance: str = "D0", num_blocks: int = 4) -> Event:
    return on(
        instance,
        "request.stalled",
        request_id,
        at_s,
        num_tokens=ns(since_s),
        num_blocks=num_blocks,
        status="WAITING_FOR_REMOTE_KVS",
        cause="the reply of a pull",
        peer="P0",
        transfer_id=f"x-{request_id}",
    )


def fault(request_id: str | None, at_s: float, spec: str = "timeout:p=0.5") -> Event:
    return Event("fault.injected", ns(at_s), "D0", 1, request_id, peer="P0", status="timeout", cause=spec)


def usage(instance: str, at_s: float, **values: int) -> list[Event]:
    return [Event("usage", ns(at_s), instance, 1, status=name, num_tokens=value) for name, value in values.items()]


def arrivals(*request_ids: str) -> list[Event]:
    return [event for name in request_ids for event in (arrived(name), routed(name))]


# -- requests -------------------------------------------------------------------------------------------------


def test_a_request_is_what_its_client_sees(sum_up: SumUp) -> None:
    summary = sum_up(
        *arrivals("done", "failed", "aborted", "parked"),
        arrived("refused"),
        arrived("never-sent"),
        *finished("done", 9, 2),
        on("P0", "request.finished", "failed", 1, num_tokens=1, status="length"),
        on("D0", "request.failed", "failed", 3, num_tokens=0, cause="kv load failure"),
        Event("request.aborted", ns(2), request_id="aborted"),
        on("D0", "request.aborted", "aborted", 3, num_tokens=2),
        Event("request.rejected", ns(1), request_id="refused", cause="too long"),
        stalled("parked", 20, 1),
    )
    requests = summary.requests
    assert (requests.total, requests.finished, requests.failed, requests.aborted) == (6, 1, 1, 1)
    assert (requests.rejected, requests.stalled, requests.lost, requests.unfinished) == (1, 1, 1, 1)
    assert [(reason.outcome, reason.cause, reason.count) for reason in summary.reasons] == [
        ("aborted", "", 1),
        ("failed", "kv load failure", 1),
        ("rejected", "too long", 1),
    ]


def test_faulted_failures_are_told_from_others(sum_up: SumUp) -> None:
    failures = [on("D0", "request.failed", name, 3, num_tokens=0, cause="load") for name in ("r1", "r2", "r3")]
    summary = sum_up(*arrivals("r1", "r2", "r3"), fault("r1", 2), fault("r3", 2), *failures)
    assert (summary.requests.failed, summary.requests.failed_unfaulted) == (3, 1)


def test_a_crash_of_the_whole_instance_explains_its_failures(sum_up: SumUp) -> None:
    failure = on("D0", "request.failed", "r1", 3, num_tokens=0, cause="instance crashed")
    requests = sum_up(*arrivals("r1"), fault(None, 2, "peer-crash"), failure).requests
    assert (requests.failed, requests.failed_unfaulted) == (1, 0)


def test_a_stall_says_since_when_on_what_and_at_what_cost(sum_up: SumUp) -> None:
    summary = sum_up(*arrivals("r1"), fault("r1", 3), stalled("r1", at_s=20, since_s=5))
    [stall] = summary.stalled
    assert (stall.request_id, stall.instance, stall.status) == ("r1", "D0", "WAITING_FOR_REMOTE_KVS")
    assert (stall.waiting_on, stall.peer, stall.transfer_id) == ("the reply of a pull", "P0", "x-r1")
    assert (stall.since_s, stall.blocks_held, stall.block_seconds) == (5.0, 4, 60.0)
    assert (stall.fault, stall.ended) == ("timeout:p=0.5", None)
    assert (summary.verdict, summary.exit_status) == ("stalled", 4)


def test_what_only_the_fault_held_up_is_told_from_what_is_lost(sum_up: SumUp) -> None:
    """Healing ends r1 after the proof; while the fault lasted it would have waited for ever all the same."""
    summary = sum_up(
        *arrivals("r1", "r2"),
        stalled("r1", 20, 5),
        stalled("r2", 20, 5),
        *finished("r1", 30, 29),
        stalled("r2", 40, 5),
    )
    assert (summary.requests.stalled, summary.requests.held_up, summary.requests.lost) == (2, 1, 1)
    assert summary.requests.finished == 0
    assert {stall.request_id: stall.ended for stall in summary.stalled} == {"r1": "finished", "r2": None}
    assert summary.latency_s.e2e.count == 0


def test_a_leg_that_stalls_behind_an_answered_request_counts_once(sum_up: SumUp) -> None:
    summary = sum_up(*arrivals("r1"), *finished("r1", 9, 2)[2:], stalled("r1", 20, 1, instance="P0"))
    assert (summary.requests.finished, summary.requests.stalled, len(summary.stalled)) == (1, 0, 1)
    assert summary.verdict == "stalled"


def test_overdue_is_parked_beyond_the_timers_and_ended_later(sum_up: SumUp) -> None:
    def parked(name: str, at_s: float, until_s: float) -> list[Event]:
        end = on("D0", "request.promoted", name, until_s, num_tokens=64, status="ok")
        return [on("D0", "request.parked", name, at_s, num_tokens=64, num_blocks=4), end]

    events = [*arrivals("on-time", "late", "for-ever"), *parked("on-time", 0, 490), *parked("late", 0, 491)]
    for_ever = [on("D0", "request.parked", "for-ever", 0, num_tokens=64, num_blocks=4), stalled("for-ever", 900, 0)]
    summary = sum_up(*events, *for_ever, path_timers_ns=ns(480))
    assert [(wait.request_id, wait.parked_s) for wait in summary.overdue] == [("late", 491.0)]
    assert summary.requests.overdue == 1


# -- latency --------------------------------------------------------------------------------------------------


def test_latencies_are_the_client_s(sum_up: SumUp) -> None:
    latency = sum_up(arrived("r1", 1), routed("r1", 1), *finished("r1", at_s=7, first_token_s=3)).latency_s
    assert (latency.ttft.p50, latency.tpot.p50, latency.e2e.p50) == (2.0, 1.0, 6.0)


def test_a_single_token_has_no_time_per_token(sum_up: SumUp) -> None:
    latency = sum_up(*arrivals("r1"), *finished("r1", at_s=3, first_token_s=3, num_tokens=1)).latency_s
    assert (latency.tpot.p50, latency.tpot.count, latency.ttft.count) == (None, 0, 1)


def test_percentiles_are_measured_values_of_nearest_rank(sum_up: SumUp) -> None:
    names = [f"r{index:03}" for index in range(101)]
    events = [event for place, name in enumerate(names) for event in finished(name, 200, place + 1)]
    ttft = sum_up(*arrivals(*names), *events).latency_s.ttft
    assert (ttft.p50, ttft.p90, ttft.p99, ttft.count) == (51.0, 91.0, 100.0, 101)


@pytest.mark.parametrize(("count", "p50", "p90"), [(1, 1.0, 1.0), (2, 2.0, 2.0), (3, 2.0, 3.0), (4, 3.0, 4.0)])
def test_percentiles_of_few_values(sum_up: SumUp, count: int, p50: float, p90: float) -> None:
    names = [f"r{index}" for index in range(count)]
    events = [event for place, name in enumerate(names) for event in finished(name, 200, place + 1)]
    ttft = sum_up(*arrivals(*names), *events).latency_s.ttft
    assert (ttft.p50, ttft.p90) == (p50, p90)


# -- tokens and blocks ----------------------------------------------------------------------------------------


def test_recomputed_tokens_re_add_from_their_events(sum_up: SumUp) -> None:
    summary = sum_up(
        *arrivals("r1"),
        on("D0", "tokens.recomputed", "r1", 1, num_tokens=60, cause="load-failure"),
        on("D0", "tokens.recomputed", "r1", 2, num_tokens=4, cause="load-failure"),
        on("P0", "tokens.recomputed", "r1", 3, num_tokens=16, cause="eviction"),
    )
    recomputed = summary.recomputed_tokens
    assert (recomputed.total, recomputed.by_cause) == (80, {"eviction": 16, "load-failure": 64})
    assert recomputed.by_instance == {"D0": {"load-failure": 64}, "P0": {"eviction": 16}}


def test_evictions_are_summed_by_cause_and_group(sum_up: SumUp) -> None:
    def evicted(num_blocks: int, group: int, cause: str) -> Event:
        return Event("block.evicted", 5, "D0", 1, group=group, num_blocks=num_blocks, cause=cause)

    summary = sum_up(evicted(3, 0, "capacity"), evicted(4, 1, "capacity"), evicted(2, 0, "load-failure"))
    assert summary.evicted_blocks.total == 9
    assert summary.evicted_blocks.by_cause == {"capacity": 7, "load-failure": 2}
    assert summary.evicted_blocks.by_group == {"0": 5, "1": 4}
    assert summary.evicted_blocks.by_group_and_cause["0"] == {"capacity": 3, "load-failure": 2}


def test_loads_are_counted_with_the_causes_of_their_failures(sum_up: SumUp) -> None:
    summary = sum_up(
        *arrivals("r1", "r2"),
        *(on("D0", "load.started", name, 1, num_tokens=64, num_blocks=4) for name in ("r1", "r2")),
        on("D0", "load.finished", "r1", 2, num_tokens=64),
        on("D0", "load.failed", "r2", 2, num_tokens=64, status="request", cause="timeout"),
        on("D0", "pull.sent", "r2", 1, peer="P0"),
        on("D0", "pull.settled", "r2", 2, peer="P0", status="failed", cause="timeout", cause_handle=6),
    )
    loads = summary.loads
    assert (loads.started, loads.finished, loads.failed, loads.finished_tokens, loads.failed_tokens) == (
        2,
        1,
        1,
        64,
        64,
    )
    assert (loads.failed_by_cause, loads.pulls_failed_by_cause) == ({"timeout": 1}, {"timeout": 1})
    assert (loads.pulls_sent, loads.pulls_settled, loads.pulls_unsent) == (1, 1, 0)


def test_a_load_whose_parts_fail_one_after_the_other_has_failed_once(sum_up: SumUp) -> None:
    def failed(time_ns: int, cause: str) -> Event:
        return on("D0", "load.failed", "r1", time_ns, num_tokens=16, status="blocks", cause=cause)

    summary = sum_up(
        *arrivals("r1"),
        on("D0", "load.started", "r1", 1, num_tokens=64, num_blocks=4),
        failed(2, "one part"),
        failed(3, "another"),
        on("D0", "load.started", "r1", 4, num_tokens=64, num_blocks=4),
        failed(5, "again"),
    )
    loads = summary.loads
    assert (loads.started, loads.failed, loads.failed_tokens) == (2, 2, 48)
    assert loads.failed_by_cause == {"one part": 1, "again": 1}


def test_a_pull_asked_for_again_counts_once_and_one_never_asked_for_by_itself(sum_up: SumUp) -> None:
    summary = sum_up(
        *arrivals("r1", "r2"),
        on("D0", "pull.sent", "r1", 1, peer="P0"),
        on("D0", "pull.replied", "r1", 2, peer="P0", status="LAYOUT_MISS", cause_handle=2),
        on("D0", "pull.sent", "r1", 2, peer="P0", cause_handle=3),
        on("D0", "pull.settled", "r2", 2, peer="P0", status="failed", cause="no bootstrap server"),
        on("D0", "pull.settled", "r1", 3, peer="P0", status="ok", cause_handle=4),
    )
    loads = summary.loads
    assert (loads.pulls_sent, loads.pulls_settled, loads.pulls_unsent) == (1, 1, 1)
    assert loads.pulls_failed_by_cause == {"no bootstrap server": 1}


# -- instances ------------------------------------------------------------------------------------------------


def test_instances_are_summed_from_usage(sum_up: SumUp) -> None:
    summary = sum_up(
        *usage("D0", 10, steps=100, busy_ns=ns(4), preemptions=1, blocks=7, peak_blocks=9, num_gpu_blocks=64),
        *usage("D0", 20, steps=150, busy_ns=ns(5), preemptions=3, blocks=5, peak_blocks=9, num_gpu_blocks=64),
        *usage("P0", 20, computed_tokens=640, loaded_tokens=0, steps=3),
        *usage("D0", 20, computed_tokens=5, loaded_tokens=64),
    )
    producer, consumer = summary.instances
    assert (producer.id, producer.role, producer.steps) == ("P0", "prefill", 3)
    assert (consumer.id, consumer.role, consumer.steps, consumer.preemptions) == ("D0", "decode", 150, 3)
    assert (consumer.peak_blocks, consumer.num_gpu_blocks, consumer.utilisation) == (9, 64, 0.25)
    assert (summary.computed_tokens, summary.loaded_tokens) == (645, 64)


def test_busy_is_over_the_time_up_to_the_last_work(sum_up: SumUp) -> None:
    """A wait of 540 s for a timer at the end of a run says nothing of how busy an instance was."""
    summary = sum_up(
        *arrivals("r1"),
        *usage("P0", 10, busy_ns=ns(2)),
        *usage("D0", 10, busy_ns=ns(0)),
        *finished("r1", 16, 8),
        *usage("P0", 20, busy_ns=ns(2)),
        *usage("D0", 20, busy_ns=ns(4)),
        *usage("P0", 560, busy_ns=ns(2)),
        *usage("D0", 560, busy_ns=ns(4)),
    )
    producer, consumer = summary.instances
    assert (producer.busy, producer.busy_until_s) == (0.5, 4.0)
    assert (consumer.busy, consumer.busy_until_s) == (0.25, 16.0)
    assert consumer.utilisation == round(4 / 560, 6)


def test_work_ends_no_earlier_than_it_takes(sum_up: SumUp) -> None:
    """Whatever came of what it computed after its last first token: here the engine hangs at 8 s."""
    samples = [*usage("D0", 10, busy_ns=ns(8), steps=3), *usage("D0", 20, busy_ns=ns(8))]
    summary = sum_up(*arrivals("r1"), Event("request.first_token", ns(2), "D0", 0, "r1"), *samples)
    assert (summary.instances[-1].busy, summary.instances[-1].busy_until_s) == (1.0, 8.0)


def test_without_a_sign_of_it_work_ends_with_the_sample_that_shows_it(sum_up: SumUp) -> None:
    samples = [*usage("D0", 10, busy_ns=ns(5)), *usage("D0", 20, busy_ns=ns(5)), *usage("P0", 20, busy_ns=0)]
    idle, busy = sum_up(arrived("r1"), *samples).instances
    assert (busy.busy, busy.busy_until_s) == (0.5, 10.0)
    assert (idle.busy, idle.busy_until_s) == (None, None)


def test_a_step_that_was_made_to_raise_is_behind_a_death_whatever_came_between(sum_up: SumUp) -> None:
    raises, resets = "engine.step-raises", "cache.reset"
    told = sum_up(
        Event("fault.injected", ns(3), "D0", status=raises, cause=f"{raises}:at=3s"),
        Event("fault.injected", ns(3), "D0", status=resets, cause=f"{resets}:at=3s"),
        Event("engine.crashed", ns(4), "D0", 7, status="RuntimeError", cause="injected"),
        Event("fault.injected", ns(9), "D0", status=resets, cause=f"{resets}:at=9s"),
        Event("engine.crashed", ns(9), "D0", 2, status="AssertionError", cause="no"),
    )
    assert [crash.fault for crash in told.crashes] == [f"{raises}:at=3s", f"{resets}:at=9s"]


def test_who_never_came_up_died_of_what_kept_it_from_that(sum_up: SumUp) -> None:
    register, resets = "mooncake.register-timeout", "cache.reset"
    told = sum_up(
        Event("fault.injected", ns(3), "P0", status=register, cause=register),
        Event("fault.injected", ns(4), "P0", status=resets, cause=f"{resets}:at=4s"),
        Event("engine.crashed", ns(93), "P0", -1, status="RuntimeError", cause="Failed to register"),
        Event("fault.injected", ns(94), "P0", status=register, cause=register),
        Event("fault.injected", ns(95), "P0", status=resets, cause=f"{resets}:at=95s"),
        Event("engine.crashed", ns(96), "P0", 7, status="AssertionError", cause="no"),
    )
    assert [crash.fault for crash in told.crashes] == [register, f"{resets}:at=95s"]


@pytest.mark.parametrize(
    ("fault", "blamed"),
    [
        # On a message of its own request; on a request that it serves; elsewhere; after it.
        (Event("fault.injected", ns(3), "D0", request_id="r9", status="slow", cause="slow:id=1"), "slow:id=1"),
        (Event("fault.injected", ns(3), request_id="r1", status="slow", cause="slow:id=1"), "slow:id=1"),
        (Event("fault.injected", ns(3), "D1", request_id="r2", status="slow", cause="slow:id=1"), None),
        (Event("fault.injected", ns(6), "D0", request_id="r1", status="slow", cause="slow:id=1"), None),
    ],
)
def test_a_crash_is_blamed_on_the_last_fault_there_and_what_is_refused_later_too(
    sum_up: SumUp, fault: Event, blamed: str | None
) -> None:
    told = sum_up(
        arrived("r1", 1),
        Event("request.routed", ns(1), "D0", request_id="r1"),
        fault,
        Event("engine.crashed", ns(5), "D0", 7, status="AssertionError", cause="no"),
        Event("request.failed", ns(5), "D0", 7, "r1", num_tokens=0, cause="engine dead: AssertionError"),
        arrived("r5", 8),
        Event("request.routed", ns(8), "D0", request_id="r5"),
        Event("request.rejected", ns(8), "D0", request_id="r5", cause="connection refused"),
    )
    assert [crash.fault for crash in told.crashes] == [blamed]
    followed = {"rejected": 1} if blamed else {}
    assert told.requests.rejected_unfaulted == (0 if blamed else 1)
    assert {name: count for name, count in told.faults[0].followed.items() if name == "rejected"} == followed


def test_only_requests_of_clients_are_named(sum_up: SumUp) -> None:
    """A fault may also meet the pulls with which another saturates a queue."""
    told = sum_up(
        arrived("r1", 1),
        Event("fault.injected", ns(3), "D0", request_id="r1", status="timeout", cause="timeout:p=0.5"),
        Event("fault.injected", ns(3), "D0", request_id="r1/queued/0", status="timeout", cause="timeout:p=0.5"),
    )
    (fault,) = told.faults
    assert fault.requests == sum(fault.outcomes.values()) == 1


def test_a_leg_that_a_dead_producer_has_lost_is_put_down_to_that(sum_up: SumUp) -> None:
    """Its client is refused where the other leg has not been sent yet."""
    told = sum_up(
        Event("fault.injected", ns(3), "P0", status="peer-crash", cause="peer-crash:at=3s"),
        arrived("r1", 4),
        Event("request.routed", ns(4), "D0", request_id="r1", peer="P0"),
        Event("request.rejected", ns(4), "D0", request_id="r1", cause="prefill failed"),
        arrived("r2", 4),
        Event("request.routed", ns(4), "D0", request_id="r2", peer="P1"),
        Event("request.rejected", ns(4), "D0", request_id="r2", cause="prefill failed"),
    )
    assert told.faults[0].followed == {"rejected": 1}
    assert told.requests.rejected_unfaulted == 1


def test_counters_survive_a_restart(sum_up: SumUp) -> None:
    samples = [
        event for at, steps in ((10, 100), (20, 150), (30, 20), (40, 30)) for event in usage("D0", at, steps=steps)
    ]
    assert sum_up(*samples).instances[1].steps == 180


@pytest.mark.parametrize(
    ("busy_s", "waiting", "overloaded"),
    [
        ((9, 18, 27, 36), (1, 0, 1, 0), None),
        ((10, 20, 30, 39), (0, 0, 0, 0), "computed 98 % of the time"),
        ((9, 18, 27, 36), (0, 2, 3, 1), "its queue never emptied"),
        ((9, 18, 27, 36), (5, 2, 3, 0), None),
    ],
)
def test_an_instance_is_overloaded_by_the_stated_rule(
    sum_up: SumUp, busy_s: tuple[int, ...], waiting: tuple[int, ...], overloaded: str | None
) -> None:
    """Judged up to the last arrival, at 40 s; that it idles afterwards does not help it."""
    samples = [
        event
        for place, (busy, queue) in enumerate(zip(busy_s, waiting, strict=True), 1)
        for event in usage("P0", place * 10, busy_ns=ns(busy), waiting=queue + 3, deferred=3)
    ]
    idle = usage("P0", 400, busy_ns=ns(busy_s[-1]), waiting=0)
    assert sum_up(arrived("r1"), *samples, arrived("r2", 40), *idle).instances[0].overloaded == overloaded


def test_that_traffic_begins_late_changes_nothing(sum_up: SumUp) -> None:
    """After ten minutes of silence a producer computes for 39 of 40 s, and a queue is there in all of the last 20."""
    samples = [
        event
        for place, queue in enumerate((0, 1, 1, 1), 1)
        for name, busy in (("P0", place * 10 - 1), ("D0", 1))
        for event in usage(name, 600 + place * 10, busy_ns=ns(busy), waiting=queue if name == "D0" else 0)
    ]
    told = sum_up(arrived("r1", 600), *samples, arrived("r2", 640))
    assert [one.overloaded for one in told.instances[:2]] == ["computed 98 % of the time", "its queue never emptied"]


def test_a_decode_instance_is_not_overloaded_for_computing_all_the_time(sum_up: SumUp) -> None:
    samples = [event for place in (1, 2, 3, 4) for event in usage("D0", place * 10, busy_ns=ns(place * 10), waiting=0)]
    assert sum_up(arrived("r1"), *samples, arrived("r2", 40)).instances[1].overloaded is None


def test_series_add_up_the_instances_of_a_role(sum_up: SumUp) -> None:
    samples = [
        *usage("D0", 10, blocks=5, running=1, waiting=3, deferred=2, num_gpu_blocks=64),
        *usage("D1", 10, blocks=7, running=2, waiting=0, deferred=0, num_gpu_blocks=64),
        *usage("D0", 20, blocks=1, running=0, waiting=5, deferred=1, num_gpu_blocks=64),
    ]
    [line] = sum_up(*samples, roles={"D0": "decode", "D1": "decode"}).series
    assert (line.role, line.num_instances, line.capacity_blocks) == ("decode", 2, 128)
    assert (line.time_s, line.blocks, line.running) == ([10.0, 20.0], [12, 8], [3, 2])
    assert (line.queued, line.deferred) == ([1, 4], [2, 1])


def test_where_no_sample_was_taken_the_last_one_holds(sum_up: SumUp) -> None:
    """Not the highest of its point."""
    samples = [
        *usage("E0", 1, running=3),
        *usage("E0", 2, running=1),
        *(event for number in range(10, 2000) for event in usage("E1", number * 10, running=0)),
    ]
    [line] = sum_up(*samples).series
    assert line.running[0] == 3
    assert set(line.running[1:]) == {1}


def test_series_stay_short_and_keep_their_peaks(sum_up: SumUp) -> None:
    samples = [event for at in range(1, 2001) for event in usage("D0", at, blocks=9 if at == 777 else 1)]
    [line] = sum_up(*samples).series
    assert len(line.time_s) == len(line.blocks) <= 360
    assert max(line.blocks) == 9


# -- faults, crashes, violations ------------------------------------------------------------------------------


def test_faults_are_listed_as_planned_with_what_became_of_their_requests(sum_up: SumUp) -> None:
    summary = sum_up(
        *arrivals("r1", "r2"),
        fault("r1", 2),
        fault("r2", 2),
        on("D0", "request.failed", "r1", 3, num_tokens=0, cause="load"),
        *finished("r2", 9, 4),
        faults=[PlannedFault(spec="corrupt:nth=7", fired=0), PlannedFault(spec="timeout:p=0.5", fired=2)],
    )
    unfired, fired = summary.faults
    assert (unfired.spec, unfired.fired, unfired.requests) == ("corrupt:nth=7", 0, 0)
    assert (fired.spec, fired.name, fired.fired, fired.requests) == ("timeout:p=0.5", "timeout", 2, 2)
    assert fired.outcomes == {"failed": 1, "finished": 1}


def test_a_fault_on_an_instance_explains_what_fails_there_later(sum_up: SumUp) -> None:
    crash = Event("fault.injected", ns(4), "P0", 1, "r1", status="peer-crash", cause="peer-crash:at=4s")
    summary = sum_up(
        *arrivals("r1", "r2", "r3", "r4", "r5"),
        on("D0", "request.failed", "r5", 3, num_tokens=0, cause="before it"),
        crash,
        fault("r4", 5),
        *(on("D0", "request.failed", name, 9, num_tokens=0, cause="load") for name in ("r1", "r2", "r4")),
        *finished("r3", 9, 2),
    )
    crashed, named = summary.faults
    assert (crashed.requests, crashed.outcomes, crashed.followed) == (1, {"failed": 1}, {"failed": 1})
    assert (named.requests, named.outcomes, named.followed) == (1, {"failed": 1}, {})


def test_who_is_refused_where_a_fault_took_the_instance_down_follows_from_it(sum_up: SumUp) -> None:
    crash = Event("fault.injected", ns(4), "D0", 1, status="peer-crash", cause="peer-crash:at=4s,instance=D0")
    summary = sum_up(
        *arrivals("r1", "r2", "r3"),
        on("D0", "request.rejected", "r1", 3, cause="connection refused"),
        crash,
        on("D0", "request.rejected", "r2", 9, cause="connection refused"),
        on("D0", "request.rejected", "r3", 9, cause="max_model_len of 10 exceeded"),
    )
    [crashed] = summary.faults
    assert (crashed.acted_on, crashed.followed, crashed.fired_late) == (["D0"], {"rejected": 1}, 0)
    assert (summary.requests.rejected, summary.requests.rejected_unfaulted) == (3, 2)


def test_who_stalls_behind_a_fault_that_named_others_follows_from_it(sum_up: SumUp) -> None:
    blamed = stalled("r2", 20, 5)._replace(cause_handle=len(arrivals("r1", "r2", "r3")))
    summary = sum_up(*arrivals("r1", "r2", "r3"), fault("r1", 2), stalled("r1", 20, 5), blamed, stalled("r3", 20, 5))
    assert [stall.fault for stall in summary.stalled] == ["timeout:p=0.5", "timeout:p=0.5", None]
    [lost] = summary.faults
    assert (lost.outcomes, lost.followed) == ({"stalled": 1}, {"stalled": 1})


@pytest.mark.parametrize(("at_s", "late"), [(8.9, 0), (9, 1), (60, 1)])
def test_an_action_when_every_request_has_ended_tests_nothing(sum_up: SumUp, at_s: float, late: int) -> None:
    crash = Event("fault.injected", ns(at_s), "P0", 1, status="peer-crash", cause="peer-crash")
    [crashed] = sum_up(*arrivals("r1"), *finished("r1", 9, 2), crash).faults
    assert (crashed.fired, crashed.fired_late, crashed.has_tested) == (1, late, not late)
    [crashed] = sum_up(*arrivals("r1", "r2"), *finished("r1", 9, 2), crash).faults
    assert crashed.has_tested


def test_without_the_plan_s_count_rows_of_one_moment_are_one_firing(sum_up: SumUp) -> None:
    [found] = sum_up(*arrivals("r1", "r2", "r3"), fault("r1", 2), fault("r2", 2), fault("r3", 5)).faults
    assert (found.fired, found.requests) == (2, 3)


def test_a_crash_comes_with_what_it_implies(sum_up: SumUp) -> None:
    crash = Event("engine.crashed", ns(4), "D0", 17, status="AssertionError", cause="block 3")
    summary = sum_up(*arrivals("r1"), crash, findings=[Finding("NO-FATAL", ns(4), "the engine died", "D0")])
    assert (summary.verdict, summary.exit_status, summary.violations) == ("crashed", 5, [])
    [found] = summary.crashes
    assert (found.instance, found.time_s, found.step, found.exception) == ("D0", 4.0, 17, "AssertionError")
    assert found.implied == {"NO-FATAL": 1}


def test_violations_come_from_the_trace_and_from_its_checkers(sum_up: SumUp) -> None:
    trace = [*arrivals("r1"), fault("r1", 2, "corrupt:nth=1")]
    row = on("D0", "violation", "r1", 5, status="CONTENT", cause="wrong", block_ids=[3], group=0, cause_handle=2)
    late = Finding("FENCE", ns(6), "given away", "D0", "r1")
    summary = sum_up(*trace, row, findings=[late])
    assert (summary.verdict, summary.exit_status) == ("violated", 3)
    assert summary.reason == "2 violations: CONTENT 1, FENCE 1"
    first, second = summary.violations
    assert (first.checker, first.block_id, first.group, first.fault) == ("CONTENT", 3, 0, "corrupt:nth=1")
    assert (second.checker, second.fault) == ("FENCE", None)


def test_a_stall_takes_what_it_implies_out_of_the_violations(sum_up: SumUp) -> None:
    held = Finding("CONSERVATION", ns(20), "4 blocks still held", "D0", "r1", block_id=1)
    idle = Finding("PROGRESS", ns(20), "1 unfinished", "D0")
    summary = sum_up(*arrivals("r1"), stalled("r1", 20, 5), findings=[held, idle])
    assert summary.violations == []
    assert summary.stalled[0].implied == {"CONSERVATION": 1, "PROGRESS": 1}


# -- as JSON --------------------------------------------------------------------------------------------------

KEYS = {
    "": "verdict exit_status fingerprint seed profile virtual_seconds wall_seconds requests stalled recomputed_tokens"
    " computed_tokens loaded_tokens evicted_blocks violations faults crashes latency_s instances",
    "requests": "total finished failed aborted rejected stalled overdue",
    "stalled": "request_id instance status since_s waiting_on blocks_held block_seconds",
    "recomputed_tokens": "total by_cause",
    "evicted_blocks": "total by_cause by_group",
    "violations": "checker time_s instance request_id block_id group transfer_id detail fault",
    "faults": "spec fired requests",
    "crashes": "instance time_s step exception message",
    "latency_s": "ttft tpot e2e",
    "instances": "id role steps peak_blocks preemptions utilisation",
}


def test_json_has_the_keys_that_are_promised(sum_up: SumUp) -> None:
    crash = Event("engine.crashed", ns(30), "P0", 17, status="AssertionError", cause="block 3")
    summary = sum_up(
        *arrivals("r1"), fault("r1", 2), stalled("r1", 20, 5), crash, findings=[Finding("FENCE", 1, "given away")]
    )
    document = json.loads(summary.to_json())
    for name, keys in KEYS.items():
        part = document[name] if name else document
        part = part[0] if isinstance(part, list) else part
        assert set(keys.split()) <= set(part), name
    assert set(document["latency_s"]["ttft"]) >= {"p50", "p90", "p99"}
    assert document["wall_seconds"] is None
    assert (document["seed"], document["profile"]) == (7, "vllm-0.33")


def test_json_reads_back_as_the_same_summary(sum_up: SumUp) -> None:
    summary = sum_up(*arrivals("r1", "r2"), *finished("r1", 9, 2), stalled("r2", 20, 5), *usage("D0", 9, blocks=3))
    assert summary_from_json(summary.to_json()) == summary


def test_a_summary_of_an_older_version_reads_with_defaults(sum_up: SumUp) -> None:
    document = json.loads(sum_up(*arrivals("r1"), *finished("r1", 9, 2)).to_json())
    old = {name: document[name] for name in KEYS[""].split()}
    assert summary_from_json(json.dumps(old)).series == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"verdict": 1}', "[" * 100_000])
def test_what_is_no_summary_is_refused(text: str) -> None:
    with pytest.raises(TraceError, match=r"^run.summary: not a summary that this version can read: "):
        summary_from_json(text)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("verdict", "green"),
        ("exit_status", 7),
        ("series", [{"role": "decode", "num_instances": 1, "capacity_blocks": 4}]),
    ],
)
def test_a_tampered_summary_is_refused(sum_up: SumUp, key: str, value: object) -> None:
    document = json.loads(sum_up().to_json())
    with pytest.raises(TraceError, match=rf"\$\.{key}"):
        summary_from_json(json.dumps({**document, key: value}))


def test_lines_of_different_lengths_are_refused(sum_up: SumUp) -> None:
    document = json.loads(sum_up(*usage("D0", 10, blocks=5)).to_json())
    document["series"][0]["running"].append(3)
    with pytest.raises(TraceError, match="lines of one and the same length expected"):
        summary_from_json(json.dumps(document))


def test_an_empty_run_passes(sum_up: SumUp) -> None:
    summary = sum_up()
    assert (summary.verdict, summary.reason, summary.virtual_seconds) == ("passed", "no requests", 0.0)


def test_a_baseline_stands_beside_its_run(sum_up: SumUp) -> None:
    twin = sum_up(*arrivals("r1"), *finished("r1", 9, 2))
    run = sum_up(*arrivals("r1"), stalled("r1", 20, 5)).with_baseline(twin)
    assert run.baseline is not None
    assert (run.requests.finished, run.baseline.requests.finished) == (0, 1)
    assert summary_from_json(run.to_json()) == run
