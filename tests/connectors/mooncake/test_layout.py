"""Layouts: which regions of two ranks belong together, what is refused, and what a producer remembers."""

from dataclasses import replace
from typing import Any

import pytest

from kvreplay.connectors.mooncake.layout import KVLayout, LayoutMatcher, LayoutMissError
from kvreplay.connectors.mooncake.plan import BrokenPlanError, HeadLayout
from kvreplay.connectors.mooncake.ranks import Ranks
from kvreplay.connectors.mooncake.regions import (
    MisfitError,
    Region,
    align,
    coalesce,
    has_opaque_row,
    length_problem,
)
from kvreplay.connectors.mooncake.structs import MooncakeXferMetadata

Lines = list[tuple[str, tuple[object, ...]]]


def region(layer: int, **fields: Any) -> Region:  # noqa: ANN401
    return Region(f"model.layers.{layer}.attn", layer, 0x10000 * (layer + 1), 512, 512, **fields)


LAYOUT = KVLayout((region(0), region(1)), 7)


def pull(layout: KVLayout = LAYOUT, **changes: Any) -> MooncakeXferMetadata:  # noqa: ANN401
    """A pull with that layout."""
    message = MooncakeXferMetadata("D0", 17101, 1, 0, {}, [], [], [], layout_id=layout.layout_id)
    layout.describe(message)
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def short_pull(**changes: Any) -> MooncakeXferMetadata:  # noqa: ANN401
    """A pull that means the layout sent before."""
    message = MooncakeXferMetadata("D0", 17101, 1, 0, {}, [], [], [], layout_id=7)
    for name, value in changes.items():
        setattr(message, name, value)
    return message


class Log:
    debug = False

    def __init__(self) -> None:
        self.lines: Lines = []

    def __call__(self, thread: str, level: str, template: str, *arguments: object) -> None:
        self.lines.append((template, arguments))


def matcher(log: Log | None = None, limit: int = 1024, *, has_opaque_rows: bool = False) -> LayoutMatcher:
    layout = replace(LAYOUT, has_opaque_rows=has_opaque_rows)
    return LayoutMatcher(layout, Ranks(), HeadLayout(num_kv_heads=2), log, limit=limit)


class TestAlignment:
    def test_regions_meet_by_name_not_by_place(self) -> None:
        pairs = align([region(0), region(1)], [region(1), region(0)], allow_partial_layers=False)
        assert [(own.layer_index, peers.layer_index) for own, peers in pairs] == [(0, 0), (1, 1)]

    def test_the_second_of_a_name_meets_the_second(self) -> None:
        halves = [region(0), replace(region(0), base_addr=5)]
        assert [peers.base_addr for _, peers in align(halves, halves, allow_partial_layers=False)] == [0x10000, 5]

    def test_a_layer_that_the_consumer_lacks(self) -> None:
        message = r"^Mooncake producer registered layer has no matching consumer occurrence: model\.layers\.1\.attn occ"
        with pytest.raises(MisfitError, match=message):
            align([region(0), region(1)], [region(0)], allow_partial_layers=False)

    def test_other_stages_layers_are_left_out(self) -> None:
        assert len(align([region(0), region(1)], [region(1)], allow_partial_layers=True)) == 1

    def test_but_half_a_layer_is_not(self) -> None:
        halves = [region(0), region(0)]
        with pytest.raises(MisfitError, match=r"occurrence 1\.$"):
            align(halves, [region(0)], allow_partial_layers=True)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"layer_index": 7}, "registered layer index mismatch for model.layers.0.attn: producer=0, consumer=7."),
            ({"group_index": 1}, "registered group index mismatch for model.layers.0.attn: producer=0, consumer=1."),
            (
                {"shared_group_ids": (0, 1)},
                "shared-group set mismatch for model.layers.0.attn: producer=(0,), consumer=(0, 1).",
            ),
        ],
    )
    def test_a_layer_in_another_place(self, change: dict[str, Any], message: str) -> None:
        own = region(0, shared_group_ids=(0,))
        with pytest.raises(MisfitError) as misfit:
            align([own], [replace(own, **change)], allow_partial_layers=False)
        assert str(misfit.value) == f"Mooncake {message}"


class TestPackedRows:
    def row(self, *, base: int = 0, count: int = 3) -> list[Region]:
        """Views of one row of 1000 bytes, 200 bytes each, 20 of padding between them."""
        return [
            Region(f"l{index}", index, base + 220 * index, 1000, 200, row_offset=220 * index) for index in range(count)
        ]

    def test_neighbours_become_one(self) -> None:
        own, peers = self.row(), self.row(base=5000)
        ((merged, _),) = coalesce(list(zip(own, peers, strict=True)), promote_full_row=False)
        assert (merged.base_addr, merged.kv_block_len) == (0, 640)

    def test_a_run_from_the_start_becomes_the_row(self) -> None:
        own, peers = self.row(), self.row(base=5000)
        ((merged, other),) = coalesce(list(zip(own, peers, strict=True)), promote_full_row=True)
        assert merged.kv_block_len == other.kv_block_len == 1000

    def test_groups_stay_apart(self) -> None:
        own = self.row()
        own[2] = replace(own[2], group_index=1)
        assert len(coalesce(list(zip(own, own, strict=True)), promote_full_row=False)) == 2

    def test_a_run_ends_with_its_row(self) -> None:
        own = [*self.row(), replace(self.row()[0], base_addr=1000)]
        assert len(coalesce(list(zip(own, own, strict=True)), promote_full_row=False)) == 2

    def test_what_is_apart_at_the_consumer_stays_apart(self) -> None:
        own, peers = self.row(), self.row()[::-1]
        assert len(coalesce(list(zip(own, peers, strict=True)), promote_full_row=False)) == 3

    def test_a_whole_row_hides_its_layers(self) -> None:
        assert has_opaque_row([0, 512], [512, 512], [512, 1024])
        assert not has_opaque_row([0], [500], [512])
        assert not has_opaque_row([], [512], [512])


