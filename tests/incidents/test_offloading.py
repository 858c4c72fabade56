"""Public incidents of offloading with speculative decoding: the connector by hand, with a drafter among its groups.

Each class is an incident; the version that had it wrong is one switch away.
"""

import dataclasses
from collections.abc import Sequence

import pytest

from kvreplay.connectors.offloading.behaviour import VLLM_0_33, OffloadBehaviour
from kvreplay.connectors.offloading.groups import drafting
from kvreplay.connectors.offloading.layout import OffloadGroup
from kvreplay.connectors.offloading.structs import Handoff
from tests.connectors.offloading.desk import IDEAL, Desk, full, state, window

NARROW = dataclasses.replace(VLLM_0_33, eagle_lookup="narrow")


def hit_of_a_repeated_prompt(
    groups: Sequence[OffloadGroup], num_tokens: int, behaviour: OffloadBehaviour = VLLM_0_33
) -> int | None:
    """A request's prompt is stored, states included; what is found of the same prompt when the GPU has lost it."""
    desk = Desk(*groups, num_chunks=200, behaviour=behaviour)
    tables = [
        list(range(100 * place + 1, 100 * place + 1 + -(-num_tokens // group.tokens_per_block)))
        for place, group in enumerate(groups)
    ]
    desk.add("a", num_tokens)
    desk.ask("a")
    desk.allocate("a", *tables)
    handoffs = [
        Handoff(place, tables[place][boundary // group.tokens_per_block - 1], boundary)
        for place, group in enumerate(groups)
        if group.is_aligned_state
        for boundary in range(group.tokens_per_block, num_tokens + 1, group.tokens_per_block)
    ]
    desk.step(desk.run("a", num_tokens, *tables), handoffs={"a": handoffs})
    desk.report_all()
    desk.sample("a")
    desk.finish("a")
    desk.step(finished=["a"])
    desk.report_all()
    desk.add("b", num_tokens)
    return desk.ask("b")


@pytest.mark.incident("K1")
class TestK1TheHostTierIsWrittenAndNeverRead:
    """vllm#52674, vllm#52735: with a drafter of which no group is marked all groups give up their last chunk, and none
    is asked for one more."""

    ATTENTION = full(0)
    STATES = state(1, tokens_per_block=16, is_aligned_state=True)

    def test_without_a_drafter(self) -> None:
        assert hit_of_a_repeated_prompt([self.ATTENTION, self.STATES], 28) == 16

    def test_before_the_fix_nothing_is_served(self) -> None:
        groups = drafting([self.ATTENTION, self.STATES])
        assert hit_of_a_repeated_prompt(groups, 28, NARROW) == 0

    @pytest.mark.parametrize("behaviour", [VLLM_0_33, IDEAL])
    def test_with_the_drafters_group_marked_it_is(self, behaviour: OffloadBehaviour) -> None:
        groups = [dataclasses.replace(self.ATTENTION, is_drafter=True), self.STATES]
        assert hit_of_a_repeated_prompt(groups, 28, behaviour) == 16

    @pytest.mark.parametrize(("is_drafter", "least"), [(False, 304), (True, 288)])
    def test_a_long_prompt_loses_no_more_than_one_block(self, is_drafter: bool, least: int) -> None:
        """The incident's own numbers: 320 tokens in blocks of 16."""
        groups = [
            full(0, tokens_per_block=16, is_drafter=is_drafter),
            state(1, tokens_per_block=16, is_aligned_state=True),
        ]
        hit = hit_of_a_repeated_prompt(groups, 320)
        assert hit is not None
        assert least <= hit < 320


@pytest.mark.incident("K2")
class TestK2OneGroupTakesTheWholeHitWithIt:
    """vllm#51771, vllm#53504, for a CPU tier: three block sizes and a drafter. All groups agree on one boundary and
    give up one chunk, not one each until nothing is left."""

    GROUPS = (
        full(0, tokens_per_block=16, is_drafter=True),
        window(1, 64, tokens_per_block=64),
        full(2, tokens_per_block=256),
    )

    def test_where_all_groups_are_taken_for_the_drafters_a_short_prompt_is_never_served(self) -> None:
        """Of 300 tokens there is one chunk in the widest group, and that is given up."""
        unmarked = [dataclasses.replace(group, is_drafter=False) for group in self.GROUPS]
        assert hit_of_a_repeated_prompt(drafting(unmarked), 300, NARROW) == 0
        assert hit_of_a_repeated_prompt(self.GROUPS, 300) == 256

    @pytest.mark.parametrize("behaviour", [VLLM_0_33, IDEAL])
    def test_more_than_half_is_served(self, behaviour: OffloadBehaviour) -> None:
        hit = hit_of_a_repeated_prompt(self.GROUPS, 1024, behaviour)
        assert hit is not None
        assert hit >= 512
