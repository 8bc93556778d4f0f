"""An unchanged build comes from the cache, byte for byte. Entries that are damaged or missing are built again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.cache import Store
from irongrad.cache.artifacts import ARTIFACT
from irongrad.pipeline import build_cache
from irongrad.pipeline.build_cache import CacheEntry
from irongrad.pipeline.build_run import Build
from irongrad.pipeline.driver import build
from irongrad.pipeline.iree import compile_cached
from irongrad.pipeline.iree.compile_cached import MODULE
from irongrad.pipeline.options import make_options
from irongrad.runtime.report import Report


def make_step(seed: int = 0) -> ig.TrainStep:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    torch.manual_seed(seed)
    inputs = {"x": torch.randn(2, 4), "y": torch.randn(2, 3)}
    return ig.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)


def run(store: Store | None, output: Path, step: ig.TrainStep | None = None) -> Build:
    options = make_options(output, entry_points=("train_step", "predict"))
    return build(step or make_step(), replace(options, cache=store))


def files(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Path, Build]:
    """A cache, and the build that filled it."""
    directory = tmp_path_factory.mktemp("cached")
    store = Store(directory / "cache", 2**30)
    return store, directory / "first", run(store, directory / "first")


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The targets that iree-compile runs for."""
    ran: list[str] = []
    original = compile_cached.compile_module

    def counted(module, target, *arguments):
        ran.append(target.name)
        return original(module, target, *arguments)

    monkeypatch.setattr(compile_cached, "compile_module", counted)
    return ran


def test_an_unchanged_build_is_the_same_one(first, compilations, tmp_path):
    store, directory, made = first
    again = run(store, tmp_path / "again")
    assert (made.cached, again.cached) == (False, True)
    assert again.seconds.keys() == {"capture", "cache"}
    assert compilations == []
    assert files(tmp_path / "again") == files(directory)
    assert (again.passes, again.statistics, again.memory) == (made.passes, made.statistics, made.memory)
    assert again.artifact.reports == made.artifact.reports
    assert again.artifact.reports["llvm-cpu"].passed
    loss = again.artifact.load().train_step(**{n: t.numpy() for n, t in make_step().inputs.items()})
    assert np.isfinite(loss)


def test_an_older_artifact_is_replaced(first, tmp_path):
    store, directory, _ = first
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_text("{}")
    assert run(store, tmp_path / "out").cached
    assert files(tmp_path / "out") == files(directory)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_other_golden_values_take_the_same_compiled_file(first, compilations, tmp_path):
    store, directory, _ = first
    other = run(store, tmp_path / "other", make_step(seed=1))
    assert not other.cached
    assert compilations == []
    changed = {n for n, content in files(tmp_path / "other").items() if content != files(directory)[n]}
    assert changed == {"analysis.json.gz", "golden.safetensors", "manifest.json"}  # the record has the errors


def test_a_changed_step_is_compiled(first, compilations, tmp_path):
    store, _, _ = first
    step = replace(make_step(), clip_grad_value=0.5)
    assert not run(store, tmp_path / "other", step).cached
    assert compilations == ["llvm-cpu"]


def test_without_a_cache_nothing_is_read_or_kept(first, compilations, tmp_path, monkeypatch):
    store, _, _ = first
    monkeypatch.setenv("IRONGRAD_CACHE_DIR", str(store.directory))
    monkeypatch.setenv("IRONGRAD_CACHE_SIZE", "1GiB")
    before = store.entries()
    ig.compile(make_step(), tmp_path / "out", entry_points=("train_step", "predict"), cache=False)
    assert compilations == ["llvm-cpu"]
    assert store.entries() == before


def test_a_dumped_or_stopped_build_runs(first, tmp_path):
    store, _, _ = first
    options = replace(make_options(tmp_path / "out", dump_dir=tmp_path / "dump", stop_after="passes"), cache=store)
    assert not build(make_step(), options).cached
    assert any((tmp_path / "dump").iterdir())


@pytest.mark.parametrize("damage", ["truncated", "other contents", "another manifest"])
def test_a_damaged_artifact_is_compiled_again_and_kept(first, damage, compilations, tmp_path):
    store, directory, _ = first
    (entry,) = [e for e in store.entries() if e.kind == ARTIFACT and _is_of(store, e.path.name, directory, tmp_path)]
    if damage == "truncated":
        entry.path.write_bytes(entry.path.read_bytes()[:1000])
    elif damage == "other contents":
        store.put(ARTIFACT, entry.path.name, {"record.msgpack": b"\xc1"})
    else:
        (tmp_path / "into").mkdir()
        store.get(ARTIFACT, entry.path.name, tmp_path / "into")
        changed = files(tmp_path / "into") | {"state.irpa": b"other"}
        store.put(ARTIFACT, entry.path.name, changed)
    assert not run(store, tmp_path / "out").cached
    assert compilations == []  # the compiled file has its own entry
    assert files(tmp_path / "out") == files(directory)
    assert run(store, tmp_path / "out").cached


def _is_of(store: Store, key: str, directory: Path, scratch: Path) -> bool:
    into = scratch / key
    into.mkdir()
    return store.get(ARTIFACT, key, into) and files(into)["manifest.json"] == files(directory)["manifest.json"]


def test_a_damaged_module_is_compiled_again(first, compilations, tmp_path):
    store = Store(shutil.copytree(first[0].directory, tmp_path / "cache"), 2**30)
    for entry in store.entries():
        if entry.kind == MODULE:
            store.put(MODULE, entry.path.name, {"module.msgpack": b"\xc1"})
        else:
            entry.path.unlink()
    assert not run(store, tmp_path / "out").cached
    assert compilations == ["llvm-cpu"]


def test_an_unverified_artifact_is_not_kept(first, tmp_path):
    """The device may be available at the next build."""
    _, _, made = first
    artifact = made.artifact
    manifest = replace(
        artifact.manifest, targets=tuple(replace(t, certificate=None) for t in artifact.manifest.targets)
    )
    place = CacheEntry(Store(tmp_path / "cache", 2**30), "ab" * 32)
    record = build_cache.BuildRecord(made.passes, made.statistics, artifact.reports)
    place.keep(replace(artifact, manifest=manifest), record)
    assert place.load(tmp_path / "out") is None
    place.keep(artifact, record)
    loaded, _ = place.load(tmp_path / "out")
    assert loaded.manifest == artifact.manifest


def test_a_record_keeps_infinite_tolerances(tmp_path, first):
    _, _, made = first
    report = made.artifact.reports["llvm-cpu"]
    infinite = Report((replace(report.comparisons[0], allowed=float("inf")),), report.steps, report.oracle)
    place = CacheEntry(Store(tmp_path / "cache", 2**30), "ab" * 32)
    place.keep(made.artifact, build_cache.BuildRecord(made.passes, made.statistics, {"llvm-cpu": infinite}))
    assert place.load(tmp_path / "out")[1].reports["llvm-cpu"] == infinite


def test_a_compiled_function_takes_the_same_compiled_file(compilations, tmp_path, monkeypatch):
    monkeypatch.setenv("IRONGRAD_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("IRONGRAD_CACHE_SIZE", "1GiB")
    x = torch.arange(4.0)
    for _ in range(2):
        assert ig.compile_function(lambda x: x * 3, (x,))(x.numpy()).tolist() == [0, 3, 6, 9]
    assert compilations == ["llvm-cpu"]
    ig.compile_function(lambda x: x * 3, (x,), cache=False)
    assert compilations == ["llvm-cpu"] * 2
