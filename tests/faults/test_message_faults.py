"""What each fault of the Mooncake catalogue does to a message."""

import pytest

from kvreplay.connectors.mooncake.structs import BootstrapAnswer, WriteData, encode
from kvreplay.sim.envelope import Envelope
from tests.faults.bench import CONTINUE, ERROR, FINISH, Bench, pull, query, reply, write


def times(bench: Bench) -> list[float]:
    return [seconds for seconds, _, _ in bench.arrived]


# -- short names -----------------------------------------------------------------------------------------


def test_timeout_drops_every_reply_of_the_pull_and_names_its_requests_once() -> None:
    bench = Bench("timeout:request=a").post(
        pull("a", "b"),
        reply("a", status=CONTINUE),
        reply("b", index=1, pull_of="a"),
        reply("c"),
    )
    assert [address for _, address, _ in bench.arrived] == ["P0/mooncake/0", "D0/mooncake/0"]
    assert [(event.request_id, event.transfer_id) for event in bench.injected] == [("a", "xfer-a"), ("b", "xfer-b")]
    assert bench.fired() == [1]


def test_the_event_says_which_fault_it_was_and_where() -> None:
    event = Bench("timeout:p=1").post(reply("a")).injected[0]
    assert (event.status, event.cause, event.instance, event.peer) == ("timeout", "timeout:p=1", "D0", "P0")


def test_error_response_answers_in_the_producers_place() -> None:
    bench = Bench("error-response:message=no").post(pull("a", "b", rank=1))
    ((_, address, envelope),) = bench.arrived
    assert (address, envelope.source, envelope.kind) == ("D0/mooncake/1", "P0/mooncake/0", "pull.reply")
    assert (envelope.payload.status, envelope.payload.err_msg) == (ERROR, "no")
    assert envelope.conversation == "pull/D0/a"
    assert bench.faulted == ["a", "b"]


def test_partial_error_fails_exactly_one_request_of_the_pull() -> None:
    requests = [f"r{number}" for number in range(5)]
    bench = Bench("partial-error").post(pull(*requests), reply(*requests))
    ok_reqs, err_reqs = bench.payloads[1].ok_reqs, bench.payloads[1].err_reqs
    assert len(err_reqs) == 1
    assert sorted(ok_reqs + err_reqs) == requests
    assert bench.faulted == err_reqs


def test_partial_error_takes_its_share_of_the_pull_not_of_each_reply() -> None:
    requests = [f"r{number}" for number in range(4)]
    replies = [reply(request, status=CONTINUE, index=index, pull_of="r0") for index, request in enumerate(requests)]
    bench = Bench("partial-error:share=0.5").post(pull(*requests), *replies)
    failed = [name for payload in bench.payloads[1:] for name in payload.err_reqs or []]
    assert len(failed) == 2
    assert bench.faulted == failed
    assert bench.fired() == [1]


def test_partial_error_hits_the_request_that_is_asked_for() -> None:
    bench = Bench("partial-error:request=b").post(pull("a", "b", "c"), reply("a", "b", "c"))
    assert (bench.payloads[1].ok_reqs, bench.payloads[1].err_reqs) == (["a", "c"], ["b"])


@pytest.mark.parametrize(
    ("how", "answer"),
    [
        ("refused", BootstrapAnswer(0, None, "refused")),
        ("404", BootstrapAnswer(404, b'{"detail":"Not Found"}')),
        ("500", BootstrapAnswer(500, b"Internal Server Error")),
        ("garbage", BootstrapAnswer(200, b"<html>")),
        ("missing-engine", BootstrapAnswer(200, b"{}")),
        ("hang", None),
    ],
)
def test_bootstrap_failure_answers_every_attempt_of_the_query(how: str, answer: BootstrapAnswer | None) -> None:
    bench = Bench(f"bootstrap-failure:how={how}").post(query("a"), query("a", attempt=1))
    assert bench.payloads == ([] if answer is None else [answer, answer])
    assert [envelope.attempt for _, _, envelope in bench.arrived] == ([] if answer is None else [0, 1])
    assert bench.faulted == ["a"]


def test_slow_makes_one_write_later() -> None:
    bench = Bench("slow:nth=1,delay=5s").post(write("a"), write("a", number=1))
    assert times(bench) == [0.0, 5.0]


def test_a_late_write_can_wait_until_nobody_waits_for_it() -> None:
    bench = Bench("slow:until=pull.settled#self").post(write("a"))
    bench.emit("pull.settled", request_id="b")
    bench.run()
    assert (bench.num_arrived, bench.injector.num_held) == (0, 1)
    bench.at(540.0)
    bench.emit("pull.settled", request_id="a")
    bench.run()
    assert times(bench) == [540.0]


def blocks_of(data: WriteData, request_id: str, group: int | None = None) -> list[int]:
    """The numbers, within the write, of one request's blocks."""
    numbers: list[int] = []
    start = 0
    for segment in data.segments:
        end = start + len(segment.block_ids)
        if segment.request_id == request_id and group in (None, segment.group):
            numbers.extend(range(start, end))
        start = end
    return numbers


def test_corrupt_marks_one_block_and_names_its_owner_alone() -> None:
    bench = Bench("corrupt").post(write("a", "b", "c"))
    (corruption,) = bench.arrived[0][2].corruptions
    data = bench.payloads[0]
    owner = next(name for name in "abc" if corruption.block in blocks_of(data, name))
    assert bench.faulted == [owner]
    assert (corruption.fault_spec, corruption.fault_handle) == ("corrupt", 0)
    assert bench.events.events[corruption.fault_handle].kind == "fault.injected"


