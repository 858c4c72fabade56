"""Names of contents outside an engine that do not say whose they are: equal for equal tokens, whatever their salt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvreplay.kv.content import KeyArray, WordArray
from kvreplay.kv.content_index import NAMESPACE_PARAMS, ContentIndex, PromptSource


@dataclass(frozen=True, slots=True)
class _Unsalted:
    prompt_tokens: int
    output_tokens: int
    prefix_hashes: NDArray[np.uint64]
    prefix_hash_tokens: int
    params: Mapping[str, Any]


def shared_names(index: ContentIndex, arrivals: Sequence[PromptSource]) -> KeyArray:
    """For each key of `index` that of the first request with the same tokens in the same place."""
    plain = ContentIndex([_without_salt(arrival) for arrival in arrivals], index.hash_block_size, index.num_lookahead)
    names: KeyArray = np.arange(index.num_keys, dtype=np.int64)
    first = np.full(plain.num_keys, -1, np.int64)
    for request in range(len(arrivals)):
        own, same = index.content(request).block_keys, plain.content(request).block_keys
        unnamed = first[same] < 0
        first[same[unnamed]] = own[unnamed]
        names[own] = first[same]
    return names


def _without_salt(arrival: PromptSource) -> _Unsalted:
    params = {name: value for name, value in arrival.params.items() if name not in NAMESPACE_PARAMS}
    hashes: WordArray = arrival.prefix_hashes
    return _Unsalted(arrival.prompt_tokens, arrival.output_tokens, hashes, arrival.prefix_hash_tokens, params)
