"""The pass convolution-kernels computes convolutions and their gradients, and what it leaves is as right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from iree.compiler import ir
from iree.compiler.dialects import arith
from torch import nn

import irongrad as ig
from irongrad.memory_model import product_tiles
from irongrad.passes.graph.convolutions import Convolutions
from irongrad.passes.module.matmul_kernels import amx, products
from irongrad.passes.module.matmul_kernels.convolutions import ConvolutionKernels
from irongrad.runtime.cpu import cpu_features
from tests.fixtures.convolutions import Geometry, results_of
from tests.fixtures.half_products import AMX, FAST_AVX512_BF16, runs
from tests.fixtures.processors import needs_x86

pytestmark = [
    needs_x86,
    pytest.mark.skipif("avx2" not in (cpu_features() or ()), reason="the CPU has no AVX2"),
]

# By target, how many products multiply bfloat16 as such, if fewer than two: the others add over odd numbers of
# neighbours, have too few summands or rows for AMX, or rows of which too few are neighbours.
OF_HALVES = {
    FAST_AVX512_BF16: dict.fromkeys(["few inputs", "one row", "one dimension", "a multiple of each channel"], 1)
    | {"one input": 0},
    AMX: {"one input": 1, "one column": 1, "many groups": 1, "a multiple of each channel": 0},
}
TARGETS_OF_HALVES = [
    pytest.param(target, marks=pytest.mark.skipif(not runs(target), reason="needs a CPU with its instructions"))
    for target in OF_HALVES
]

TARGETS = ["llvm-cpu", "llvm-cpu:cpu=x86-64-v3"]

PLAIN = Geometry(2, (32, 32), 1, (12, 12), (3, 3), (1, 1), (1, 1), (1, 1))

GEOMETRIES = {
    "3x3": PLAIN,
    "with a stride": replace(PLAIN, sizes=(13, 16), stride=(2, 3)),
    "dilated": replace(PLAIN, padding=(2, 4), dilation=(2, 4)),
    "few outputs": replace(PLAIN, channels=(64, 3), kernel=(9, 9), padding=(4, 4)),
    "few inputs": replace(PLAIN, channels=(3, 64), kernel=(7, 7), padding=(3, 3), stride=(2, 2), sizes=(24, 24)),
    "one input": replace(PLAIN, batch=8, channels=(1, 40), kernel=(5, 5)),
    "columns that no tile covers": replace(PLAIN, channels=(24, 72)),
    "one row": replace(PLAIN, channels=(48, 32), kernel=(1, 7), padding=(0, 3)),
    "one column": replace(PLAIN, kernel=(5, 1), padding=(2, 0), stride=(2, 1)),
    "one image": replace(PLAIN, batch=1, sizes=(20, 20)),
    "an even kernel": replace(PLAIN, kernel=(4, 4), stride=(2, 2)),
    "groups": replace(PLAIN, channels=(64, 64), groups=2),
    "many groups": replace(PLAIN, channels=(64, 64), groups=16, batch=4, stride=(2, 2)),
    "a multiple of each channel": replace(PLAIN, channels=(24, 72), groups=24, batch=6, kernel=(5, 5)),
    "long sums": replace(PLAIN, channels=(250, 16), sizes=(8, 9), batch=1),
    "many images": replace(PLAIN, batch=64, channels=(16, 16), sizes=(9, 9)),
    "one dimension": Geometry(2, (32, 48), 1, (100,), (7,), (1,), (3,), (1,)),
}


@pytest.fixture(autouse=True)
def always_windowed(monkeypatch):
    """The graph pass takes the kernels for every convolution that has them, of any size."""

    def costs(self, problem, allowed, of_problem=Convolutions._default_costs):
        costs = of_problem(self, problem, allowed)
        return {form: cost * (form.name != "windowed") for form, cost in costs.items()}

    monkeypatch.setattr(Convolutions, "_default_costs", costs)
    monkeypatch.setattr(product_tiles, "SMALLEST", 1)


@pytest.fixture
def counted(monkeypatch):
    """What the pass says of each module."""
    return results_of(ConvolutionKernels, monkeypatch)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_kernels_compute_convolutions_and_their_gradients(name, target, counted):
    geometry = GEOMETRIES[name]
    geometry.check(target)
    assert counted[-1].stats["convolutions"] >= 2


def test_kernels_on_several_threads_give_the_same_numbers_in_every_call():
    GEOMETRIES["many images"].check("llvm-cpu", calls=100)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("target", TARGETS_OF_HALVES)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_kernels_multiply_bfloat16_as_such(name, target, counted):
    GEOMETRIES[name].check_halves(target)
    assert counted[-1].stats["of halves"] >= OF_HALVES[target].get(name, 2)


@pytest.mark.skipif(not runs(FAST_AVX512_BF16), reason="needs a CPU with its instructions")
@pytest.mark.parametrize(("channels", "sizes", "taps"), [((1, 64), (29, 29), (2, 2)), ((1, 256), (63, 31), (3, 2))])
def test_pairs_of_taps_lie_an_odd_number_of_elements_apart(channels, sizes, taps, counted):
    replace(PLAIN, batch=8, channels=channels, sizes=sizes, kernel=taps, padding=(0, 0)).check_halves(FAST_AVX512_BF16)
    assert counted[-1].stats["of halves"] >= 1


@pytest.mark.skipif(not runs(AMX), reason="needs AMX")
@pytest.mark.parametrize("name", ["3x3", "with a stride", "long sums", "columns that no tile covers"])
def test_windows_are_as_right_where_linux_denies_amx(name, counted, monkeypatch):
    monkeypatch.setattr(amx, "asked", lambda tile: arith.constant(ir.IntegerType.get_signless(1), 0))
    GEOMETRIES[name].check_halves(AMX)
    assert counted[-1].stats["of halves"] >= 2


class _Scaled(nn.Module):
    """A convolution of scaled images, so that a step computes the gradient of the images."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        torch.manual_seed(0)
        of_rank = {1: nn.Conv1d, 2: nn.Conv2d}[len(geometry.sizes)]
        moves = geometry.kernel, geometry.stride, geometry.padding, geometry.dilation, geometry.groups
        self.scale, self.convolution = nn.Parameter(torch.tensor(0.5)), of_rank(*geometry.channels, *moves)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(self.scale * x.to(self.scale.dtype))