def test_corrupt_keeps_to_the_request_and_the_group_asked_for() -> None:
    for seed in range(8):
        bench = Bench("corrupt:request=b,group=1", seed=seed).post(write("a", "b"))
        (corruption,) = bench.arrived[0][2].corruptions
        assert corruption.block in blocks_of(bench.payloads[0], "b", group=1)


# -- long names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chosen", "arrives"), [("all", []), ("first", [1, 2]), ("last", [0, 1])])
def test_resp_lost_loses_the_replies_asked_for(chosen: str, arrives: list[int]) -> None:
    replies = [
        reply(name, index=index, pull_of="a", status=FINISH if index == 2 else CONTINUE)
        for index, name in enumerate("abc")
    ]
    bench = Bench(f"mooncake.resp-lost:reply={chosen}").post(*replies)
    assert [envelope.reply_index for _, _, envelope in bench.arrived] == arrives


def test_resp_delayed_outlasts_the_receive_timeout_by_default() -> None:
    bench = Bench("mooncake.resp-delayed").post(reply("a", status=CONTINUE), reply("b", index=1, pull_of="a"))
    assert times(bench) == [0.0, 600.0]


def test_resp_duplicate_names_requests_again_while_the_pull_is_open() -> None:
    bench = Bench("mooncake.resp-duplicate").post(reply("a"))
    assert [payload.status for payload in bench.payloads] == [CONTINUE, FINISH]
    assert [payload.ok_reqs for payload in bench.payloads] == [["a"], ["a"]]


def test_resp_reordered_lets_replies_overtake_each_other() -> None:
    replies = [reply(f"r{index}", index=index, pull_of="r0", status=CONTINUE) for index in range(20)]
    bench = Bench("mooncake.resp-reordered").post(*replies)
    arrived = [envelope.reply_index for _, _, envelope in bench.arrived]
    assert sorted(arrived) == list(range(20))
    assert arrived != list(range(20))
    assert max(times(bench)) <= 1.0


def test_resp_omit_leaves_a_request_out_of_both_lists() -> None:
    bench = Bench("mooncake.resp-omit:request=b").post(pull("a", "b"), reply("a", "b"))
    assert (bench.payloads[1].ok_reqs, bench.payloads[1].err_reqs) == (["a"], None)
    assert bench.faulted == ["b"]


def test_resp_unknown_id_names_a_stranger_too() -> None:
    ok_reqs = Bench("mooncake.resp-unknown-id").post(reply("a")).payloads[0].ok_reqs
    assert ok_reqs[0] == "a"
    assert ok_reqs[1].startswith("unknown-")


def test_resp_error_comes_after_so_many_good_replies() -> None:
    bench = Bench("mooncake.resp-error:replies=1").post(reply("a", status=CONTINUE), reply("b", index=1, pull_of="a"))
    assert [payload.status for payload in bench.payloads] == [CONTINUE, ERROR]


def test_resp_error_names_the_whole_pull() -> None:
    assert Bench("mooncake.resp-error").post(pull("a", "b"), reply("a", status=CONTINUE)).faulted == ["a", "b"]


def test_resp_garbage_cannot_be_decoded() -> None:
    assert Bench("mooncake.resp-garbage").post(reply("a")).payloads == [b"\xc1"]


def test_bootstrap_refused_can_let_a_later_attempt_through() -> None:
    bench = Bench("mooncake.bootstrap-refused:times=2").post(*(query("a", attempt=n) for n in range(3)))
    assert [envelope.kind for _, _, envelope in bench.arrived] == [
        "bootstrap.answer",
        "bootstrap.answer",
        "bootstrap.query",
    ]


def test_layout_miss_meets_pulls_that_rely_on_a_known_layout() -> None:
    bench = Bench("mooncake.layout-miss").post(pull("a"), pull("a", attempt=1))
    assert [envelope.kind for _, _, envelope in bench.arrived] == ["pull.reply", "pull.request"]


def test_engine_ret_forces_the_writes_result() -> None:
    assert Bench("mooncake.engine-ret").post(write("a")).arrived[0][2].write_result == -1


def test_engine_partial_leaves_the_last_blocks_unwritten() -> None:
    bench = Bench("mooncake.engine-partial:share=0.6").post(write("a", "b", num_blocks=4))
    data = bench.payloads[0]
    assert data.num_blocks == 6
    assert [len(segment.block_ids) for segment in data.segments] == [4, 1, 1, 0]
    assert bench.faulted == ["b"]


def test_engine_corrupt_hits_several_blocks() -> None:
    ((_, _, envelope),) = Bench("mooncake.engine-corrupt:blocks=3").post(write("a", "b")).arrived
    assert len({corruption.block for corruption in envelope.corruptions}) == 3


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("mooncake.conn-refused", pull("a")),
        ("mooncake.engine-hang", write("a")),
        ("mooncake.bootstrap-hang", query("a")),
    ],
)
def test_what_never_arrives(fault: str, message: Envelope) -> None:
    assert Bench(fault).post(message).num_arrived == 0


def test_replies_as_bytes_are_understood() -> None:
    envelope = reply("a", "b")
    envelope.payload = encode(envelope.payload)
    bench = Bench("partial-error:request=b").post(pull("a", "b"), envelope)
    assert (bench.payloads[1].ok_reqs, bench.payloads[1].err_reqs) == (["a"], ["b"])
