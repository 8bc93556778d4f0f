"""`--tune` measures the forms of products, within its time, and keeps them in the artifact and the cache."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import irongrad as ig
from irongrad.analysis.file import read_analysis
from irongrad.cache import Store
from irongrad.cli.main import cli
from irongrad.memory_model.product_tiles import AVX512, HALF_TILES
from irongrad.mlir.walk import parsed
from irongrad.passes.base import Choice, Measured
from irongrad.passes.module.matmul_kernels import forms_in
from irongrad.passes.module.matmul_kernels.forms import OF_IREE, Layout, ProductForm, ProductProblem
from irongrad.pipeline import tuned_products, tuned_step
from irongrad.pipeline.iree.compile import COMMON_FLAGS, Compilation, CompiledModule, compile_module
from irongrad.pipeline.package import Artifact
from irongrad.pipeline.rebuild import rebuild
from irongrad.pipeline.stopwatch import Stopwatch
from irongrad.pipeline.timed_calls import Call, Program
from irongrad.pipeline.tuned_products import choices_of_products, products_of, with_forms
from irongrad.pipeline.tuned_step import is_faster, times_of
from irongrad.pipeline.tuning_budget import TuningBudget
from irongrad.runtime.errors import ToolchainError
from irongrad.runtime.manifest import TUNED, UNTUNED, StepTimes, TuningSpec
from irongrad.runtime.manifest_file import read_manifest, write_manifest
from irongrad.runtime.session import Session
from irongrad.targets import Target, parse_target
from tests.fixtures.module_texts import functions_of
from tests.fixtures.processors import needs_x86

pytestmark = needs_x86


def problem(left: str = "rk", right: str = "kc", dtype: str = "f32", **sizes: int) -> ProductProblem:
    return ProductProblem(tuple(sorted(sizes.items())), left, right, dtype)


def test_forms_differ_from_the_default_in_one_respect():
    default = ProductForm(AVX512[0], Layout.IN_BLOCKS)
    forms = problem(r=1024, c=384, k=384).forms(default, AVX512)
    assert list(forms) == [
        "6x64 in blocks",
        "4x64 in blocks",
        "8x48 in blocks",
        "8x32 in blocks",
        "6x64 in place",
        "6x64 copied by the kernel",
        "6x64 in blocks parts of 256x384",
        "6x64 in blocks parts of 1024x1536",
        OF_IREE,
    ]
    in_rows = problem(right="ck", r=128, c=128, k=384).forms(default, AVX512)
    assert not any("place" in name or "parts" in name for name in in_rows)
    half = problem(dtype="bf16", r=128, c=128, k=384)
    tile = HALF_TILES["avx512bf16"][0]
    assert not any(
        "blocks" in n or "copied" in n for n in half.forms(ProductForm(tile, Layout.IN_PLACE), HALF_TILES["avx512bf16"])
    )


def test_a_form_is_found_by_its_name_whatever_the_default_is():
    """A product in a loop has another default than the same product alone, with which it is measured."""
    one = problem(r=128, c=384, k=384)
    in_loop, alone = (ProductForm(AVX512[0], layout) for layout in (Layout.IN_BLOCKS, Layout.COPIED))
    for name, form in one.forms(in_loop, AVX512).items():
        assert one.form(name, alone, AVX512) == form
    with pytest.raises(KeyError):
        one.form("9x99 in place", alone, AVX512)


@pytest.mark.parametrize("target", ["llvm-cpu", "llvm-cpu:cpu=x86-64-v3"])
def test_every_form_computes_the_product(target: str, tmp_path: Path):
    """Each function of one module is a product of other sizes, and takes another form."""
    with_sizes = {f"f{i}": problem(r=600 + i, c=192, k=64) for i in range(9)}
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


def _forms(module: Program, target: str, folder: Path) -> Mapping[ProductProblem, Mapping[str, ProductForm | None]]:
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


def test_a_budget_that_runs_out_measures_the_largest_products(monkeypatch: pytest.MonkeyPatch):
    """One that has begun is finished. How long it takes does not matter here, so nothing is compiled for it."""
    monkeypatch.setattr(tuned_products, "_AT_ONCE", 1)
    monkeypatch.setattr(tuned_products, "_measured", lambda some, target: dict.fromkeys(some, Measured({"x": 1.0})))
    module = products_of({"small": problem(r=128, c=128, k=128), "large": problem(r=192, c=192, k=192)})
    budget = TuningBudget(1e-9)
    (choice,) = choices_of_products(module, Stopwatch((parse_target("llvm-cpu"),), None, budget))
    assert "192x192" in choice.what
    assert (budget.timed, budget.left_out) == (1, 1)


def test_a_form_that_fails_to_compile_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch):
    """Other products of its module are compiled again without it."""

    def compiled(module: Program, target: Target, scratch: Path) -> CompiledModule:
        if any("128x128" in what and name.startswith("4x") for what, name in target.forms):
            raise ToolchainError("no registers\nin a kernel")
        return compile_module(module, target, scratch)

    monkeypatch.setattr(tuned_products, "compile_module", compiled)
    module = products_of({"small": problem(r=128, c=128, k=128), "large": problem(r=192, c=192, k=192)})
    choices = choices_of_products(module, Stopwatch((parse_target("llvm-cpu:cpu=x86-64-v4"),)))
    small, large = sorted(choices, key=lambda choice: "192" in choice.what)
    assert {name[:2] for name in small.failed} == {"4x"}
    assert {*small.failed.values()} == {"no registers"}
    assert small.chosen in small.seconds
    assert not large.failed
    assert any(name.startswith("4x") for name in large.seconds)


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([0.9] * 9, True),
        ([0.97, 0.9] * 10, True),
        ([0.985] * 200, False),  # as one step that is loaded twice
        ([0.5, 1.5] * 100, False),
        ([0.9] * 5 + [1.0] * 4, False),  # too few rounds for so much noise
        ([0.9] * 130 + [1.1] * 70, True),
        ([1.1] * 130 + [0.9] * 70, False),
    ],
)
def test_a_tuned_step_must_be_faster_by_more_than_noise(ratios: list[float], expected: bool):
    times = times_of([(ratio, 1.0) for ratio in ratios])
    assert times.tuned == min(ratios)
    assert times.untuned == 1.0
    assert times.ratio <= times.bound <= max(ratios)
    assert is_faster(times) == expected


def _step(learning_rate: float = 0.1) -> ig.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))
    inputs = {"x": torch.randn(128, 128), "y": torch.randint(0, 8, (128,))}
    return ig.TrainStep(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=learning_rate), inputs)


def _tuned(output: Path, ratio: float, step: ig.TrainStep | ig.Steps | None = None, **choices: Any) -> Artifact:
    """Compile with IREE's kernels as the fastest of the measured ones, and the `ratio` of the tuned step's time."""

    def fastest(default: str, calls: Mapping[str, Call], failed: Mapping[str, str]) -> Measured:
        return Measured({name: 1.0 + (name != OF_IREE) for name in calls}, (OF_IREE,), failed)

    def paired(one: Call, other: Call, most: float) -> list[tuple[float, float]]:
        for call in (one, other):
            call()
        return [(ratio, 1.0)] * 9

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned_products, "fastest", fastest)
        patch.setattr(tuned_step, "paired", paired)
        return ig.compile(step or _step(), output, **({"entry_points": ("train_step",), "tune": True} | choices))


@pytest.fixture(scope="module", name="tuned")
def tuned_fixture(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return _tuned(tmp_path_factory.mktemp("tuned") / "artifact", 0.5)


def test_a_faster_step_keeps_its_forms(tuned: Artifact):
    manifest = tuned.manifest
    assert manifest.tuning == TuningSpec(60, len(manifest.tuned), 0, StepTimes(0.5, 1.0, 0.5, 0.5), TUNED)
    assert {choice.chosen for choice in manifest.tuned} == {OF_IREE}
    assert not _own_kernels(tuned)
    shown = CliRunner().invoke(cli, ["inspect", str(tuned.directory)], catch_exceptions=False).output
    assert "a step takes 500 ms tuned, 1e+03 ms untuned, in turn 0.500, at most 0.500 of the time: the tuned forms" in (
        " ".join(shown.split())
    )


def _own_kernels(artifact: Artifact) -> list[str]:
    """The kernels of products that are ours."""
    (target,) = read_analysis(artifact.directory, artifact.manifest).targets.values()
    return [kernel.name for kernel in target.kernels if "product_" in kernel.name]


def test_the_report_names_what_failed_and_what_was_left_out(tuned: Artifact, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(tuned.directory, copy)
    first, *others = tuned.manifest.tuned
    assert tuned.manifest.tuning is not None
    choices = (replace(first, failed={"9x99 in place": "no registers"}), *others)
    tuning = replace(tuned.manifest.tuning, left_out=3, kept=UNTUNED)
    write_manifest(replace(tuned.manifest, tuned=choices, tuning=tuning), copy)
    shown = CliRunner().invoke(cli, ["inspect", str(copy)], catch_exceptions=False).output
    words = " ".join(shown.split())
    assert f"{first.what}: the form '9x99 in place' failed, and is left out: no registers" in words
    assert "3 not, for lack of time: they have their default forms" in words
    assert "no clear gain, so the default forms stay" in words


def test_a_rebuild_uses_the_forms_without_a_measurement(tuned: Artifact, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(tuned.directory, copy)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(tuned_products, "_measured")
        rebuilt = rebuild(copy)
    assert rebuilt.manifest.tuned == tuned.manifest.tuned
    assert rebuilt.manifest.tuning == tuned.manifest.tuning
    vmfb, same = ((folder / "step.llvm-cpu.vmfb").read_bytes() for folder in (tuned.directory, copy))
    assert vmfb == same


def test_a_rebuild_says_which_forms_no_longer_exist(tuned: Artifact, tmp_path: Path):
    """As with another version, or for another CPU."""
    copy = tmp_path / "copy"
    shutil.copytree(tuned.directory, copy)
    first, *others = tuned.manifest.tuned
    gone = replace(first, what="product rk 9x9, kc 9x9, f32")
    write_manifest(replace(tuned.manifest, tuned=(replace(first, chosen="9x99 in place"), gone, *others)), copy)
    rebuilt = rebuild(copy)
    assert rebuilt.manifest.tuned == (replace(first, chosen=first.default), *others)
    assert len(_own_kernels(rebuilt)) == 1


@pytest.mark.slow
def test_a_step_that_is_no_faster_keeps_the_default_forms(tmp_path: Path):
    artifact = _tuned(tmp_path / "tuned", 0.985)
    manifest = artifact.manifest
    assert manifest.tuning == TuningSpec(60, len(manifest.tuned), 0, StepTimes(0.985, 1.0, 0.985, 0.985), UNTUNED)
    assert all(choice.chosen == choice.default for choice in manifest.tuned)
    assert _own_kernels(artifact)
    ig.compile(_step(), tmp_path / "untuned", entry_points=("train_step",))
    kept, untuned = ((tmp_path / name / "step.llvm-cpu.vmfb").read_bytes() for name in ("tuned", "untuned"))
    assert kept == untuned


@pytest.mark.slow
def test_a_second_compilation_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nor does one of another step with the same products; all times come from the cache of this machine."""
    monkeypatch.setenv("IRONGRAD_CACHE_SIZE", "1GiB")
    monkeypatch.setenv("IRONGRAD_CACHE_DIR", str(tmp_path / "cache"))
    first = _tuned(tmp_path / "first", 0.5)
    monkeypatch.delattr(tuned_products, "_measured")
    monkeypatch.delattr(tuned_step, "paired")
    for number, step in enumerate((_step(), _step(0.2))):
        output = tmp_path / f"again{number}"
        ig.compile(step, output, entry_points=("train_step",), tune=True)
        again = read_manifest(output)
        assert again.tuned == first.manifest.tuned
        assert again.tuning == first.manifest.tuning


