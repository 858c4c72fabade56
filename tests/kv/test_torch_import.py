"""In processes of their own: torch can be imported only once."""

import subprocess
import sys

import pytest


def output_of(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tensors_work_without_meta_kernels() -> None:
    code = """
import sys
from kvreplay.kv.torch_import import import_torch
import_torch()
from kvreplay.kv.buffers import KVBuffers
buffers = KVBuffers(4, 2)
buffers.tensor[1, 0] = 7
print(buffers.words.tolist(), "torch._meta_registrations" in sys.modules)
"""
    assert output_of(code) == "[[0, 0], [7, 0], [0, 0], [0, 0]] False\n"


def test_who_asks_for_meta_kernels_later_gets_them() -> None:
    code = """
from kvreplay.kv.torch_import import import_torch
import_torch()
import torch._meta_registrations
a = torch.zeros(2, 3, device="meta")
print(tuple((a @ a.T).shape), len(vars(torch._meta_registrations)) > 100)
"""
    assert output_of(code) == "(2, 2) True\n"


@pytest.mark.parametrize("times", [1, 2])
def test_what_is_imported_already_stays(times: int) -> None:
    code = f"""
import sys, torch
from kvreplay.kv.torch_import import import_torch
for _ in range({times}):
    import_torch()
print("torch._meta_registrations" in sys.modules)
"""
    assert output_of(code) == "True\n"