def batch_of(geometry: Geometry, images: int) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(images)
    shapes = {"x": (geometry.channels[0], *geometry.sizes), "y": (geometry.channels[1], *geometry.out)}
    return {name: torch.randn(images, *shape, generator=numbers) for name, shape in shapes.items()}


# Geometries, and how many products of windows a step has; the gradient of a weight is another product.
OF_ANY_IMAGES = dict.fromkeys(
    ["3x3", "with a stride", "dilated", "few outputs", "few inputs", "long sums", "one row", "one dimension"], 1
) | {"groups": 0}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", OF_ANY_IMAGES)
def test_kernels_compute_convolutions_of_any_number_of_images(name, target, counted, tmp_path, trains_as_eager):
    geometry = GEOMETRIES[name]

    def make() -> ig.TrainStep:
        model = _Scaled(geometry)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        dynamic = {"x": {0: "B"}, "y": {0: "B"}}
        return ig.TrainStep(model, nn.functional.mse_loss, optimizer, batch_of(geometry, 5), dynamic=dynamic)

    session = ig.compile(make(), tmp_path, target, entry_points=("train_step", "reset"), cache=False).load()
    assert counted[-1].stats["convolutions"] >= OF_ANY_IMAGES[name]
    assert name != "groups" or not counted[-1].changed
    trains_as_eager(session, make(), [batch_of(geometry, n) for n in (1, 2, 7, 40)], rtol=1e-4, state=(1e-3, 1e-5))


@pytest.mark.parametrize("target", ["llvm-cpu:cpu=x86-64-v3", "llvm-cpu"])
def test_bfloat16_is_widened_where_no_kernel_multiplies_it(target, counted, monkeypatch):
    monkeypatch.setattr(products, "HALF_TILES", {})
    PLAIN.check_halves(target)
    assert counted[-1].stats["convolutions"] > counted[-1].stats["of halves"] == 0


@pytest.mark.parametrize("groups", [1, 4, 32], ids=["dense", "groups", "depthwise"])
def test_a_convolution_may_read_another(groups, counted):
    """Nothing lies between the two, so that the first is replaced while the second still reads it."""

    def both(x: torch.Tensor, weight: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(nn.functional.conv2d(x, weight, groups=groups), other, groups=groups)

    torch.manual_seed(0)
    operands = [torch.randn(2, 32, 14, 14), *(torch.randn(32, 32 // groups, 3, 3) for _ in range(2))]
    ig.compile_function(both, operands, cache=False)
    assert counted[-1].stats["convolutions"] == (2 if groups < 32 else 0)


@pytest.mark.parametrize("name", ["3x3", "with a stride", "groups"])
def test_iree_computes_the_same_without_kernels(name, monkeypatch):
    monkeypatch.setattr(ConvolutionKernels, "applies", lambda self, context: False)
    GEOMETRIES[name].check("llvm-cpu")


@pytest.mark.parametrize("name", ["3x3", "with a stride", "groups"])
def test_a_cpu_without_vectors_has_no_kernels(name, counted):
    GEOMETRIES[name].check("llvm-cpu:cpu=x86-64")
    assert not counted[-1].changed


pair = st.tuples(st.integers(1, 3), st.integers(1, 3))


GEOMETRY = {
    "batch": st.integers(1, 5),
    "groups": st.sampled_from([1, 1, 1, 2, 3, 8]),
    "per_group": st.tuples(st.integers(1, 40), st.integers(1, 80)),
    "sizes": st.tuples(st.integers(1, 12), st.integers(1, 24)),
    "kernel": st.tuples(st.integers(1, 7), st.integers(1, 9)),
    "stride": pair,
    "padding": st.tuples(st.integers(0, 3), st.integers(0, 4)),
    "dilation": pair,
}


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(target=st.sampled_from(TARGETS), **GEOMETRY)
def test_kernels_compute_convolutions_of_any_geometry(target, groups, per_group, **moves):
    inner, outer = per_group
    geometry = Geometry(channels=(inner * groups, outer * groups), groups=groups, **moves)
    assume(min(geometry.out) >= 1)
    geometry.check(target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS_OF_HALVES)
@settings(max_examples=80, deadline=None)
@given(**GEOMETRY)
def test_kernels_compute_convolutions_of_bfloat16_of_any_geometry(target, groups, per_group, **moves):
    inner, outer = per_group
    geometry = Geometry(channels=(inner * groups, outer * groups), groups=groups, **moves)
    assume(min(geometry.out) >= 1)
    geometry.check_halves(target)
