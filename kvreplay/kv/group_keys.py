"""The prefix cache's keys where there are several groups: same content in different groups shares the hash, not the
key."""

from collections.abc import Iterable
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

_RUN_BITS: Final = 10
"""Prefix hashes that follow each other have keys that do, in runs of so many: a lookup then meets few cache lines."""

_Key = TypeVar("_Key", int, NDArray[np.int64])


def group_key(key: _Key, group: int, num_groups: int) -> _Key:
    """The key (or keys) of a prefix hash in one of several groups."""
    return key + (((key >> _RUN_BITS) * (num_groups - 1) + group) << _RUN_BITS)


def group_steps(offsets: Iterable[int], num_groups: int) -> NDArray[np.int64]:
    """From a key in one group to that in each group so many behind it, of shape [groups, 1]."""
    return np.array([group_key(0, offset, num_groups) for offset in offsets], np.int64)[:, None]


def group_of(key: _Key, num_groups: int) -> _Key:
    """Whose key (or keys) `group_key` has made."""
    return (key >> _RUN_BITS) % num_groups


def num_group_keys(num_keys: int, num_groups: int) -> int:
    """No such key is larger."""
    run = 1 << _RUN_BITS
    return num_keys if num_groups == 1 else -(-num_keys // run) * run * num_groups
