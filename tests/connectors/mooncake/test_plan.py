"""Byte plans between ranks of unequal sizes: every byte of every block once, and the descriptors of vLLM."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreplay.connectors.mooncake.plan import (
    BrokenPlanError,
    HeadLayout,
    Slice,
    TransferPlan,
    WriteSegment,
    make_plan,
    slice_for,
)
from kvreplay.connectors.mooncake.ranks import Ranks, target_ranks, tp_ratio
from kvreplay.connectors.mooncake.regions import Region

HEAD_BYTES = 64
EIGHT_HEADS = HeadLayout(num_kv_heads=8)
SIZES = (1, 2, 4, 8, 16, 32)


def block_bytes(tp_size: int, heads: HeadLayout) -> int:
    """What one rank holds of a block: its heads, at least one; of MLA everything."""
    assert heads.num_kv_heads is not None
    return HEAD_BYTES if heads.is_mla else HEAD_BYTES * max(heads.num_kv_heads // tp_size, 1)


def arriving(producers: int, consumers: int, consumer: int, heads: HeadLayout) -> list[tuple[int, Slice]]:
    """(producer's rank, what it sends), for one rank of the consumer."""
    lengths = (block_bytes(producers, heads), block_bytes(consumers, heads))
    return [
        (rank, slice_for(Ranks(tp_rank=rank, tp_size=producers), consumer, consumers, lengths, heads))
        for rank in target_ranks(consumer, consumers, producers)
    ]


def region(layer: int = 0, length: int = 512, group_index: int = 0) -> Region:
    return Region(f"model.layers.{layer}.attn", layer, 0x1000 * (layer + 1), length, length, group_index)


def plan_of(*regions: Region) -> TransferPlan:
    return make_plan([(each, each) for each in regions], Ranks(), 0, 1, HeadLayout())


def segment(source: list[int], target: list[int], group: int = 0, request: str = "d1") -> WriteSegment:
    return WriteSegment(request, "X1", group, source, target)


class TestRanks:
    @pytest.mark.parametrize(
        ("own", "own_size", "peer_size", "expected"),
        [(0, 2, 2, [0]), (3, 4, 2, [1]), (1, 2, 4, [2, 3]), (0, 1, 4, [0, 1, 2, 3])],
    )
    def test_whom_a_rank_talks_to(self, own: int, own_size: int, peer_size: int, expected: list[int]) -> None:
        assert target_ranks(own, own_size, peer_size) == expected

    @given(st.sampled_from(SIZES), st.sampled_from(SIZES))
    def test_both_sides_agree_on_it(self, left: int, right: int) -> None:
        pairs = {(own, peer) for own in range(left) for peer in target_ranks(own, left, right)}
        assert pairs == {(own, peer) for peer in range(right) for own in target_ranks(peer, right, left)}

    def test_sizes_that_do_not_divide(self) -> None:
        with pytest.raises(ValueError, match=r"^Remote tensor parallel size 3 is not divisible by local tensor parall"):
            tp_ratio(2, 3)
        with pytest.raises(ValueError, match=r"^Local tensor parallel size 3 is not divisible by remote tensor parall"):
            tp_ratio(3, 2)


class TestSlices:
    @pytest.mark.parametrize("heads", [EIGHT_HEADS, HeadLayout(num_kv_heads=8, is_mla=True)], ids=["heads", "mla"])
    @pytest.mark.parametrize("producers", SIZES)
    @pytest.mark.parametrize("consumers", SIZES)
    def test_every_byte_of_a_block_arrives_once(self, producers: int, consumers: int, heads: HeadLayout) -> None:
        size = block_bytes(consumers, heads)
        for consumer in range(consumers):
            covered = [0] * size
            for _, part in arriving(producers, consumers, consumer, heads):
                for byte in range(part.target_offset, part.target_offset + part.length):
                    covered[byte] += 1
            assert covered == [1] * size, consumer

    @pytest.mark.parametrize("producers", SIZES)
    @pytest.mark.parametrize("consumers", SIZES)
    def test_a_head_arrives_where_that_head_belongs(self, producers: int, consumers: int) -> None:
        for consumer in range(consumers):
            first = consumer * 8 // consumers
            for rank, part in arriving(producers, consumers, consumer, EIGHT_HEADS):
                if part.length:
                    sent = rank * 8 // producers + part.source_offset // HEAD_BYTES
                    assert sent == first + part.target_offset // HEAD_BYTES

    def test_halves_of_two_producers(self) -> None:
        assert arriving(2, 1, 0, EIGHT_HEADS) == [(0, Slice(0, 0, 256)), (1, Slice(0, 256, 256))]

    def test_of_replicated_latents_the_first_rank_sends_all(self) -> None:
        mla = HeadLayout(num_kv_heads=8, is_mla=True)
        assert [part.length for _, part in arriving(4, 1, 0, mla)] == [64, 0, 0, 0]

    def test_states_are_cut_by_the_ratio_of_the_sizes(self) -> None:
        states = HeadLayout(num_kv_heads=8, has_states=True)
        assert slice_for(Ranks(tp_rank=1, tp_size=2), 0, 1, (256, 512), states) == Slice(0, 256, 256)


class TestDescriptors:
    @pytest.mark.parametrize(
        ("source", "target", "count"),
        [([1, 2, 3], [4, 5, 6], 1), ([1, 2, 4], [4, 5, 6], 2), ([1, 2, 3], [4, 5, 9], 2), ([3, 2, 1], [6, 5, 4], 3)],
    )
    def test_runs_on_both_sides_are_one(self, source: list[int], target: list[int], count: int) -> None:
        plan = plan_of(region())
        assert plan.num_descriptors([segment(source, target)]) == count

    def test_they_go_region_by_region(self) -> None:
        plan = plan_of(region(0), region(1))
        described = [piece.descriptor for _, piece in plan.descriptors([segment([1, 2, 4], [5, 6, 7])])]
        assert described == [
            (0x1000 + 512, 0x1000 + 5 * 512, 1024),
            (0x1000 + 4 * 512, 0x1000 + 7 * 512, 512),
            (0x2000 + 512, 0x2000 + 5 * 512, 1024),
            (0x2000 + 4 * 512, 0x2000 + 7 * 512, 512),
        ]

    def test_parts_of_blocks_are_one_each(self) -> None:
        small, large = region(length=256), region(length=512)
        plan = make_plan([(small, large)], Ranks(tp_rank=1, tp_size=2), 0, 1, EIGHT_HEADS)
        described = [piece.descriptor for _, piece in plan.descriptors([segment([1, 2], [5, 6])])]
        assert described == [(0x1000 + 256, 0x1000 + 5 * 512 + 256, 256), (0x1000 + 512, 0x1000 + 6 * 512 + 256, 256)]
        assert plan.num_descriptors([segment([1, 2], [5, 6])]) == 2

    def test_padding_between_blocks_keeps_them_apart(self) -> None:
        padded = Region("a", 0, 0, block_len=512, kv_block_len=500)
        assert plan_of(padded).num_descriptors([segment([1, 2], [5, 6])]) == 2

    def test_a_shared_region_takes_the_blocks_of_all_its_groups(self) -> None:
        shared = Region("a", 0, 0, 512, 512, group_index=-1, shared_group_ids=(0, 1))
        plan = plan_of(shared)
        segments = [segment([1, 2], [5, 6]), segment([3], [7], group=1)]
        assert [piece.descriptor for _, piece in plan.descriptors(segments)] == [(512, 5 * 512, 3 * 512)]
        assert plan.num_bytes(segments) == 3 * 512
        assert plan.num_descriptors(segments) == 1

    @given(
        st.lists(st.integers(1, 40), min_size=1, max_size=12, unique=True),
        st.lists(st.integers(1, 40), min_size=12, max_size=12, unique=True),
        st.sampled_from([(1, 1), (2, 1), (1, 2), (16, 4)]),
    )
    def test_counts_agree_with_the_descriptors(
        self, source: list[int], target: list[int], sizes: tuple[int, int]
    ) -> None:
        producers, consumers = sizes
        local, remote = (region(length=block_bytes(size, EIGHT_HEADS)) for size in sizes)
        plan = make_plan([(local, remote)], Ranks(tp_size=producers), 0, consumers, EIGHT_HEADS)
        segments = [segment(source, target[: len(source)])]
        described = [piece.descriptor for _, piece in plan.descriptors(segments)]
        assert plan.num_descriptors(segments) == len(described)
        assert plan.num_bytes(segments) == sum(length for _, _, length in described)


class TestBrokenPlans:
    def test_a_region_of_a_group_that_the_request_lacks(self) -> None:
        plan = plan_of(region(), region(1, group_index=1))
        plan.check([segment([1], [2])], num_groups=2)
        with pytest.raises(BrokenPlanError, match=r"^Transfer region references a missing KV group\.$"):
            plan.check([segment([1], [2])], num_groups=1)

    def test_a_part_beyond_the_block(self) -> None:
        plan = make_plan([(region(length=512), region(length=256))], Ranks(tp_size=2), 0, 1, EIGHT_HEADS)
        with pytest.raises(BrokenPlanError, match=r"^Destination transfer region exceeds remote KV block size\.$"):
            plan.check([segment([1], [2])], num_groups=1)
