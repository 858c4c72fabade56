"""Lockstep: counters that follow from the step number, against counting every step."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from kvreplay.engine.lockstep import NEVER, Lockstep
from kvreplay.engine.request import Request
from kvreplay.kv.content_index import TokenIndex

MODEL_LENGTH = 40
INDEX = TokenIndex(4)


def request(name: str, prompt: int, *, output: int = 1, max_tokens: int = 30, order: int = 0) -> Request:
    """One that has sampled `output` tokens, the last of which is not computed yet."""
    made = Request(name, INDEX.content([7] * prompt), num_prompt_tokens=prompt, max_tokens=max_tokens)
    made.num_output_tokens = output
    made.num_tokens = prompt + output
    made.num_computed_tokens = prompt + output - 1
    made.lockstep_order = order
    return made


def names(requests: list[Request]) -> list[str]:
    return [member.request_id for member in requests]


class TestOneMember:
    def test_it_gets_a_token_a_step(self) -> None:
        lockstep, member = Lockstep(4, MODEL_LENGTH), request("a", 6)
        lockstep.join(member, 10)
        lockstep.leave(member, 15)
        assert (member.num_computed_tokens, member.num_tokens, member.num_output_tokens) == (11, 12, 6)
        assert not lockstep
        assert "a" not in lockstep

    def test_one_that_leaves_in_flight_has_its_token_computed_but_not_appended(self) -> None:
        lockstep, member = Lockstep(4, MODEL_LENGTH), request("a", 6)
        lockstep.join(member, 10)
        lockstep.leave(member, 15, in_flight=True)
        assert (member.num_computed_tokens, member.num_tokens, member.num_in_flight_tokens) == (12, 12, 1)

    def test_it_needs_a_block_when_it_starts_a_step_with_full_ones(self) -> None:
        lockstep = Lockstep(4, MODEL_LENGTH)
        lockstep.join(request("a", 6), 10)  # 6 computed at the start of step 10
        assert [step for step in range(10, 20) if lockstep.needing_blocks(step)] == [12, 16]
        assert [step for step in range(10, 20) if lockstep.filling_blocks(step)] == [11, 15, 19]
        assert [step for step, _ in lockstep.growth(10, 10)] == [12, 16]

    def test_it_finishes_by_its_own_length_or_the_models(self) -> None:
        by_own = Lockstep(4, MODEL_LENGTH)
        by_own.join(request("a", 6, max_tokens=5), 10)
        assert by_own.next_finish() == 13, "tokens 2 to 5 come of steps 10 to 13"
        by_model = Lockstep(4, 9)
        by_model.join(request("a", 6), 10)
        assert by_model.next_finish() == 11, "it has 7 of 9 tokens"

    def test_nobody_never_finishes(self) -> None:
        lockstep, member = Lockstep(4, MODEL_LENGTH), request("a", 6)
        assert lockstep.next_finish() == NEVER
        lockstep.join(member, 0)
        lockstep.leave(member, 3)
        assert lockstep.next_finish() == NEVER

    def test_one_that_came_back_finishes_once(self) -> None:
        lockstep, member = Lockstep(4, MODEL_LENGTH), request("a", 6, max_tokens=9)
        for step in (3, 4, 6):
            lockstep.join(member, step)
            lockstep.leave(member, step + 1)
        lockstep.join(member, 7)
        assert lockstep.next_finish() == 11
        assert names(lockstep.finishing_in(11)) == ["a"]


def test_members_come_in_running_order_whatever_the_order_of_joining() -> None:
    lockstep = Lockstep(4, MODEL_LENGTH)
    for name, order in (("c", 3), ("a", 1), ("b", 2)):
        lockstep.join(request(name, 4, order=order), 5)
    assert names(list(lockstep)) == ["a", "b", "c"]
    assert names(lockstep.needing_blocks(5)) == ["a", "b", "c"]


@dataclass
class Counted:
    """A request whose tokens are counted one by one."""

    computed: int
    tokens: int
    output: int
    max_tokens: int

    def step(self) -> None:
        self.computed += 1
        self.tokens += 1
        self.output += 1

    @property
    def is_last(self) -> bool:
        """Whether the next token ends it."""
        return self.output + 1 >= self.max_tokens or self.tokens + 1 >= MODEL_LENGTH


@settings(deadline=None)
@given(
    block_size=st.integers(1, 5),
    actions=st.lists(st.tuples(st.sampled_from("jjjl."), st.integers(0, 5), st.integers(1, 30)), max_size=40),
)
def test_derived_counters_equal_counted_ones(block_size: int, actions: list[tuple[str, int, int]]) -> None:
    lockstep = Lockstep(block_size, MODEL_LENGTH)
    members: dict[str, Request] = {}
    counted: dict[str, Counted] = {}
    for step, (action, who, length) in enumerate(actions):
        name = f"r{who}"
        if action == "j" and name not in members:
            # As in a scheduler no two requests have the same place; here they are in the order of their names.
            member = request(name, length, max_tokens=1 + length % 7 + 1, order=100 * who + step)
            if member.num_tokens < MODEL_LENGTH:
                members[name] = member
                counted[name] = Counted(
                    member.num_computed_tokens, member.num_tokens, member.num_output_tokens, member.max_tokens
                )
                lockstep.join(member, step)
        elif action == "l" and name in members:
            member, expected = members.pop(name), counted.pop(name)
            lockstep.leave(member, step)
            assert (member.num_computed_tokens, member.num_tokens, member.num_output_tokens) == (
                expected.computed,
                expected.tokens,
                expected.output,
            )
        in_order = sorted(counted)
        assert names(list(lockstep)) == in_order
        assert lockstep.num_kv_tokens(step) == sum(counted[name].computed + 1 for name in in_order)
        needing = [name for name in in_order if counted[name].computed % block_size == 0]
        assert names(lockstep.needing_blocks(step)) == needing
        assert lockstep.num_needing_blocks(step) == len(needing)
        filling = [name for name in in_order if (counted[name].computed + 1) % block_size == 0]
        assert names(lockstep.filling_blocks(step)) == filling
        last = [name for name in in_order if counted[name].is_last]
        assert names(lockstep.finishing_in(step)) == last
        for name in last:
            lockstep.leave(members.pop(name), step)
            del counted[name]
        for expected in counted.values():
            expected.step()
