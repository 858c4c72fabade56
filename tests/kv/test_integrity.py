"""Checksums of blocks, and the corruptions that they must tell."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvreplay.kv.integrity import checksums, damage_mask

WORDS = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20)
DRAWS = st.integers(0, 2**80)


@given(WORDS, DRAWS)
def test_a_corruption_changes_every_word_and_the_checksum(words: list[int], draw: int) -> None:
    sent = np.array([words], np.uint64)
    delivered = sent ^ damage_mask(draw, len(words))
    assert (delivered != sent).all()
    assert checksums(delivered) != checksums(sent)


@given(WORDS, st.data())
def test_a_change_of_one_word_changes_the_checksum(words: list[int], data: st.DataObject) -> None:
    sent = np.array([words, words], np.uint64)
    place = data.draw(st.integers(0, len(words) - 1))
    sent[1, place] ^= np.uint64(data.draw(st.integers(1, 2**64 - 1)))
    first, second = checksums(sent)
    assert first != second


def test_an_exchange_of_two_words_changes_the_checksum() -> None:
    first, second = checksums(np.array([[1, 2, 3], [3, 2, 1]], np.uint64))
    assert first != second
