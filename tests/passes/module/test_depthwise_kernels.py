"""The pass depthwise-kernels computes depthwise convolutions and their gradients, and what it leaves is as right."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import irongrad as ig
from irongrad.passes.base import PassResult
from irongrad.passes.module.depthwise_kernels import DepthwiseKernels, filters
from irongrad.runtime.cpu import cpu_features
from irongrad.targets import parse_target

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernels are for x86-64")

TARGETS = ["llvm-cpu", "llvm-cpu:cpu=x86-64-v3"]


@dataclass(frozen=True)
class Geometry:
    """A depthwise convolution of one or two dimensions.

    Attributes:
        batch: the number of images.
        channels: the number of channels.
        sizes: the size of an image.
        kernel: the size of the kernel.
        stride: the stride.
        padding: the padding.
        dilation: the dilation.
    """

    batch: int
    channels: int
    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def out(self) -> list[int]:
        """The size of the result."""
        every = zip(self.sizes, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return [(size + 2 * pad - (taps - 1) * apart - 1) // step + 1 for size, taps, step, pad, apart in every]

    def with_gradients(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, grad: torch.Tensor) -> Any:
        """The convolution of a function of `x`, and its three gradients."""
        x = torch.tanh(x)
        moves = (self.stride, self.padding, self.dilation, False, [0] * len(self.sizes), self.channels)
        result = torch.ops.aten.convolution(x, weight, bias, *moves)
        every = [True, True, True]
        return torch.relu(result), *torch.ops.aten.convolution_backward(grad, x, weight, [self.channels], *moves, every)

    def check(self, target: str, calls: int = 1) -> None:
        """Compile it, which compares it with float64, and compare the results of several calls."""
        torch.manual_seed(0)
        shapes = (self.batch, self.channels, *self.sizes), (self.channels, 1, *self.kernel), (self.channels,)
        operands = [torch.randn(shape) for shape in (*shapes, (self.batch, self.channels, *self.out))]
        function = ig.compile_function(self.with_gradients, operands, target=target, cache=False)
        results = [function(*(t.numpy() for t in operands)) for _ in range(calls)]
        assert all(np.array_equal(x, y) for one in results for x, y in zip(one, results[0], strict=True))


@pytest.fixture
def counted(monkeypatch):
    """What the pass says of each module."""
    found: list[PassResult] = []
    run = DepthwiseKernels.run

    def count(self, module):
        found.append(run(self, module))
        return found[-1]

    monkeypatch.setattr(DepthwiseKernels, "run", count)
    return found


GEOMETRIES = {
    "3x3": Geometry(2, 32, (9, 11), (3, 3), (1, 1), (1, 1), (1, 1)),
    "7x7 of images that are smaller": Geometry(3, 16, (5, 4), (7, 7), (1, 1), (3, 3), (1, 1)),
    "with a stride": Geometry(2, 24, (12, 13), (3, 3), (2, 2), (1, 1), (1, 1)),
    "dilated": Geometry(2, 17, (12, 20), (3, 5), (1, 1), (2, 4), (2, 2)),
    "one row": Geometry(2, 40, (6, 20), (1, 9), (1, 2), (0, 4), (1, 1)),
    "one column": Geometry(2, 8, (20, 6), (5, 1), (2, 1), (2, 0), (1, 1)),
    "many images": Geometry(100, 40, (6, 6), (7, 7), (1, 1), (3, 3), (1, 1)),
    "one image": Geometry(1, 32, (16, 16), (3, 3), (1, 1), (1, 1), (1, 1)),
    "one dimension": Geometry(4, 12, (40,), (4,), (1,), (3,), (1,)),
    "without padding": Geometry(2, 5, (10, 10), (3, 3), (1, 1), (0, 0), (1, 1)),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_kernels_compute_convolutions_and_their_gradients(name, target, counted):
    if "avx2" not in (cpu_features() or ()):
        pytest.skip("the CPU has no AVX2")
    GEOMETRIES[name].check(target)
    assert counted[-1].stats["filters"] == 3


def test_threads_that_share_the_last_channels_do_not_disturb_each_other():
    """The last vector of channels overlaps the one before, and another thread may compute it."""
    GEOMETRIES["many images"].check("llvm-cpu", calls=200)


@pytest.mark.parametrize("name", ["3x3", "with a stride", "one image"])
def test_iree_computes_the_same_without_kernels(name, monkeypatch):
    monkeypatch.setattr(DepthwiseKernels, "applies", lambda self, context: False)
    GEOMETRIES[name].check("llvm-cpu")


@pytest.mark.parametrize("name", ["3x3", "with a stride", "dilated"])
def test_a_cpu_without_vectors_has_no_kernels(name, counted):
    GEOMETRIES[name].check("llvm-cpu:cpu=x86-64")
    assert not counted[-1].changed


def test_kernels_with_more_columns_than_can_be_written_are_left_alone(counted, monkeypatch):
    monkeypatch.setattr(filters, "_MOST_TAPS", 2)
    GEOMETRIES["3x3"].check("llvm-cpu")
    assert counted[-1].stats["filters"] == 0


pair = st.tuples(st.integers(1, 3), st.integers(1, 3))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 5),
    channels=st.integers(2, 50),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 24)),
    kernel=st.tuples(st.integers(1, 7), st.integers(1, 9)),
    stride=pair,
    padding=st.tuples(st.integers(0, 3), st.integers(0, 4)),
    dilation=pair,
    target=st.sampled_from(TARGETS),
)
def test_kernels_compute_convolutions_of_any_geometry(target, **geometry):
    convolution = Geometry(**geometry)
    assume(min(convolution.out) >= 1)
    convolution.check(target)


@pytest.mark.parametrize(
    ("target", "has_kernels"),
    [
        ("llvm-cpu:cpu=x86-64-v3", True),
        ("llvm-cpu:cpu=znver4", True),
        ("llvm-cpu:cpu=x86-64", False),
        ("llvm-cpu:cpu=x86-64,features=+fma", True),
        ("llvm-cpu:arch=aarch64", False),
        ("vulkan", False),
    ],
)
def test_a_target_tells_whether_there_are_kernels_for_it(target, has_kernels):
    assert ("depthwise" in parse_target(target).abilities) == has_kernels
