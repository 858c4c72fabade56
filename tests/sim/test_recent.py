"""Bounded memory of what has been seen."""

from hypothesis import given
from hypothesis import strategies as st

from kvreplay.sim.recent import Recent


def test_what_was_set_longest_ago_goes_first() -> None:
    recent: Recent[str, int] = Recent(2)
    recent["a"], recent["b"], recent["c"] = 1, 2, 3
    assert dict(recent) == {"b": 2, "c": 3}


def test_a_key_that_is_set_anew_stays_longer_and_one_that_is_read_does_not() -> None:
    recent: Recent[str, int] = Recent(2)
    recent["a"], recent["b"] = 1, 2
    recent["a"] = 3
    assert recent["b"] == 2
    recent["c"] = 4
    assert dict(recent) == {"a": 3, "c": 4}


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=40))
def test_it_holds_the_last_that_were_set_and_not_taken_out(limit: int, steps: list[tuple[int, bool]]) -> None:
    recent: Recent[int, int] = Recent(limit)
    expected: list[tuple[int, int]] = []
    for number, (key, sets) in enumerate(steps):
        expected = [item for item in expected if item[0] != key]
        if sets:
            recent[key] = number
            expected = [*expected, (key, number)][-limit:]
        else:
            recent.pop(key, None)
        assert list(recent.items()) == expected
