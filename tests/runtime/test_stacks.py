"""Kernels that need more stack than IREE gives its threads."""

from __future__ import annotations

import subprocess
import sys

from irongrad.runtime.stacks import WORKER_STACK

_PROGRAM = """
import torch, irongrad as ig
from torch.nn import functional as F

def function(x, w, b, v):
    return F.linear(F.gelu(F.linear(x, w, b)), v).square().mean()

torch.manual_seed(0)
arguments = torch.randn(200, 64), torch.randn(256, 64) * 0.05, torch.zeros(256), torch.randn(64, 256) * 0.05
ig.compile_function(function, arguments, gradients=True)
"""


def test_a_gelu_after_a_product_runs_on_the_workers_stack():
    """In a new process, because a stack of 128 KiB ends in a segmentation fault (with 16 by 16 tiles)."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_iree_run_module_knows_the_flag():
    done = subprocess.run(["iree-run-module", WORKER_STACK, "--dump_devices"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
