"""How far a loop beside sockets may go."""

from pathlib import Path

from kvreplay.ids import NS_PER_S
from kvreplay.sim.event_loop import EventLoop
from kvreplay.transport.paced import INSTANT_BYTES, PacedLoop, shared_instant


def test_timers_run_up_to_what_is_granted() -> None:
    paced, ran = PacedLoop(EventLoop()), []
    for second in (1, 2, 3):
        paced.loop.call_at(second * NS_PER_S, lambda second=second: ran.append(second))  # type: ignore[misc]
    paced.run_due()
    assert ran == []
    paced.grant(2 * NS_PER_S)
    paced.run_due()
    assert ran == [1, 2]


def test_what_comes_from_outside_arrives_after_the_timers_before_it() -> None:
    paced, ran = PacedLoop(EventLoop()), []
    paced.loop.call_at(NS_PER_S, lambda: ran.append("timer"))
    paced.grant(2 * NS_PER_S)
    paced.arrive(lambda: ran.append("message"))
    paced.run_due()
    assert ran == ["timer", "message"]
    assert paced.loop.now_ns == 2 * NS_PER_S


def test_loops_that_share_a_file_go_on_together(tmp_path: Path) -> None:
    path = tmp_path / "instant"
    path.write_bytes(bytes(INSTANT_BYTES))
    with path.open("r+b") as one, path.open("r+b") as other:
        first, second = (PacedLoop(EventLoop(), shared_instant(file.fileno())) for file in (one, other))
        first.grant(5)
        assert (first.clock_ns, second.clock_ns) == (5, 5)


def test_what_comes_between_two_turns_waits_and_arrives_in_order_of_place(tmp_path: Path) -> None:
    path = tmp_path / "instant"
    path.write_bytes(bytes(INSTANT_BYTES))
    ran: list[str] = []
    with path.open("r+b") as one, path.open("r+b") as other:
        clock, paced = (
            PacedLoop(EventLoop(), shared_instant(one.fileno())),
            PacedLoop(EventLoop(), shared_instant(other.fileno()), takes_turns=True),
        )
        paced.loop.call_at(5, lambda: ran.append("timer"))
        paced.loop.call_at(5, lambda: ran.append("step"), rank=1)
        clock.grant(5)
        for number in (2, 1):
            paced.arrive(lambda number=number: ran.append(f"pull {number}"), (2, "", number, "D0", b""))  # type: ignore[misc]
        paced.arrive(lambda: ran.append("client"))
        paced.run_due()
        assert (ran, paced.has_kept) == ([], True)
        paced.take_turn(0)
        paced.run_due()
        assert (ran, paced.has_kept) == (["timer", "client", "pull 1", "pull 2"], False)
        paced.take_turn(1)
        paced.run_due()
        assert ran[4:] == ["step"]
