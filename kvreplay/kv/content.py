"""What a request's tokens are: identities of blocks for the prefix cache, fingerprints for KV contents."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

KeyArray = NDArray[np.int64]
WordArray = NDArray[np.uint64]


class Content(Protocol):
    """The identity of a request's tokens, prompt and output to come. Shared by the request's legs."""

    @property
    def block_keys(self) -> KeyArray:
        """One dense key per full hash block, chained: equal keys, equal prefixes. At least `num_tokens // hash
        block size` long."""
        ...

    @property
    def segment_ids(self) -> NDArray[np.int64]:
        """Dense ids of the runs of tokens that share one prefix hash, in order of position."""
        ...

    @property
    def segment_starts(self) -> NDArray[np.int64]:
        """First position of each segment; ascending, the first is 0."""
        ...

    @property
    def first_output_block(self) -> int:
        """Blocks before this one hold no tokens that an engine has generated."""
        ...

    def fingerprints(self, start: int, end: int) -> WordArray:
        """The word that each position in [start, end) has when computed from right contents (shape [end - start])."""
        ...
