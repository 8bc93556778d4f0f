"""The pass depthwise-kernels computes depthwise convolutions and their gradients, and what it leaves is as right."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from irongrad.passes.module.depthwise_kernels import DepthwiseKernels, filters
from irongrad.runtime.cpu import cpu_features
from irongrad.targets import parse_target
from tests.fixtures.convolutions import Geometry, results_of
from tests.fixtures.processors import needs_x86

pytestmark = needs_x86

TARGETS = ["llvm-cpu", "llvm-cpu:cpu=x86-64-v3"]


def depthwise(batch: int, channels: int, *moves: tuple[int, ...], **named: tuple[int, ...]) -> Geometry:
    """A convolution in which each channel is a group."""
    return Geometry(batch, (channels, channels), channels, *moves, **named)


@pytest.fixture
def counted(monkeypatch):
    """What the pass says of each module."""
    return results_of(DepthwiseKernels, monkeypatch)


GEOMETRIES = {
    "3x3": depthwise(2, 32, (9, 11), (3, 3), (1, 1), (1, 1), (1, 1)),
    "7x7 of images that are smaller": depthwise(3, 16, (5, 4), (7, 7), (1, 1), (3, 3), (1, 1)),
    "with a stride": depthwise(2, 24, (12, 13), (3, 3), (2, 2), (1, 1), (1, 1)),
    "dilated": depthwise(2, 17, (12, 20), (3, 5), (1, 1), (2, 4), (2, 2)),
    "one row": depthwise(2, 40, (6, 20), (1, 9), (1, 2), (0, 4), (1, 1)),
    "one column": depthwise(2, 8, (20, 6), (5, 1), (2, 1), (2, 0), (1, 1)),
    "many images": depthwise(100, 40, (6, 6), (7, 7), (1, 1), (3, 3), (1, 1)),
    "one image": depthwise(1, 32, (16, 16), (3, 3), (1, 1), (1, 1), (1, 1)),
    "one dimension": depthwise(4, 12, (40,), (4,), (1,), (3,), (1,)),
    "without padding": depthwise(2, 5, (10, 10), (3, 3), (1, 1), (0, 0), (1, 1)),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_kernels_compute_convolutions_and_their_gradients(name, target, counted):
    if "avx2" not in (cpu_features() or ()):
        pytest.skip("the CPU has no AVX2")
    GEOMETRIES[name].check(target)
    assert counted[-1].stats["filters"] == 3


@pytest.mark.thinned(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_kernels_widen_and_round_bfloat16_themselves(name, target, counted):
    if "avx2" not in (cpu_features() or ()):
        pytest.skip("the CPU has no AVX2")
    GEOMETRIES[name].check_halves(target)
    assert counted[-1].stats["filters"] == 3
    assert counted[-1].stats["of halves"] == 3


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
    convolution = depthwise(**geometry)
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
    assert ("convolutions" in parse_target(target).abilities) == has_kernels
