"""torch, in two thirds of the time that its import takes."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Final

_META_KERNELS: Final = "torch._meta_registrations"


def import_torch() -> None:
    """Import torch, but for its meta kernels: what shape an operator's result would have, for tensors without memory.

    They are a third of all that torch does when it is imported (2.6 as 2.13), and nobody here has such a tensor.
    Whoever imports their module later gets them, as if nothing had been.
    """
    if "torch" in sys.modules:
        return
    sys.modules[_META_KERNELS] = ModuleType(_META_KERNELS)
    try:
        torch = import_module("torch")
    finally:
        del sys.modules[_META_KERNELS]
    parent, _, name = _META_KERNELS.rpartition(".")
    assert torch.__name__ == parent
    vars(torch).pop(name, None)
