"""A command line whose inputs are unchanged is not run again; it runs if anything that it read has changed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from irongrad.cache import Store, recordings
from irongrad.cache.artifacts import ARTIFACT
from irongrad.cache.recordings import RECORDING, CommandPlace, command_key, command_place
from irongrad.cli.recorded import repeated

STEP = """
import tabnanny
import json
from pathlib import Path

import torch
from torch import nn

import irongrad as ig
from network import make_model

HERE = Path(__file__).parent


def make_step():
    scale = json.loads((HERE / "data" / "scale.json").read_text())
    if (HERE / "override.json").exists():
        scale = json.loads((HERE / "override.json").read_text())
    count = len(list((HERE / "data").iterdir()))
    try:
        import optional
    except ImportError:
        optional = None
    model = make_model()
    inputs = {"x": torch.randn(2, 4) * scale, "y": torch.full((2, 3), float(count))}
    return ig.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
"""
NETWORK = """
from torch import nn


def make_model():
    return nn.Linear(4, 3)
"""


@dataclass(frozen=True)
class Project:
    """A directory with a step, and the cache that holds the recording of its compilation."""

    directory: Path
    store: Store

    def compile(self, *options: str) -> tuple[dict, str]:
        """Run the command line; return its JSON report and the log of its imports."""
        arguments = ("-o", "out", "--entry-point", "train_step", "--depfile", "step.d", "--json", *options)
        return self.run("compile", "work/step.py:make_step", *arguments)

    def run(self, *arguments: str) -> tuple[dict, str]:
        """Run a command line; return its JSON report and the log of its imports."""
        command = [sys.executable, "-X", "importtime", "-m", "irongrad", *arguments]
        environment = os.environ | {"IRONGRAD_CACHE_DIR": str(self.store.directory), "IRONGRAD_CACHE_SIZE": "1GiB"}
        environment |= {"PYTHONPATH": str(Path(recordings.__file__).parents[2])}
        environment.pop("PYTEST_CURRENT_TEST", None)
        ran = subprocess.run(command, cwd=self.directory, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return json.loads(ran.stdout), ran.stderr

    def files(self) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in (self.directory / "out").iterdir()}

    def places(self) -> list[CommandPlace]:
        return [CommandPlace(self.store, e.path.name) for e in self.store.entries() if e.kind == RECORDING]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, dict]:
    """A project whose compilation is recorded, and the report of that compilation."""
    directory = tmp_path_factory.mktemp("recorded")
    project = Project(directory, Store(directory / "cache", 2**30))
    (directory / "work" / "data").mkdir(parents=True)
    (directory / "work" / "step.py").write_text(STEP)
    (directory / "work" / "network.py").write_text(NETWORK)
    (directory / "work" / "data" / "scale.json").write_text("2.0")
    return project, project.compile()[0]


@pytest.fixture
def place(first) -> CommandPlace:
    """The place of the recording; the files of the project are restored after each test."""
    project, _ = first
    kept = shutil.copytree(project.directory / "work", project.directory / "kept", copy_function=shutil.copy2)
    (found,) = project.places()
    assert found.recorded() is not None
    yield found
    shutil.rmtree(project.directory / "work")
    kept.rename(project.directory / "work")


def is_imported(name: str, imported: str) -> bool:
    return re.search(rf"\| +{re.escape(name)}$", imported, re.MULTILINE) is not None


def test_an_unchanged_compile_imports_nothing_heavy(first):
    project, said = first
    assert not said["cached"]
    before, depfile = project.files(), (project.directory / "step.d").read_text()
    (project.directory / "step.d").unlink()
    shutil.rmtree(project.directory / "out")
    again, imported = project.compile()
    assert is_imported("irongrad.cli.common", imported)
    assert [
        n for n in ("torch", "numpy", "iree.runtime", "sympy") if f"| {n}\n" in imported.replace("|   ", "| ")
    ] == []
    assert again.pop("seconds").keys() == {"cache"}
    said = {n: v for n, v in said.items() if n != "seconds"}
    assert again == said | {"cached": True}
    assert project.files() == before
    assert (project.directory / "step.d").read_text() == depfile
    assert "network.py" in depfile


def test_an_unchanged_check_is_not_run_again(tmp_path):
    project = Project(tmp_path, Store(tmp_path / "cache", 2**30))
    (tmp_path / "work" / "data").mkdir(parents=True)
    (tmp_path / "work" / "data" / "scale.json").write_text("2.0")
    (tmp_path / "work" / "step.py").write_text(STEP)
    (tmp_path / "work" / "network.py").write_text(NETWORK)
    check = ("check", "work/step.py:make_step", "--json")
    said, imported = project.run(*check)
    assert said["compiles"]
    assert is_imported("torch", imported)
    again, imported = project.run(*check)
    assert again == said
    assert not is_imported("torch", imported)
    (tmp_path / "work" / "network.py").write_text(NETWORK.replace("4, 3", "4, 3, bias=False"))
    changed, _ = project.run(*check)
    assert changed["operators"]["update"] < said["operators"]["update"]
    uncached, imported = project.run(*check, "--no-cache")
    assert uncached == changed
    assert is_imported("torch", imported)


def rewritten(path: Path, old: str, new: str) -> None:
    """Change a file but keep its size and the times that a program can set."""
    assert len(old) == len(new)
    times = path.stat()
    path.write_text(path.read_text().replace(old, new))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


CHANGES = {
    "the file": lambda work: (work / "step.py").write_text(STEP.replace("0.1", "0.2")),
    "a module": lambda work: (work / "network.py").write_text(NETWORK.replace("4, 3", "4, 3, bias=False")),
    "a module, at the same time with the same size": lambda work: rewritten(work / "network.py", "4, 3", "5, 3"),
    "data": lambda work: (work / "data" / "scale.json").write_text("3.0"),
    "data, at the same time with the same size": lambda work: rewritten(work / "data" / "scale.json", "2.0", "7.0"),
    "no data": lambda work: (work / "data" / "scale.json").unlink(),
    "more in a directory that is listed": lambda work: (work / "data" / "more.json").write_text("1"),
    "a file that was not there": lambda work: (work / "override.json").write_text("5.0"),
    "a module that was not there": lambda work: (work / "optional.py").write_text(""),
    "a package of the same name": lambda work: (work / "network").mkdir(),
    "a module in place of an installed one": lambda work: (work / "tabnanny.py").write_text(""),
    "a module in front of it": lambda work: (work.parent / "network.py").write_text(NETWORK),
    "a description of a package": lambda work: (work / "torch-9.0.dist-info").mkdir(),
    "a link to another file": lambda work: relinked(work / "step.py", work / "network.py"),
}


def relinked(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to(other)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_anything_that_was_read_invalidates_the_recording(change, place, first):
    project, _ = first
    CHANGES[change](project.directory / "work")
    try:
        assert place.recorded() is None
    finally:
        (project.directory / "network.py").unlink(missing_ok=True)


def test_an_unrelated_change_keeps_the_recording(place, first):
    work = first[0].directory / "work"
    (work / "notes.txt").write_text("of no import")
    (work / "unrelated.py").write_text("")
    os.utime(work / "network.py")
    assert place.recorded() is not None


def test_another_version_of_an_installed_package_invalidates_the_recording(place):
    """The trace contains the files of installed packages and their METADATA."""
    installed = place.recorded().trace.answers["installed"]
    metadata = [p for p in installed if p.endswith("METADATA")]
    assert [p for p in metadata if "torch-" in p]
    assert [p for p in metadata if "iree_base_compiler" in p]
    import torch

    assert os.path.abspath(torch.__file__) in installed
    trace = place.recorded().trace
    trace.answers["installed"][metadata[0]] = "33188 1 1 1 1"
    assert not trace.holds()


def test_a_recording_whose_artifact_was_evicted_is_not_used(first, place, tmp_path):
    project, _ = first
    store = Store(shutil.copytree(project.store.directory, tmp_path / "cache"), 2**30)
    for entry in store.entries():
        if entry.kind == ARTIFACT:
            entry.path.unlink()
    assert repeated(place, tmp_path / "out", 0.0) is not None
    assert repeated(CommandPlace(store, place.key), tmp_path / "none", 0.0) is None
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("damage", ["truncated", "foreign"])
def test_a_damaged_recording_is_ignored(damage, first, tmp_path):
    project, _ = first
    store = Store(shutil.copytree(project.store.directory, tmp_path / "cache"), 2**30)
    (entry,) = [e for e in store.entries() if e.kind == RECORDING]
    if damage == "truncated":
        entry.path.write_bytes(entry.path.read_bytes()[:-100])
    else:
        store.put(RECORDING, entry.path.name, {"recording.msgpack": b"\xc1"})
    assert CommandPlace(store, entry.path.name).recorded() is None


def test_a_changed_compile_makes_another_artifact(first, place):
    """The whole compilation runs again; unchanged parts come from the cache."""
    project, _ = first
    before = project.files()
    (project.directory / "work" / "data" / "scale.json").write_text("3.0")
    said, imported = project.compile()
    assert is_imported("torch", imported)
    assert not said["cached"]
    assert project.files()["golden.safetensors"] != before["golden.safetensors"]
    assert project.files()["step.llvm-cpu.vmfb"] == before["step.llvm-cpu.vmfb"]


def test_the_key_covers_the_command_line_and_its_environment(monkeypatch, tmp_path):
    keys = [command_key({"source": "a.py:f"}), command_key({"source": "b.py:f"})]
    changes = (
        lambda: monkeypatch.setenv("OMP_NUM_THREADS", "7"),
        lambda: monkeypatch.setenv("MY_DATA", "here"),
        lambda: monkeypatch.chdir(tmp_path),
        lambda: monkeypatch.setattr(sys, "orig_argv", [*sys.orig_argv, "-O"]),
        lambda: monkeypatch.setattr(sys, "path", ["elsewhere", *sys.path]),
        lambda: monkeypatch.setattr(sys, "version", "4"),
        lambda: monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False),
        lambda: monkeypatch.setattr(recordings, "host", lambda: "another"),
        lambda: monkeypatch.setattr(recordings, "sources", lambda: "others"),
    )
    for change in changes:
        change()
        keys.append(command_key({"source": "a.py:f"}))
    assert len(set(keys)) == len(keys)
    monkeypatch.setenv("SHLVL", "17")
    monkeypatch.setenv("IRONGRAD_CACHE_DIR", str(tmp_path))
    assert command_key({"source": "a.py:f"}) == keys[-1]


def test_a_process_that_has_already_imported_pytorch_is_not_recorded(monkeypatch):
    """Such a process may have configured PyTorch, and no key covers that. This process has."""
    monkeypatch.setenv("IRONGRAD_CACHE_SIZE", "1GiB")
    assert command_place({}) is None
    monkeypatch.delitem(sys.modules, "torch")
    assert command_place({}) is not None
    monkeypatch.setenv("IRONGRAD_CACHE_SIZE", "0")
    assert command_place({}) is None