@pytest.mark.slow
def test_several_steps_on_several_targets_with_a_base(tmp_path: Path):
    """Each target has its own forms; the whole step is every step on every target."""
    torch.manual_seed(0)
    body, heads = nn.Linear(128, 128).requires_grad_(False), (nn.Linear(128, 8), nn.Linear(128, 16))
    models = [nn.Sequential(body, nn.Tanh(), head) for head in heads]
    inputs = {"x": torch.randn(128, 128), "y": torch.randint(0, 8, (128,))}
    steps = {
        name: ig.TrainStep(model, nn.CrossEntropyLoss(), torch.optim.SGD(head.parameters(), lr=0.1), inputs)
        for name, model, head in zip(("one", "other"), models, heads, strict=True)
    }
    targets = ["llvm-cpu", "llvm-cpu:cpu=x86-64-v3"]
    output = tmp_path / "tuned"
    artifact = _tuned(output, 0.5, ig.Steps(steps), target=targets, base=tmp_path / "base.irpa", entry_points=None)
    manifest = artifact.manifest
    assert {choice.target for choice in manifest.tuned} == {target.name for target in manifest.targets}
    assert all(target.certificate is not None for target in manifest.targets)
    assert manifest.base_file is not None
    assert (output / manifest.base_file.path).resolve() == (tmp_path / "base.irpa").resolve()
    for target in manifest.targets:
        session = Session(output, target=target.name)
        losses = [session.step("other").train_step(**{n: t.numpy() for n, t in inputs.items()}) for _ in range(3)]
        assert losses[-1] < losses[0]


@pytest.mark.slow
def test_a_tuned_step_trains_and_says_what_it_measured(tmp_path: Path):
    """Measured in earnest, whatever the outcome."""
    manifest = ig.compile(_step(), tmp_path / "tuned", entry_points=("train_step",), tune=True).manifest
    assert manifest.tuning is not None
    assert manifest.tuning.measured == len({(c.target, c.what) for c in manifest.tuned}) > 0
    assert manifest.targets[0].certificate is not None
    differing = [c for c in manifest.tuned if c.chosen != c.default]
    assert bool(differing) == (manifest.tuning.kept == TUNED)
    if manifest.tuning.kept == TUNED:
        assert manifest.tuning.step is not None
        assert manifest.tuning.step.bound < 1
