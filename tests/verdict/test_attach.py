"""Implied findings: attached to what implies them, and counted nowhere else."""

from kvreplay.checkers.finding import Finding
from kvreplay.verdict.attach import StallKey, attach

STALLS = [StallKey("r1", "D0"), StallKey("r2", "D0"), StallKey("r3", "D1")]


def test_a_stall_takes_its_instance_s_lack_of_progress() -> None:
    attached = attach(
        [Finding("PROGRESS", 9, "nothing open", "D1"), Finding("PROGRESS", 9, "nothing", "D0")], STALLS, []
    )
    assert attached.independent == []
    assert attached.by_stall == {2: {"PROGRESS": 1}, 0: {"PROGRESS": 1}}


def test_a_stall_takes_the_blocks_that_it_still_holds_and_no_others() -> None:
    own = Finding("CONSERVATION", 9, "2 blocks still held", "D0", "r2", block_id=4)
    leak = Finding("CONSERVATION", 9, "2 blocks still held", "D0", "r9", block_id=5)
    elsewhere = Finding("CONSERVATION", 9, "2 blocks still held", "P0", "r2", block_id=6)
    recount = Finding("CONSERVATION", 9, "3 free + 2 held is not 6", "D0")
    attached = attach([own, leak, elsewhere, recount], STALLS, [])
    assert attached.independent == [leak, elsewhere, recount]
    assert attached.by_stall == {1: {"CONSERVATION": 1}}


def test_a_crash_takes_its_own_no_fatal_and_no_bystander_s() -> None:
    death = Finding("NO-FATAL", 9, "the engine died", "D0")
    bystander = Finding("NO-FATAL", 9, "failed though no fault named it", "D0", "r9")
    attached = attach([death, bystander], [], ["P0", "D0"])
    assert attached.independent == [bystander]
    assert attached.by_crash == {1: {"NO-FATAL": 1}}


def test_each_crash_of_an_instance_takes_one() -> None:
    deaths = [Finding("NO-FATAL", time_ns, "the engine died", "D0") for time_ns in (9, 20)]
    assert attach(deaths, [], ["D0", "P0", "D0"]).by_crash == {0: {"NO-FATAL": 1}, 2: {"NO-FATAL": 1}}


def test_wrong_contents_take_the_wrong_outputs_that_follow() -> None:
    early = Finding("OUTPUT-EQUAL", 1, "wrong output", "D0", "r9")
    first = Finding("CONTENT", 2, "wrong", "D0", "r1", block_id=3)
    second = Finding("CONTENT", 4, "wrong", "D0", "r2", block_id=5)
    same = Finding("OUTPUT-EQUAL", 6, "wrong output", "D0", "r1")
    reader = Finding("OUTPUT-EQUAL", 7, "wrong output", "D0", "r8")
    elsewhere = Finding("OUTPUT-EQUAL", 8, "wrong output", "D1", "r1")
    attached = attach([elsewhere, reader, same, second, first, early], [], [])
    assert attached.independent == [early, first, second, elsewhere]
    assert attached.by_finding == {1: {"OUTPUT-EQUAL": 1}, 2: {"OUTPUT-EQUAL": 1}}


def test_so_does_a_request_s_use_of_the_null_block() -> None:
    leak = Finding("NULL-BLOCK", 1, "the null block was freed", "D0")
    early = Finding("OUTPUT-EQUAL", 2, "wrong output", "D0", "r9")
    read = Finding("NULL-BLOCK", 3, "position 4 was read from the null block", "D0", "r1", block_id=0)
    same = Finding("OUTPUT-EQUAL", 3, "wrong output", "D0", "r1")
    reader = Finding("OUTPUT-EQUAL", 7, "wrong output", "D0", "r8")
    attached = attach([reader, same, read, early, leak], [], [])
    assert attached.independent == [leak, early, read]
    assert attached.by_finding == {2: {"OUTPUT-EQUAL": 2}}


def test_what_nothing_implies_stands_for_itself() -> None:
    findings = [Finding("PROGRESS", 3, "never ended", "D7", "r1"), Finding("FENCE", 4, "given away", "D0", "r1")]
    assert attach(findings, STALLS, ["D0"]).independent == findings
