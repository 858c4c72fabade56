"""ContentIndex and TokenIndex: equal keys and words, equal prefixes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvreplay.kv.content_index import ContentIndex, TokenIndex, mix64, mix64_arrays


@dataclass(frozen=True, slots=True)
class Prompt:
    """An arrival whose chunk c holds the text `chunks[c]`; the last chunk may be partial."""

    prompt_tokens: int
    output_tokens: int
    chunks: tuple[int, ...]
    prefix_hash_tokens: int = 4
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prefix_hashes(self) -> NDArray[np.uint64]:
        hashes, parent = [], 0
        for place, chunk in enumerate(self.chunks):
            parent = mix64(parent, chunk, place)
            hashes.append(parent)
        return np.array(hashes, np.uint64)


def tokens_of(prompt: Prompt) -> list[tuple[object, ...]]:
    """A name for every token, such that equal names mean equal prefixes: the definition, spelled out."""
    chunk, salt = prompt.prefix_hash_tokens, tuple(sorted(prompt.params.items()))
    names: list[tuple[object, ...]] = [
        (salt, prompt.chunks[: position // chunk + 1], position) for position in range(prompt.prompt_tokens)
    ]
    whole = (salt, prompt.chunks, prompt.prompt_tokens)
    return names + [(whole, position) for position in range(prompt.output_tokens)]


@st.composite
def prompts(draw: st.DrawFn, chunk: int) -> Prompt:
    chunks = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    last = draw(st.integers(1, chunk))
    salt = draw(st.sampled_from([{}, {"cache_salt": "a"}, {"namespace": "a"}]))
    return Prompt((len(chunks) - 1) * chunk + last, draw(st.integers(1, 9)), tuple(chunks), chunk, salt)


WORKLOADS = st.integers(1, 6).flatmap(lambda chunk: st.lists(prompts(chunk), min_size=1, max_size=6))


@given(WORKLOADS, st.integers(1, 5))
def test_two_blocks_have_the_same_key_exactly_when_they_hold_the_same_prefix(
    workload: list[Prompt], block_size: int
) -> None:
    index = ContentIndex(workload, block_size)
    name_of_key: dict[int, object] = {}
    key_of_name: dict[object, int] = {}
    for place, prompt in enumerate(workload):
        keys = index.content(place).block_keys
        tokens = tokens_of(prompt)
        assert len(keys) == len(tokens) // block_size
        for block, key in enumerate(keys.tolist()):
            # The position is part of the name, so the last token of a block names the block.
            name = tokens[(block + 1) * block_size - 1]
            assert name_of_key.setdefault(key, name) == name
            assert key_of_name.setdefault(name, key) == key
            assert 0 <= key < index.num_keys


@given(WORKLOADS, st.data())
def test_two_positions_have_the_same_word_exactly_when_they_hold_the_same_prefix(
    workload: list[Prompt], data: st.DataObject
) -> None:
    index = ContentIndex(workload, 4)
    name_of_word: dict[int, object] = {}
    word_of_name: dict[object, int] = {}
    for place, prompt in enumerate(workload):
        tokens, content = tokens_of(prompt), index.content(place)
        words = content.fingerprints(0, content.num_tokens).tolist()
        for name, word in zip(tokens, words, strict=True):
            assert name_of_word.setdefault(word, name) == name
            assert word_of_name.setdefault(name, word) == word
        start = data.draw(st.integers(0, len(tokens)))
        end = data.draw(st.integers(start, len(tokens)))
        assert content.fingerprints(start, end).tolist() == words[start:end]


@given(WORKLOADS, st.integers(1, 5))
def test_keys_of_generated_tokens_can_be_told_from_those_of_prompts(workload: list[Prompt], block_size: int) -> None:
    index = ContentIndex(workload, block_size)
    for place, prompt in enumerate(workload):
        is_generated = index.content(place).block_keys >= index.generated_key_start
        assert is_generated.tolist() == [
            (block + 1) * block_size > prompt.prompt_tokens for block in range(len(is_generated))
        ]


SESSIONS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 7)), min_size=1, max_size=5)
"""Of each turn: tokens of new text, tokens of output."""


@given(SESSIONS, st.integers(1, 5))
def test_the_first_output_block_is_the_first_with_a_generated_key(
    turns: list[tuple[int, int]], block_size: int
) -> None:
    workload, length = [], 3
    for number, (num_new, num_output) in enumerate(turns):
        length += num_new
        workload.append(turn("s", number, length, num_output, tuple(range(1, -(-length // 4) + 1))))
        length += num_output
    index = ContentIndex(workload, block_size)
    for place in range(len(workload)):
        content = index.content(place)
        generated = [*(content.block_keys >= index.generated_key_start).tolist(), True]
        assert content.first_output_block == generated.index(True)


def test_a_partial_last_chunk_shares_what_it_covers_with_the_full_chunk() -> None:
    index = ContentIndex([Prompt(16, 4, (1, 2), 8), Prompt(13, 4, (1, 2), 8)], 2)
    full, partial = index.content(0), index.content(1)
    assert partial.block_keys[:6].tolist() == full.block_keys[:6].tolist()
    assert partial.block_keys[6] not in full.block_keys


def turn(session: str, number: int, prompt_tokens: int, output_tokens: int, chunks: tuple[int, ...]) -> Prompt:
    return Prompt(prompt_tokens, output_tokens, chunks, 4, {"session": session, "turn": number})


def test_a_later_turn_finds_the_earlier_turns_output() -> None:
    # 6 prompt + 5 output tokens, then 16 = 6 + 5 + 5 new ones; blocks of 2.
    workload = [turn("s", 0, 6, 5, (1, 2)), turn("s", 1, 16, 3, (1, 3, 4, 5))]
    index = ContentIndex(workload, 2)
    first, second = index.content(0), index.content(1)

    assert second.block_keys[:5].tolist() == first.block_keys.tolist()
    assert second.fingerprints(0, 11).tolist() == first.fingerprints(0, 11).tolist()
    assert second.segment_starts.tolist() == [0, 4, 6, 11, 12, 16]
    assert index.shares_generated
    assert first.output_is_shared
    assert not second.output_is_shared
    assert len(set(second.block_keys.tolist()) - set(first.block_keys.tolist())) == 19 // 2 - 5


def test_a_turn_that_adds_no_text_continues_the_output() -> None:
    index = ContentIndex([turn("s", 0, 6, 2, (1, 2)), turn("s", 1, 8, 4, (1, 9))], 2)
    assert index.content(1).block_keys[:4].tolist() == index.content(0).block_keys.tolist()
    assert index.content(1).segment_starts.tolist() == [0, 4, 6, 8]


def test_turns_reach_through_a_session_even_if_one_is_missing() -> None:
    workload = [
        turn("s", 0, 4, 4, (1,)),
        turn("s", 3, 12, 4, (1, 2, 3)),
        turn("s", 7, 20, 4, (1, 2, 3, 4, 5)),
    ]
    index = ContentIndex(workload, 4)
    keys = [index.content(place).block_keys.tolist() for place in range(3)]
    assert keys[1][:2] == keys[0]
    assert keys[2][:4] == keys[1]


@pytest.mark.parametrize(
    "later",
    [
        pytest.param(turn("s", 1, 7, 4, (1, 2)), id="history cut by the client"),
        pytest.param(turn("other", 1, 16, 4, (1, 3, 4, 5)), id="another session"),
        pytest.param(
            Prompt(16, 4, (1, 3, 4, 5), 4, {"session": "s", "turn": 1, "namespace": "b"}), id="another tenant"
        ),
    ],
)
def test_nothing_generated_is_shared_where_no_history_is_contained(later: Prompt) -> None:
    assert not ContentIndex([turn("s", 0, 6, 5, (1, 2)), later], 2).shares_generated


def test_requests_with_the_same_whole_prompt_share_their_output() -> None:
    index = ContentIndex([Prompt(6, 8, (1, 2)), Prompt(6, 3, (1, 2)), Prompt(5, 8, (1, 2))], 2)
    same, shorter, other = (index.content(place) for place in range(3))
    assert shorter.block_keys.tolist() == same.block_keys[:4].tolist()
    assert same.output_digest(3) == shorter.output_digest(3) != same.output_digest(4)
    assert other.output_digest(3) != same.output_digest(3)
    together = index.output_digests(np.array([1, 2, 0]), np.array([3, 3, 4]))
    assert together.tolist() == [shorter.output_digest(3), other.output_digest(3), same.output_digest(4)]
    assert [same.output_is_shared, shorter.output_is_shared, other.output_is_shared] == [True, True, False]


def test_positions_past_the_prepared_ramp_follow_the_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = [Prompt(11, 7, (1, 2, 3))]
    expected = ContentIndex(workload, 4).content(0).fingerprints(0, 18).tolist()
    monkeypatch.setattr("kvreplay.kv.content_index._RAMP_LIMIT", 5)
    assert ContentIndex(workload, 4).content(0).fingerprints(0, 18).tolist() == expected


def test_an_empty_workload_has_no_keys() -> None:
    assert ContentIndex([], 16).num_keys == 0


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), min_size=1))
def test_mixing_arrays_is_mixing_each_row(rows: list[tuple[int, int]]) -> None:
    left, right = (np.array(column, np.uint64) for column in zip(*rows, strict=True))
    assert mix64_arrays(left, right, 7).tolist() == [mix64(a, b, 7) for a, b in rows]


# -- explicit tokens -----------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=2, max_size=5))
def test_blocks_of_tokens_have_the_same_key_exactly_when_all_tokens_up_to_their_end_agree(
    token_lists: list[list[int]],
) -> None:
    index = TokenIndex(2)
    key_of_prefix: dict[tuple[int, ...], int] = {}
    for tokens in token_lists:
        content = index.content(tokens[:1])
        for token in tokens[1:]:
            content.append(token)
        for block, key in enumerate(content.block_keys.tolist()):
            prefix = tuple(tokens[: 2 * block + 2])
            assert key_of_prefix.setdefault(prefix, key) == key
    assert sorted(key_of_prefix.values()) == list(range(index.num_keys))


def test_a_salt_keeps_equal_tokens_apart() -> None:
    index = TokenIndex(2)
    plain, salted, again = (
        index.content([1, 2, 3, 4]),
        index.content([1, 2, 3, 4], "x"),
        index.content([1, 2], "x"),
    )
    assert not set(plain.block_keys.tolist()) & set(salted.block_keys.tolist())
    assert again.block_keys.tolist() == salted.block_keys[:1].tolist()
    assert plain.fingerprints(0, 4).tolist() != salted.fingerprints(0, 4).tolist()
    assert again.fingerprints(0, 2).tolist() == salted.fingerprints(0, 2).tolist()
