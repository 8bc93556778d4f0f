"""`--tune` measures the forms of products, within its time, and keeps them in the artifact and the cache."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import irongrad as ig
from irongrad.cache import Store
from irongrad.cli.main import cli
from irongrad.memory_model.product_tiles import AVX512, HALF_TILES
from irongrad.mlir.walk import parsed
from irongrad.passes.base import Choice
from irongrad.passes.module.matmul_kernels import forms_in
from irongrad.passes.module.matmul_kernels.forms import OF_IREE, ProductForm, ProductProblem
from irongrad.pipeline import tuned_products, tuned_step
from irongrad.pipeline.iree.compile import COMMON_FLAGS, Compilation, compile_module
from irongrad.pipeline.package import Artifact
from irongrad.pipeline.rebuild import rebuild
from irongrad.pipeline.stopwatch import Stopwatch
from irongrad.pipeline.tuned_products import Products, choices_of_products, products_of, with_forms
from irongrad.pipeline.tuning_budget import TuningBudget
from irongrad.runtime.manifest import TUNED, UNTUNED, TuningSpec
from irongrad.targets import parse_target
from tests.fixtures.module_texts import functions_of

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="needs an x86 CPU")


def problem(left: str = "rk", right: str = "kc", dtype: str = "f32", **sizes: int) -> ProductProblem:
    return ProductProblem(tuple(sorted(sizes.items())), left, right, dtype)


def test_forms_differ_from_the_default_in_one_respect():
    default = ProductForm(AVX512[0], in_blocks=True)
    forms = problem(r=1024, c=384, k=384).forms(default, AVX512)
    assert list(forms) == [
        "6x64 in blocks",
        "4x64 in blocks",
        "8x48 in blocks",
        "8x32 in blocks",
        "6x64 in place",
        "6x64 in blocks parts of 256x384",
        "6x64 in blocks parts of 1024x1536",
        OF_IREE,
    ]
    in_rows = problem(right="ck", r=128, c=128, k=384).forms(default, AVX512)
    assert not any("place" in name or "parts" in name for name in in_rows)
    half = problem(dtype="bf16", r=128, c=128, k=384)
    tile = HALF_TILES["avx512bf16"][0]
    assert not any("blocks" in n for n in half.forms(ProductForm(tile, in_blocks=False), HALF_TILES["avx512bf16"]))


@pytest.mark.parametrize("target", ["llvm-cpu", "llvm-cpu:cpu=x86-64-v3"])
def test_every_form_computes_the_product(target: str, tmp_path: Path):
    """Each function of one module is a product of other sizes, and takes another form."""
    with_sizes = {f"f{i}": problem(r=600 + i, c=192, k=64) for i in range(8)}
    with_sizes["batch"] = problem("kbr", "bck", b=3, r=128, c=192, k=64)
    made = _forms(products_of(with_sizes), target, tmp_path)
    names = {one: list(made[one])[i % len(made[one])] for i, one in enumerate(with_sizes.values())}
    assert set(names.values()) >= set(made[with_sizes["f0"]])
    chosen = tuple((str(one), name) for one, name in names.items())
    compiled = compile_module(products_of(with_sizes), replace(parse_target(target), forms=chosen), tmp_path)
    loaded = functions_of(compiled.vmfb)
    random = np.random.default_rng(0)
    for function, one in with_sizes.items():
        sizes = dict(one.sizes)
        a, b = (random.integers(-4, 5, [sizes[x] for x in s]).astype(np.float32) for s in (one.left, one.right))
        exact = np.einsum(f"{one.left},{one.right}->{'b' * ('b' in sizes)}rc", a, b)
        np.testing.assert_array_equal(getattr(loaded, function)(a, b).to_host(), exact, err_msg=names[one])


def _forms(module: Products, target: str, folder: Path) -> Mapping[ProductProblem, Mapping[str, ProductForm | None]]:
    source = folder / "step.mlirbc"
    source.write_bytes(module.bytecode)
    compiled_for = parse_target(target)
    compilation = Compilation.of(source, compiled_for, [*COMMON_FLAGS, *compiled_for.flags])
    with parsed(compilation.to_global_optimization()) as whole:
        return forms_in(whole)


def test_products_are_measured_once(tmp_path: Path):
    module = products_of({"f": problem(r=128, c=128, k=128)})
    store, targets = Store(tmp_path, 1 << 20), (parse_target("llvm-cpu"),)
    first, second, none = TuningBudget(60), TuningBudget(60), TuningBudget(0)
    (choice,) = choices_of_products(module, Stopwatch(targets, store, first))
    assert choice.what == "product rk 128x128, kc 128x128, f32"
    assert choice.target == "llvm-cpu"
    assert choice.chosen in choice.seconds
    assert min(choice.seconds.values()) > 0
    assert OF_IREE in choice.seconds
    assert (first.timed, first.left_out) == (1, 0)
    assert choices_of_products(module, Stopwatch(targets, store, second)) == (choice,)
    assert (second.timed, second.known) == (0, 1)
    assert choices_of_products(module, Stopwatch(targets, None, none)) == ()
    assert (none.timed, none.left_out) == (0, 1)


def test_only_forms_that_differ_from_the_default_change_a_target():
    target = parse_target("llvm-cpu")
    same = Choice("a", "x", {"x": 1.0}, "x", "llvm-cpu")
    other = Choice("b", "y", {"x": 1.0, "y": 0.5}, "x", "llvm-cpu")
    assert with_forms(target, [same]) == target
    assert with_forms(target, [same, other, replace(other, what="c", target="vulkan")]).forms == (("b", "y"),)


def _step() -> ig.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))
    inputs = {"x": torch.randn(128, 128), "y": torch.randint(0, 8, (128,))}
    return ig.TrainStep(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), inputs)


def _tuned(output: Path, step: Mapping[str, float]) -> Artifact:
    """Compile with IREE's kernels as the fastest of the measured ones, and `step` as the seconds of the whole step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned_products, "fastest", lambda calls: {name: 1.0 + (name != OF_IREE) for name in calls})
        patch.setattr(tuned_step, "fastest", lambda calls, most: {name: step[name] for name in calls})
        return ig.compile(_step(), output, entry_points=("train_step",), tune=True, cache=False)


