"""Where two runs differ first, and in what."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvreplay.conformance.compare import Difference, first_differences, is_same_error
from kvreplay.errors import ConfigError

Step = dict[str, Any]


def test_equal_runs_have_none() -> None:
    steps = [{"k": 0, "total": 1}, {"k": 1, "total": 2}]
    assert first_differences(steps, iter(steps)) == []


def test_later_steps_are_not_even_taken() -> None:
    def got() -> Iterator[Step]:
        yield {"k": 0, "total": 2}
        raise AssertionError("taken")

    assert first_differences([{"k": 0, "total": 1}, {"k": 1}], got()) == [Difference(0, "total", 1, 2)]


def test_causes_come_before_effects() -> None:
    expected = {"k": 3, "total": 1, "after": {"free": 1, "running": ["a"]}, "lookup": [], "out": []}
    fields = [each.field for each in first_differences([expected], [{"k": 3}])]
    assert fields == ["lookup", "total", "out", "after"]


def test_of_a_requests_row_the_column_is_named() -> None:
    def state(computed: int) -> Step:
        return {"k": 0, "after": {"req": {"a": ["R", 1, 2, 0, [[1]]], "b": ["W", computed, 2, 0, [[]]]}}}

    assert first_differences([state(0)], [state(4)]) == [Difference(0, "after.req.b.num_computed", 0, 4)]


def test_so_it_is_of_rows_for_the_same_requests() -> None:
    def step(tokens: int) -> Step:
        return {"k": 0, "new": [["a", 0, 8, [[1, 2]]], ["b", 0, tokens, [[3]]]]}

    assert first_differences([step(4)], [step(3)]) == [Difference(0, "new.b.scheduled", 4, 3)]


def test_rows_for_different_requests_are_shown_whole() -> None:
    expected, got = [["a", 0, 8, [[1]]]], [["b", 0, 8, [[1]]]]
    assert first_differences([{"k": 0, "new": expected}], [{"k": 0, "new": got}]) == [
        Difference(0, "new", expected, got)
    ]


@pytest.mark.parametrize("odd", [3, None, [], [[]], ["a"], {"a": 1}])
def test_records_of_another_shape_are_compared_all_the_same(odd: object) -> None:
    expected = {"k": 0, "new": odd, "after": {"req": {"a": odd}}}
    got = {"k": 0, "new": [["a", 0, 8, [[1]]]], "after": {"req": {"a": ["R", 1, 2, 0, [[1]]]}}}
    assert first_differences([expected], [got])
    assert first_differences([got], [expected])


@pytest.mark.parametrize(
    ("expected", "got", "field"),
    [
        ([{"k": 0}], [{"k": 0}, {"k": 1}], "end"),
        ([{"k": 0}, {"k": 1}], [{"k": 0}], "end"),
        ([{"k": 0}], [], "end"),
    ],
)
def test_an_end_too_early_or_too_late_is_a_difference(expected: list[Step], got: list[Step], field: str) -> None:
    assert [each.field for each in first_differences(expected, got)] == [field]


def test_a_failure_of_ours_is_a_difference_in_its_step() -> None:
    def got() -> Iterator[Step]:
        yield {"k": 0}
        raise KeyError("r1")

    (found,) = first_differences([{"k": 0}, {"k": 1, "total": 3}], got())
    assert (found.step, found.field) == (1, "bug")
    assert str(found.got).startswith("KeyError: 'r1' (test_command_comparison.py:")


def test_a_mistake_of_the_users_is_none() -> None:
    def got() -> Iterator[Step]:
        raise ConfigError("no")
        yield {}

    with pytest.raises(ConfigError, match=r"^no$"):
        first_differences([{"k": 0}], got())


DEATH = {"where": "update", "type": "AssertionError", "msg": "x" * 50 + " in the real one"}


@pytest.mark.parametrize(
    ("got", "same"),
    [
        (DEATH, True),
        ({**DEATH, "msg": "x" * 50 + " in ours"}, True),
        ({**DEATH, "msg": "x" * 30 + " in ours"}, False),
        ({**DEATH, "type": "ValueError"}, False),
        ({**DEATH, "where": "schedule"}, False),
        (None, False),
        ("dead", False),
    ],
)
def test_of_a_death_place_type_and_the_start_of_the_message_count(got: object, same: bool) -> None:
    assert is_same_error(DEATH, got) is same


def test_an_assertion_without_a_message_is_equal_to_one_that_says_more() -> None:
    assert is_same_error({**DEATH, "msg": ""}, {**DEATH, "msg": "r1 is not there"})
