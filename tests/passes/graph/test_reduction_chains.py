"""The number of kernels that IREE makes of chains of reductions in training."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from irongrad.frontends.compile_function import flat_function, trace_function
from irongrad.mlir.walk import found_in, parsed
from irongrad.passes import DEFAULT_LEVEL, passes_at, run_passes
from irongrad.pipeline.assemble.interface import describe_function
from irongrad.pipeline.backend import portable_function
from irongrad.pipeline.iree.compile import COMMON_FLAGS, Compilation
from irongrad.targets import parse_target


@pytest.fixture(name="kernels")
def kernels_fixture(tmp_path):
    """Counts the kernels of a function, compiled up to the phase `flow`."""

    def count(fn, *examples):
        target = parse_target("llvm-cpu")
        graph = trace_function(flat_function(fn, examples, gradients=False), fn)
        graph = run_passes(graph, passes_at(DEFAULT_LEVEL), [target.backend])
        module = portable_function(graph, describe_function(graph), tmp_path)
        source = tmp_path / "module.mlirbc"
        source.write_bytes(module.bytecode)
        with parsed(Compilation.of(source, target, [*COMMON_FLAGS, *target.flags]).to_flow()) as flow:
            return len(found_in(flow, "flow.dispatch"))

    return count


def with_backward(fn):
    def both(grad, *values):
        result, backward = torch.func.vjp(fn, *values)
        return result, *backward(grad)

    return both


CHAINS = {
    "softmax": (lambda x: functional.softmax(x, -1), (), 1, 2),
    "log_softmax": (lambda x: functional.log_softmax(x, -1), (), 2, 3),
    "layer_norm": (lambda x, w, b: functional.layer_norm(x, (64,), w, b), ((64,), (64,)), 2, 8),
    "rms_norm": (lambda x, w: functional.rms_norm(x, (64,), w), ((64,),), 1, 5),
}


@pytest.mark.parametrize("name", CHAINS)
def test_kernels_of_a_chain(kernels, name):
    """Fewer kernels are better: then lower the figures in `CHAINS`."""
    fn, shapes, forward, both = CHAINS[name]
    values = [torch.randn(s) for s in ((256, 64), *shapes)]
    assert kernels(fn, *values) == forward
    assert kernels(with_backward(fn), torch.randn(256, 64), *values) == both


def test_kernels_of_a_cross_entropy(kernels):
    """Two of the kernels check the range of the targets."""

    def loss_and_slope(x, y):
        return torch.func.grad_and_value(functional.cross_entropy)(x, y)

    x, y = torch.randn(256, 64), torch.randint(0, 64, (256,))
    assert kernels(functional.cross_entropy, x, y) == 8
    assert kernels(loss_and_slope, x, y) == 10