def test_a_faster_step_keeps_its_forms_and_a_rebuild_uses_them(tmp_path: Path):
    times = {TUNED: 1.0, UNTUNED: 2.0}
    manifest = _tuned(tmp_path / "tuned", times).manifest
    assert manifest.tuning == TuningSpec(60, len(manifest.tuned), 0, times, TUNED)
    assert {choice.chosen for choice in manifest.tuned} == {OF_IREE}
    ig.compile(_step(), tmp_path / "untuned", entry_points=("train_step",))
    vmfb, untuned = ((tmp_path / name / "step.llvm-cpu.vmfb").read_bytes() for name in ("tuned", "untuned"))
    assert vmfb != untuned
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(tuned_products, "_measured")
        rebuild(tmp_path / "tuned")
    assert (tmp_path / "tuned" / "step.llvm-cpu.vmfb").read_bytes() == vmfb
    shown = CliRunner().invoke(cli, ["inspect", str(tmp_path / "tuned")], catch_exceptions=False).output
    assert "a step takes 1e+03 ms tuned, 2e+03 ms untuned: the tuned forms are kept" in " ".join(shown.split())


def test_a_step_that_is_no_faster_keeps_the_default_forms(tmp_path: Path):
    times = {TUNED: 2.0, UNTUNED: 1.0}
    manifest = _tuned(tmp_path / "tuned", times).manifest
    assert manifest.tuning == TuningSpec(60, len(manifest.tuned), 0, times, UNTUNED)
    assert all(choice.chosen == choice.default for choice in manifest.tuned)
    ig.compile(_step(), tmp_path / "untuned", entry_points=("train_step",))
    kept, untuned = ((tmp_path / name / "step.llvm-cpu.vmfb").read_bytes() for name in ("tuned", "untuned"))
    assert kept == untuned


def test_a_tuned_step_trains_and_says_what_it_measured(tmp_path: Path):
    """Measured in earnest, whatever the outcome."""
    manifest = ig.compile(_step(), tmp_path / "tuned", entry_points=("train_step",), tune=True, cache=False).manifest
    assert manifest.tuning is not None
    assert manifest.tuning.measured == len(manifest.tuned) > 0
    assert manifest.targets[0].certificate is not None
    differing = [c for c in manifest.tuned if c.chosen != c.default]
    assert bool(differing) <= (manifest.tuning.kept == TUNED)
    if manifest.tuning.kept == TUNED:
        assert manifest.tuning.step[TUNED] < manifest.tuning.step[UNTUNED]