class TestLengths:
    @pytest.mark.parametrize(
        ("lengths", "sizes", "message"),
        [
            ((512, 512), (1, 1), None),
            ((512, 1024), (1, 1), "KV region length mismatch for homogeneous TP at region 0: local=512, remote=1024."),
            ((256, 512), (2, 1), None),
            (
                (256, 256),
                (2, 1),
                "destination KV region length does not match the producer TP ratio at region 0: local=256, remote=256, "
                "tp_ratio=2.",
            ),
            (
                (512, 512),
                (1, 2),
                "source KV region length does not match the consumer TP ratio at region 0: local=512, remote=512, "
                "tp_ratio=-2.",
            ),
            ((256, 256), (4, 2), None),
        ],
    )
    def test_they_must_hold_the_same_heads(
        self, lengths: tuple[int, int], sizes: tuple[int, int], message: str | None
    ) -> None:
        own, peers = (replace(region(0), kv_block_len=length) for length in lengths)
        problem = length_problem([(own, peers)], *sizes, num_kv_heads=2, replicated=sizes[0] > 2)
        assert problem == (None if message is None else f"Mooncake {message}")

    def test_what_every_rank_holds_needs_no_ratio(self) -> None:
        pair = (region(0), replace(region(0), kv_block_len=64))
        assert length_problem([pair], 4, 1, num_kv_heads=None, replicated=True) is None


class TestWhatAProducerRemembers:
    def test_a_layout_is_known_until_it_is_forgotten(self) -> None:
        known = matcher()
        known.plan_for(pull())
        assert known.plan_for(short_pull()).copies
        known.forget()
        message = r"^Mooncake KV layout 0x7 from D0:17101 is not cached\.$"
        with pytest.raises(LayoutMissError, match=message):
            known.plan_for(short_pull())

    def test_every_rank_of_a_consumer_has_its_own(self) -> None:
        known = matcher()
        known.plan_for(pull())
        with pytest.raises(LayoutMissError):
            known.plan_for(short_pull(remote_tp_rank=1, remote_tp_size=2))

    def test_the_longest_unused_goes_first(self) -> None:
        known = matcher(limit=2)
        for port in (1, 2):
            known.plan_for(pull(remote_port=port))
        known.plan_for(short_pull(remote_port=1))
        known.plan_for(pull(remote_port=3))
        assert len(known) == 2
        known.plan_for(short_pull(remote_port=1))
        with pytest.raises(LayoutMissError):
            known.plan_for(short_pull(remote_port=2))

    def test_a_layout_that_was_compared_before_is_not_compared_again(self) -> None:
        log = Log()
        known = matcher(log)
        known.plan_for(pull())
        known.forget()
        known.plan_for(pull())
        assert log.lines == [("Mooncake packed coalesce: %s aligned regions -> %s transfer regions.", (2, 2))]

    def test_an_old_consumer_sends_it_every_time(self) -> None:
        known = matcher()
        known.plan_for(pull(layout_id=0))
        assert len(known) == 0

    def test_a_misfit_is_not_remembered_as_known(self) -> None:
        known = matcher()
        for _ in range(2):
            with pytest.raises(MisfitError):
                known.plan_for(pull(registered_layer_names=["a", "b"]))
        assert len(known) == 0


class TestHostilePulls:
    def test_lists_of_unequal_lengths(self) -> None:
        message = (
            r"^Mooncake transfer regions require matching metadata lengths, got base_addrs=1, block_lens=2, "
            r"kv_block_lens=2, layer_names=2, layer_indices=2\.$"
        )
        with pytest.raises(BrokenPlanError, match=message):
            matcher().plan_for(pull(kv_caches_base_addr=[1]))

    def test_groups_for_some_regions_only(self) -> None:
        message = r"matching group metadata lengths, got group_indices=1, layer_names=2\.$"
        with pytest.raises(BrokenPlanError, match=message):
            matcher().plan_for(pull(registered_group_indices=[0]))

    def test_what_an_older_consumer_does_not_say_is_filled_in(self) -> None:
        bare = pull(registered_group_indices=[], registered_shared_group_ids=[], registered_row_offsets=[])
        assert len(matcher().plan_for(bare).copies) == 2

    @pytest.mark.parametrize(
        ("remote_pp_size", "own_rows", "refused"), [(1, True, False), (2, True, True), (2, False, False)]
    )
    def test_rows_without_names_need_equal_stages(self, remote_pp_size: int, own_rows: bool, refused: bool) -> None:
        known = matcher(has_opaque_rows=own_rows)
        assert known.refuses_stages(pull(remote_pp_size=remote_pp_size)) is refused
