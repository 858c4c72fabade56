"""The identity of contents: which blocks of which requests hold the same tokens, without any token.

A request is a list of *segments*, each a start position and a 64-bit hash that stands for everything before
the segment's end. Prompt chunks bring their chained prefix hash; the output to come is one last segment, its
hash derived from the prompt ("generated tokens have the identity (prompt, index)"). Distinct segments are
interned, and each gets a dense range of *keys* for the blocks whose last token falls into it, so that the
prefix cache can be arrays instead of dictionaries (design §5). `TokenIndex` does it for known tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvreplay.kv.content import KeyArray, WordArray
from kvreplay.sim.rng import stable_hash

_Array = TypeVar("_Array", WordArray, KeyArray)

MASK64: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_POSITION_STRIDE: Final = 0xD1342543DE82EF95
"""Odd, so that the words of one segment never repeat."""
_RAMP_LIMIT: Final = 1 << 20
"""Positions whose share of the fingerprint is kept ready; later ones are computed when asked for."""
_RECENT_PROMPTS: Final = 64
NAMESPACE_PARAMS: Final = ("namespace", "cache_salt")
"""An arrival's parameters that keep its contents apart from others' of the same tokens."""
_WORTH_KEEPING: Final = 1024
"""Tokens: fewer words are computed faster than they are found."""


def _scramble(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK64
    return word ^ (word >> 31)


def mix64(*words: int) -> int:
    """64 bits that depend on all the words and their order (splitmix64's finaliser, chained)."""
    state = 0
    for word in words:
        state = _scramble((state ^ (word & MASK64)) + _GOLDEN & MASK64)
    return state


def mix64_arrays(*columns: NDArray[np.uint64] | int) -> WordArray:
    """`mix64` of each row. At least one column is an array."""
    state: NDArray[np.uint64] = np.zeros(1, np.uint64)
    for column in columns:
        word = np.uint64(column & MASK64) if isinstance(column, int) else column
        state = (state ^ word) + np.uint64(_GOLDEN)
        state ^= state >> np.uint64(30)
        state *= np.uint64(0xBF58476D1CE4E5B9)
        state ^= state >> np.uint64(27)
        state *= np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return state


def text_hash(text: str) -> int:
    """64 bits of a name (a salt, a namespace, a request id)."""
    return stable_hash(text)


class PromptSource(Protocol):
    """What the index needs to know of an arrival."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def prefix_hashes(self) -> NDArray[np.uint64]:
        """Chained: the c-th stands for the first (c + 1) * prefix_hash_tokens tokens, or the whole prompt."""
        ...

    @property
    def prefix_hash_tokens(self) -> int: ...
    @property
    def params(self) -> Mapping[str, Any]:
        """`cache_salt`, `namespace` keep contents apart; `session`, `turn` say whose output it contains."""
        ...


class _Segments(NamedTuple):
    """Consecutive pieces of requests, request after request; the last piece of each is its output."""

    hashes: WordArray
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def slice(self, begin: int, end: int) -> "_Segments":
        return _Segments(self.hashes[begin:end], self.starts[begin:end], self.ends[begin:end])


class ContentIndex:
    """Interns the segments of all requests of a workload, for one hash block size.

    Keys of prompt blocks come first; from `generated_key_start` on they belong to generated tokens.
    `num_lookahead_tokens`: tokens after a block that its hash covers, too.
    """

    def __init__(self, arrivals: Sequence[PromptSource], hash_block_size: int, num_lookahead_tokens: int = 0) -> None:
        assert hash_block_size > 0
        self.hash_block_size = hash_block_size
        self.num_lookahead = num_lookahead_tokens
        self.num_requests = len(arrivals)
        segments, offsets = _segments_of(arrivals)
        self._offsets: list[int] = offsets.tolist()
        self._starts, self._ends = segments.starts, segments.ends
        last = offsets[1:] - 1
        self._prompt_tokens: list[int] = segments.starts[last].tolist()
        self._total_tokens: list[int] = segments.ends[last].tolist()

        ids, first = _intern(mix64_arrays(segments.hashes, segments.starts.view(np.uint64)))
        self._ids = ids
        self.num_segments = len(first)
        is_output = np.zeros(len(ids), np.bool_)
        is_output[last] = True
        self._assign_keys(is_output[first])

        words = mix64_arrays(segments.hashes[first]) if len(first) else np.zeros(0, np.uint64)
        self._words = words[ids]
        self._output_hashes = segments.hashes[last]
        num_positions = min(max(self._total_tokens, default=0), _RAMP_LIMIT)
        self._ramp = np.arange(num_positions, dtype=np.uint64) * np.uint64(_POSITION_STRIDE)
        self._recent_prompts: dict[int, WordArray] = {}
        """Request → the words of its prompt."""
        self._recent_keys: dict[int, KeyArray] = {}
        """Request → its blocks' keys."""
        self._num_contents = [0] * len(arrivals)
        """How often each request's content was asked for: once for each leg."""
        self._block_ramp: KeyArray = np.arange(max(self._total_tokens, default=0) // hash_block_size, dtype=np.int64)

        uses = np.bincount(ids, minlength=self.num_segments)
        self._output_is_shared: list[bool] = (
            (uses[ids[last]] > 1) & (self._num_keys_of_segment[ids[last]] > 0)
        ).tolist()
        self.shares_generated = any(self._output_is_shared)
        """Whether some generated block can be looked up by a request other than its own: a later turn of the
        session, or (once preempted) a request with the same whole prompt."""

    def _assign_keys(self, segment_is_output: NDArray[np.bool_]) -> None:
        """Give each segment as many keys as its longest use has blocks whose hash ends in it."""
        first_blocks = self._blocks_until(self._starts)
        self._num_blocks = self._blocks_until(self._ends) - first_blocks
        num_keys = np.zeros(self.num_segments, np.int64)
        np.maximum.at(num_keys, self._ids, self._num_blocks)
        self._first_output_blocks = self._blocks_before_output(segment_is_output)
        order = np.argsort(segment_is_output, kind="stable")
        bases = np.empty(self.num_segments, np.int64)
        bases[order] = np.cumsum(num_keys[order]) - num_keys[order]
        self._num_keys_of_segment = num_keys
        self._shifts = bases[self._ids] - first_blocks
        """Key of a block less its index, for each piece."""
        self.num_keys = int(num_keys.sum())
        self.generated_key_start = int(num_keys[~segment_is_output].sum())

    def _blocks_before_output(self, segment_is_output: NDArray[np.bool_]) -> list[int]:
        """By request: its blocks before the first that ends in somebody's generated tokens; all if none does."""
        if not self.num_requests:
            return []
        is_output = segment_is_output[self._ids] & (self._num_blocks > 0)
        blocks = np.where(is_output, self._blocks_until(self._starts), np.iinfo(np.int64).max)
        whole = np.array(self._total_tokens, np.int64) // self.hash_block_size
        firsts: list[int] = np.minimum(np.minimum.reduceat(blocks, self._offsets[:-1]), whole).tolist()
        return firsts

    def _blocks_until(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Blocks that have a hash once so many tokens are known."""
        if self.num_lookahead:
            positions = np.maximum(positions - self.num_lookahead, 0)
        return positions // self.hash_block_size

    def content(self, request: int) -> "RequestContent":
        """The content of the request at this place in the workload; made anew at each call."""
        self._num_contents[request] += 1
        return RequestContent(self, request)

    def output_digests(self, requests: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> WordArray:
        """`RequestContent.output_digest` of many: request → the digest of its first `num_tokens` output tokens."""
        return mix64_arrays(self._output_hashes[requests], num_tokens.astype(np.uint64))


class RequestContent:
    """The identity of one request's tokens, up to its full output. Implements `kv.content.Content`."""

    __slots__ = (
        "_begin",
        "_block_keys",
        "_end",
        "_index",
        "_request",
        "num_prompt_tokens",
        "num_tokens",
        "output_hash",
        "output_is_shared",
    )

    def __init__(self, index: ContentIndex, request: int) -> None:
        self._index = index
        self._request = request
        self._begin = index._offsets[request]
        self._end = index._offsets[request + 1]
        self._block_keys: KeyArray | None = None
        self.num_prompt_tokens = index._prompt_tokens[request]
        self.num_tokens = index._total_tokens[request]
        """Prompt and whole output."""
        self.output_hash = int(index._output_hashes[request])
        """Identity of the output to come: follows from the whole prompt."""
        self.output_is_shared = index._output_is_shared[request]
        """Whether another request can look up blocks of this one's generated tokens."""

    @property
    def block_keys(self) -> KeyArray:
        if self._block_keys is None:
            index, begin, end = self._index, self._begin, self._end
            keys = index._recent_keys.get(self._request)
            if keys is None:
                keys = index._shifts[begin:end].repeat(index._num_blocks[begin:end])
                keys += index._block_ramp[: len(keys)]
                _remember(index._recent_keys, self._request, keys)
            self._block_keys = keys
        return self._block_keys

    def fingerprints(self, start: int, end: int) -> WordArray:
        """The word of each position in [start, end): its segment's, moved on by the position."""
        assert 0 <= start <= end <= self.num_tokens
        if (
            end - start >= _WORTH_KEEPING
            and end <= self.num_prompt_tokens
            and self._index._num_contents[self._request] > 1
        ):
            return self._prompt_words()[start:end]
        return self._fingerprints(start, end)

    def _prompt_words(self) -> WordArray:
        """Of the whole prompt: once one leg has written them, the other soon reads them."""
        recent = self._index._recent_prompts
        words = recent.get(self._request)
        if words is None:
            words = self._fingerprints(0, self.num_prompt_tokens)
            words.flags.writeable = False
            _remember(recent, self._request, words)
        return words

    def _fingerprints(self, start: int, end: int) -> WordArray:
        index = self._index
        if end <= len(index._ramp):
            ramp = index._ramp[start:end]
        else:
            ramp = np.arange(start, end, dtype=np.uint64) * np.uint64(_POSITION_STRIDE)
        if start >= self.num_prompt_tokens:
            return ramp + index._words[self._end - 1 : self._end]
        starts = index._starts[self._begin : self._end]
        first = int(starts.searchsorted(start, "right")) - 1
        last = int(starts.searchsorted(end, "left"))
        words = index._words[self._begin + first : self._begin + last]
        if last - first > 1:
            bounds = np.empty(last - first + 1, np.int64)
            bounds[0], bounds[-1] = start, end
            bounds[1:-1] = starts[first + 1 : last]
            words = words.repeat(bounds[1:] - bounds[:-1])
            words += ramp
            return words
        return words + ramp

    @property
    def first_output_block(self) -> int:
        """The first block that ends in somebody's generated tokens: an earlier turn's, or its own."""
        return self._index._first_output_blocks[self._request]

    @property
    def segment_ids(self) -> NDArray[np.int64]:
        """Dense ids of the request's segments, in order. Equal ids: equal tokens, as far as both go."""
        return self._index._ids[self._begin : self._end]

    @property
    def segment_starts(self) -> NDArray[np.int64]:
        return self._index._starts[self._begin : self._end]

    def output_digest(self, num_tokens: int) -> int:
        """Digest of the first `num_tokens` output tokens, as right contents give them."""
        return mix64(self.output_hash, num_tokens)


def _remember(recent: dict[int, _Array], request: int, array: _Array) -> None:
    recent[request] = array
    if len(recent) > _RECENT_PROMPTS:
        del recent[next(iter(recent))]


# -- from arrivals to segments -------------------------------------------------------------------------------


def _segments_of(arrivals: Sequence[PromptSource]) -> tuple[_Segments, NDArray[np.int64]]:
    """All requests' segments, and where each request's begin."""
    segments, offsets = _own_segments(arrivals)
    extended = _extended_turns(arrivals)
    if not extended:
        return segments, offsets
    pieces = [segments.slice(begin, end) for begin, end in pairwise(offsets.tolist())]
    for turn, earlier in extended:
        pieces[turn] = _extend(pieces[earlier], pieces[turn], arrivals[turn].output_tokens)
    lengths = [len(piece.hashes) for piece in pieces]
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    return _Segments(*(np.concatenate(columns) for columns in zip(*pieces, strict=True))), offsets


def _own_segments(arrivals: Sequence[PromptSource]) -> tuple[_Segments, NDArray[np.int64]]:
    """Each request's prompt chunks and output, from nothing but its own hashes."""
    if not arrivals:
        return _Segments(np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64)), np.zeros(1, np.int64)
    prompts = np.array([arrival.prompt_tokens for arrival in arrivals], np.int64)
    outputs = np.array([arrival.output_tokens for arrival in arrivals], np.int64)
    chunks = np.array([arrival.prefix_hash_tokens for arrival in arrivals], np.int64)
    counts = np.array([len(arrival.prefix_hashes) for arrival in arrivals], np.int64)
    assert (prompts > 0).all()
    assert (counts == -(-prompts // chunks)).all(), "one prefix hash for each prefix_hash_tokens of the prompt"

    offsets = np.concatenate([[0], np.cumsum(counts + 1)])
    last = offsets[1:] - 1
    is_chunk = np.ones(offsets[-1], np.bool_)
    is_chunk[last] = False
    hashes = np.empty(offsets[-1], np.uint64)
    hashes[is_chunk] = _salted(np.concatenate([arrival.prefix_hashes for arrival in arrivals]), arrivals, counts)
    hashes[last] = mix64_arrays(hashes[last - 1], prompts.view(np.uint64))

    places = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts + 1)
    starts = places * np.repeat(chunks, counts + 1)
    starts[last] = prompts
    ends = np.empty_like(starts)
    ends[:-1] = starts[1:]
    ends[last] = prompts + outputs
    return _Segments(hashes, starts, ends), offsets


def _salted(hashes: WordArray, arrivals: Sequence[PromptSource], counts: NDArray[np.int64]) -> WordArray:
    salts = [_salt(arrival.params) for arrival in arrivals]
    if not any(salts):
        return hashes
    per_hash = np.repeat(np.array(salts, np.uint64), counts)
    return np.where(per_hash == 0, hashes, mix64_arrays(hashes, per_hash))


def _salt(params: Mapping[str, Any]) -> int:
    """0 for none. The two names are independent: a tenant's namespace, and vLLM's `cache_salt`."""
    if not params:
        return 0
    salts = [f"{name}={params[name]}" for name in NAMESPACE_PARAMS if params.get(name) is not None]
    return text_hash("\n".join(salts)) if salts else 0


def _extended_turns(arrivals: Sequence[PromptSource]) -> list[tuple[int, int]]:
    """(later turn, the last earlier turn whose prompt and output it contains), earlier turns first."""
    sessions: dict[tuple[int, str], dict[int, int]] = {}
    for request, arrival in enumerate(arrivals):
        params = arrival.params
        if params and "session" in params and "turn" in params:
            session = sessions.setdefault((_salt(params), str(params["session"])), {})
            session.setdefault(int(params["turn"]), request)
    pairs: list[tuple[int, int]] = []
    for session in sessions.values():
        for before, after in pairwise(session[turn] for turn in sorted(session)):
            end = arrivals[before].prompt_tokens + arrivals[before].output_tokens
            # A prompt that ends earlier does not contain the whole turn: the client has cut its history.
            if arrivals[after].prompt_tokens >= end:
                pairs.append((after, before))
    return pairs


def _extend(earlier: _Segments, own: _Segments, output_tokens: int) -> _Segments:
    """The later turn's segments: the whole earlier turn, then what its own hashes say from there on."""
    cut, num_prompt_tokens = int(earlier.ends[-1]), int(own.starts[-1])
    is_new = (own.ends > cut) & (own.starts < num_prompt_tokens)
    hashes = np.concatenate([earlier.hashes, own.hashes[is_new]])
    output_hash = np.array([mix64(int(hashes[-1]), num_prompt_tokens)], np.uint64)
    starts = np.concatenate([earlier.starts, np.maximum(own.starts[is_new], cut), own.starts[-1:]])
    ends = np.append(starts[1:], num_prompt_tokens + output_tokens)
    return _Segments(np.concatenate([hashes, output_hash]), starts, ends)


def _intern(codes: WordArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Dense ids in order of first appearance, and where each first appears."""
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    ranks = np.empty(len(first), np.int64)
    ranks[order] = np.arange(len(first))
    return ranks[inverse], first[order]


# -- where tokens are known ----------------------------------------------------------------------------------


class TokenIndex:
    """Interns blocks of real tokens, as vLLM's hash chain does: (parent, tokens, salt in the first block).

    `num_lookahead_tokens`: tokens after a block that its hash covers, too.
    """

    shares_generated = True

    def __init__(self, hash_block_size: int, num_lookahead_tokens: int = 0) -> None:
        assert hash_block_size > 0
        self.hash_block_size = hash_block_size
        self.num_lookahead_tokens = num_lookahead_tokens
        self._keys: dict[tuple[int | None, tuple[int, ...], str | None], int] = {}
        self._segments: dict[int, int] = {}

    @property
    def num_keys(self) -> int:
        """Grows while contents do."""
        return len(self._keys)

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def content(self, prompt: Iterable[int], salt: str | None = None) -> "TokenContent":
        return TokenContent(self, list(prompt), salt)

    def key(self, parent: int | None, tokens: tuple[int, ...], salt: str | None) -> int:
        identity = (parent, tokens, salt if parent is None else None)
        return self._keys.setdefault(identity, len(self._keys))

    def segment(self, word: int) -> int:
        """Every token is a segment of its own, named by its word."""
        return self._segments.setdefault(word, len(self._segments))


class TokenContent:
    """The identity of explicit tokens; grows by `append`. Implements `kv.content.Content`."""

    __slots__ = ("_block_keys", "_index", "_keys", "_salt", "_tokens", "_words", "num_prompt_tokens")

    output_is_shared = True

    def __init__(self, index: TokenIndex, prompt: list[int], salt: str | None = None) -> None:
        assert prompt
        self._index = index
        self._salt = salt
        self._tokens: list[int] = []
        self._words: list[int] = []
        self._keys: list[int] = []
        self._block_keys: KeyArray = np.zeros(0, np.int64)
        self.num_prompt_tokens = len(prompt)
        for token in prompt:
            self.append(token)

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def append(self, token: int) -> None:
        """The next token has been sampled."""
        root = text_hash(self._salt) if self._salt else 0
        self._words.append(mix64(self._words[-1] if self._words else root, token))
        self._tokens.append(token)
        block_size, lookahead = self._index.hash_block_size, self._index.num_lookahead_tokens
        start = len(self._tokens) - lookahead - block_size
        if start >= 0 and start % block_size == 0:
            parent = self._keys[-1] if self._keys else None
            self._keys.append(self._index.key(parent, tuple(self._tokens[start:]), self._salt))

    @property
    def first_output_block(self) -> int:
        """All blocks may be somebody's output: who can tell, of explicit tokens."""
        return 0

    @property
    def block_keys(self) -> KeyArray:
        if len(self._block_keys) != len(self._keys):
            self._block_keys = np.array(self._keys, np.int64)
        return self._block_keys

    @property
    def segment_ids(self) -> NDArray[np.int64]:
        return np.array([self._index.segment(word) for word in self._words], np.int64)

    @property
    def segment_starts(self) -> NDArray[np.int64]:
        return np.arange(len(self._words))

    def fingerprints(self, start: int, end: int) -> WordArray:
        assert 0 <= start <= end <= len(self._words)
        return np.array(self._words[start:end], np.uint64)

    def output_digest(self, num_tokens: int) -> int:
        """Digest of the first `num_tokens` output tokens."""
        return mix64(self._words[self.num_prompt_tokens + num_tokens - 1], num_tokens)
