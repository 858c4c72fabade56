"""Bytes that change on the way: every wrong block that leads to a token is told once, and ideal lets none pass."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreplay.ids import NS_PER_MS
from kvreplay.verdict.exit_status import ExitStatus
from tests.scenarios.random_worlds import World, worlds
from tests.scenarios.stage import Play, judge, pair, play, request, role, workload

ONE = workload(request("a", prompt_tokens=20))
"""Five blocks of D, 1 to 5; its first token is out at 26 ms."""


def told(played: Play, checker: str = "CONTENT") -> list[tuple[float, str | None, list[int], str | None]]:
    return [
        (event.time_ns / NS_PER_MS, event.request_id, list(event.block_ids or ()), event.transfer_id)
        for event in played.violations
        if event.status == checker
    ]


def test_one_corrupted_block_is_one_finding_with_its_request_block_group_transfer_and_fault() -> None:
    played = play(pair(), ONE, "corrupt")
    (finding,) = [event for event in played.violations if event.status == "CONTENT"]
    (fault,) = played.of("fault.injected")
    assert (finding.time_ns, finding.instance, finding.request_id) == (26 * NS_PER_MS, "D0", "a")
    assert (finding.group, finding.transfer_id) == (0, "xfer-a")
    assert finding.block_ids is not None
    assert len(finding.block_ids) == 1
    assert finding.cause_handle == played.events.index(fault)
    position = 4 * (finding.block_ids[0] - 1)
    assert finding.cause == f"read wrong contents from position {position} on, brought by xfer-a for a"


def test_the_output_is_wrong_from_then_on() -> None:
    played = play(pair(), ONE, "corrupt")
    clean = play(pair(), ONE)
    hashes = [{event.instance: event.output_hash for event in run.of("request.finished")} for run in (played, clean)]
    assert hashes[0]["D0"] != hashes[1]["D0"]
    assert hashes[0]["P0"] == hashes[1]["P0"], "the source keeps the truth"


def test_the_summary_names_it(tmp_path: Path) -> None:
    summary = judge(tmp_path, pair(), ONE, "corrupt")
    assert summary.exit_status == ExitStatus.VIOLATED
    (content,) = summary.violations
    assert (content.checker, content.implied) == ("CONTENT", {"OUTPUT-EQUAL": 1})
    assert (content.request_id, content.group, content.transfer_id, content.fault) == ("a", 0, "xfer-a", "corrupt")
    assert content.block_id in range(1, 6)


def test_several_blocks_are_several_findings_in_order_of_the_table() -> None:
    played = play(pair(), ONE, "mooncake.engine-corrupt:blocks=3")
    blocks = [block_ids[0] for _, _, block_ids, _ in told(played)]
    assert len(blocks) == 3
    assert blocks == sorted(set(blocks))
    assert {row[0] for row in told(played)} == {26}


def test_what_was_never_written_is_wrong_too() -> None:
    """Half of 5 blocks, rounded down: 3, 4 and 5 keep what they held."""
    played = play(pair(), ONE, "mooncake.engine-partial:share=0.5")
    assert [block_ids for _, _, block_ids, _ in told(played)] == [[3], [4], [5]]


def test_a_later_reader_of_the_same_block_adds_nothing() -> None:
    """b hits all of a's five blocks; a has been named."""
    later = workload(request("a", prompt_tokens=20, text="abcde"), request("b", 100, prompt_tokens=22, text="abcdez"))
    played = play(pair(), later, "corrupt:request=a")
    assert [(request_id, transfer_id) for _, request_id, _, transfer_id in told(played)] == [("a", "xfer-a")]
    assert [request_id for _, request_id, _, _ in told(played, "CONTENT")] == ["a"]
    clean = play(pair(), later)
    outputs = [
        {event.request_id: event.output_hash for event in run.of("request.finished", instance="D0")}
        for run in (played, clean)
    ]
    assert outputs[0]["b"] != outputs[1]["b"], "b read it, and its output is wrong all the same"


def test_two_writes_are_two_findings() -> None:
    apart = workload(request("a"), request("b", 100))
    played = play(pair(), apart, "corrupt")
    assert [(request_id, transfer_id) for _, request_id, _, transfer_id in told(played)] == [
        ("a", "xfer-a"),
        ("b", "xfer-b"),
    ]


