"""Micro-benchmarks of the block pool and the content index.

    python -m pytest -p benchmark tests/benchmarks/bench_micro.py

Sizes are those of an hour of conversations on one instance: 65,536 blocks, prompts of some 12,000 tokens.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.content_index import ContentIndex
from kvreplay.trace.workload import Arrival

NUM_BLOCKS = 65_536
NUM_KEYS = 1 << 20
PROMPT_BLOCKS = 750

Benchmark = Callable[..., Any]


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(NUM_BLOCKS, NUM_KEYS)


def keys(first: int, count: int) -> NDArray[np.int64]:
    return np.arange(first, first + count, dtype=np.int64) % NUM_KEYS


class TestBlockPool:
    def test_a_prompt_comes_and_goes(self, benchmark: Benchmark, pool: BlockPool) -> None:
        """Take, hash and free its blocks; from the 88th on, each takes what others had hashed."""
        place = 0

        def life() -> None:
            nonlocal place
            taken = pool.get_new_blocks(PROMPT_BLOCKS)
            pool.cache(taken, keys(place, PROMPT_BLOCKS))
            pool.free_blocks(taken[::-1])
            place += PROMPT_BLOCKS

        benchmark(life)

    def test_a_prompt_hits(self, benchmark: Benchmark, pool: BlockPool) -> None:
        taken = pool.get_new_blocks(PROMPT_BLOCKS)
        pool.cache(taken, keys(0, PROMPT_BLOCKS))
        pool.free_blocks(taken[::-1])
        wanted = keys(0, PROMPT_BLOCKS)

        def hit() -> None:
            found = pool.find_prefix(wanted)
            pool.touch(found)
            pool.free_blocks(found[::-1])

        benchmark(hit)

    def test_a_prompt_misses(self, benchmark: Benchmark, pool: BlockPool) -> None:
        wanted = keys(0, PROMPT_BLOCKS)
        benchmark(lambda: pool.find_prefix(wanted))

    def test_a_decoding_request_grows(self, benchmark: Benchmark, pool: BlockPool) -> None:
        place = 0
        block_id = pool.take_one()

        def grow() -> None:
            nonlocal place, block_id
            grown = pool.cache_and_take_one(block_id, place)
            pool.free_blocks(np.array([block_id], np.int64))
            block_id = grown
            place = (place + 1) % NUM_KEYS

        benchmark(grow)

    def test_the_same_content_many_times(self, benchmark: Benchmark, pool: BlockPool) -> None:
        wanted = keys(0, PROMPT_BLOCKS)

        def twins() -> None:
            taken = [pool.get_new_blocks(PROMPT_BLOCKS) for _ in range(3)]
            for block_ids in taken:
                pool.cache(block_ids, wanted)
            for block_ids in taken:
                pool.free_blocks(block_ids[::-1])

        benchmark(twins)


@pytest.fixture(scope="module")
def arrivals() -> list[Arrival]:
    """A thousand prompts of 24 chunks of 512 tokens; half of each is shared with ten others."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 1 << 63, size=(100, 12), dtype=np.uint64)
    return [
        Arrival(
            f"r{number}",
            number,
            12_288,
            343,
            np.concatenate([shared[number % 100], rng.integers(0, 1 << 63, size=12, dtype=np.uint64)]),
            512,
        )
        for number in range(1_000)
    ]


class TestContentIndex:
    def test_interning_a_thousand_prompts(self, benchmark: Benchmark, arrivals: list[Arrival]) -> None:
        benchmark(lambda: ContentIndex(arrivals, 16))

    def test_the_keys_of_a_prompt(self, benchmark: Benchmark, arrivals: list[Arrival]) -> None:
        index = ContentIndex(arrivals, 16)
        benchmark(lambda: index.content(500).block_keys)

    def test_the_words_of_a_prompt(self, benchmark: Benchmark, arrivals: list[Arrival]) -> None:
        content = ContentIndex(arrivals, 16).content(500)
        benchmark(lambda: content.fingerprints(0, 12_288))

    def test_the_words_of_generated_tokens(self, benchmark: Benchmark, arrivals: list[Arrival]) -> None:
        content = ContentIndex(arrivals, 16).content(500)
        benchmark(lambda: content.fingerprints(12_300, 12_316))
