"""Memory that costs nothing until it is touched."""

import mmap
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from kvreplay.kv.content import WordArray

if TYPE_CHECKING:
    from torch import Tensor

Item = TypeVar("Item", bound=np.generic)


@overload
def lazy_zeros(count: int) -> NDArray[np.int32]: ...
@overload
def lazy_zeros(count: int, dtype: np.dtype[Item]) -> NDArray[Item]: ...
def lazy_zeros(count: int, dtype: np.dtype[Any] = np.dtype(np.int32)) -> NDArray[Any]:  # noqa: B008 - a constant
    """Zeros in small pages of the operating system: a cell per key of the whole workload is cheap. (numpy asks for
    huge pages, of which a few keys touch nearly all. And a virtual machine may have given huge pages back to its host:
    there, touching one takes milliseconds, many times what its small pages take.)"""
    count = max(count, 1)
    if sys.platform == "win32":
        return np.zeros(count, dtype)
    memory = mmap.mmap(-1, dtype.itemsize * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages does not know the word
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype)


def words_and_tensor(num_blocks: int, num_words: int) -> "tuple[WordArray, Tensor]":
    """Contents of blocks, as shape [num_blocks, num_words]: a torch tensor of int64, and the same memory for numpy."""
    import torch

    torch.set_num_threads(1)
    # torch would touch them all.
    words: WordArray = lazy_zeros(num_blocks * num_words, np.dtype(np.uint64))[: num_blocks * num_words]
    words = words.reshape(num_blocks, num_words)
    return words, torch.from_numpy(words.view(np.int64))