def test_a_block_that_led_to_no_token_is_not_told() -> None:
    """The client goes away at 24, within the step that would bring its first token."""
    played = play(pair(), workload(request("a"), aborts=[("a", 22)]), "corrupt")
    assert played.ends() == {"a": ("aborted", "D0", 26)}
    assert told(played) == []


def test_a_load_that_fails_for_another_reason_leaves_none() -> None:
    """The reply is lost: under recompute the corrupted block is computed again before anybody reads it."""
    played = play(pair(), ONE, "corrupt", "timeout", recompute=True)
    assert played.ends()["a"][0] == "finished"
    assert played.violations == []


class TestIdeal:
    def test_under_fail_the_load_fails_where_the_first_bad_block_is(self) -> None:
        played = play(pair(), ONE, "corrupt", behaviour="ideal")
        assert played.ends() == {"a": ("failed", "D0", 15)}
        assert played.violations == []
        assert played.of("request.failed")[0].cause == "wrong or missing bytes in 1 of 5 blocks"

    def test_under_recompute_only_what_follows_it_is_computed(self) -> None:
        played = play(pair(), ONE, "corrupt", behaviour="ideal", recompute=True)
        (failed,) = played.of("load.failed")
        assert failed.block_ids is not None
        kept = 4 * (failed.block_ids[0] - 1)
        (recomputed,) = played.of("tokens.recomputed")
        assert (recomputed.num_tokens, recomputed.cause) == (20 - kept, "load-failure")
        assert played.ends() == {"a": ("finished", "D0", 46)}
        assert played.violations == []

    @settings(max_examples=60, deadline=None)
    @given(
        worlds(
            is_pair=True,
            faults=(
                "corrupt:p=0.7",
                "mooncake.engine-corrupt:p=0.7,blocks=4",
                "mooncake.engine-partial:p=0.7",
                "slow:p=0.5,delay=50ms",
                "timeout:p=0.3",
                "mooncake.engine-slow:p=0.5,delay=35s",
                "mooncake.resp-duplicate:p=0.5",
            ),
            behaviours=("ideal",),
            max_faults=4,
        )
    )
    def test_under_any_mix_nobody_reads_anything_wrong(self, world: World) -> None:
        assert world.play().violations == []


@settings(max_examples=80, deadline=None)
@given(worlds(is_pair=True, faults=("corrupt:p=0.7", "slow:p=0.3,delay=50ms"), max_faults=2), st.booleans())
def test_a_finding_has_all_its_names_and_comes_once(world: World, every_read: bool) -> None:
    """Once per fault and destination block; wrong outputs have a finding behind them."""
    played = (world.with_kv(check="every-read") if every_read else world).play()
    found = [event for event in played.violations if event.status == "CONTENT"]
    for event in found:
        assert event.request_id is not None
        assert (event.group, len(event.block_ids or ())) == (0, 1)
        if event.cause_handle is not None:
            assert played.events[event.cause_handle].kind == "fault.injected"
            assert event.transfer_id is not None
    named = [(event.cause_handle, tuple(event.block_ids or ()), event.transfer_id) for event in found]
    assert len(named) == len(set(named))


@pytest.mark.parametrize("check", ["on", "every-read"])
def test_right_contents_have_no_finding(check: str) -> None:
    config = pair(prefill=role(num_gpu_blocks=18), decode=role(num_gpu_blocks=18), check=check)  # type: ignore[arg-type]
    many = workload(*(request(f"r{index}", 5 * index, prompt_tokens=20, output_tokens=20) for index in range(8)))
    assert play(config, many).violations == []


def test_what_is_left_out_of_the_same_block_twice_is_two_findings() -> None:
    """b gets a's blocks, and what a's fault left wrong in them is not what is wrong now."""
    clients = workload(request("a", prompt_tokens=20), request("b", 200, prompt_tokens=20))
    config = pair(decode=role(num_gpu_blocks=18, enable_prefix_caching=False))
    played = play(config, clients, "mooncake.engine-partial:share=0.5")
    blocks = {request_id: [ids for _, name, ids, _ in told(played) if name == request_id] for request_id in "ab"}
    assert blocks == {"a": [[3], [4], [5]], "b": [[4], [3], [2]]}
