"""`irongrad profile`: IREE's own tools measure the kernels that the artifact's record names."""

from __future__ import annotations

import itertools
import json
from collections import Counter
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
from irongrad.analysis.machine import Machine
from irongrad.analysis.totals import executed, kernel_name
from irongrad.cli import profile as verb
from irongrad.reports import profiler
from irongrad.reports.perfetto import slices_of
from irongrad.reports.profile import KernelTime, Profile, Span, read_profile
from irongrad.reports.profiler import gaps
from irongrad.runtime.errors import GuardError, IronGradError, UserError
from irongrad.runtime.manifest_file import read_manifest

HOSTILE = "<img src=x>[bold]"


def make_step(width: int = 16) -> ig.TrainStep:
    torch.manual_seed(0)
    layers = {"first": nn.Linear(8, width), "act": nn.Tanh(), HOSTILE: nn.Linear(width, 5)}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    inputs = {"x": torch.randn(4, 8), "y": torch.randint(0, 5, (4,))}
    return ig.TrainStep(model, nn.functional.cross_entropy, torch.optim.Adam(model.parameters()), inputs)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ig.compile(make_step(), tmp_path_factory.mktemp("profile") / "net").directory


def run(*arguments: object) -> str:
    result = CliRunner().invoke(verb.command, [*map(str, arguments)], catch_exceptions=False, standalone_mode=False)
    assert result.exit_code == 0
    return result.output


@pytest.fixture(scope="module")
def profiled(artifact: Path) -> Profile:
    path = artifact.parent / "profile.json"
    run(artifact, "--steps", 6, "-o", path, "--trace", artifact.parent / "trace.json")
    manifest = read_manifest(artifact)
    return read_profile(path, manifest, read_analysis(artifact, manifest))


def recorded_launches(artifact: Path) -> Counter[str]:
    """How often a training step launches each kernel, by the record."""
    record = read_analysis(artifact, read_manifest(artifact)).targets["llvm-cpu"]
    expected: Counter[str] = Counter()
    for each in executed(record, "train_step"):
        if each.launch.kernel is not None:
            expected[kernel_name(record, each.launch)] += each.times
    return expected


@pytest.mark.parametrize("device", ["local-sync", "local-task"])
def test_a_step_launches_the_kernels_of_the_record(artifact: Path, device: str) -> None:
    found = json.loads(run(artifact, "--json", "--steps", 3, "--device", device))
    assert {k["name"]: k["launches"] for k in found["kernels"]} == recorded_launches(artifact)
    assert found["steps"] == 3
    assert found["seconds"] > 0
    assert found["machine_peaks"]["flops"] > 0


def test_a_step_launches_the_kernels_of_its_own_bucket(tmp_path: Path) -> None:
    """Those of other buckets, and of any size beside buckets, are in the record, too."""
    sizes: dict[str, Any] = {"dynamic": {"x": {0: "B"}, "y": {0: "B"}}, "buckets": {"B": [2, 4, 8]}}
    step = replace(make_step(), **sizes, bucket_fallback="dynamic")
    found = ig.compile(step, tmp_path / "net", entry_points=["train_step"]).directory
    profiled = json.loads(run(found, "--json", "--steps", 2))
    launched = {k["name"]: k["launches"] for k in profiled["kernels"] if not k["name"].startswith("__builtin")}
    assert launched == recorded_launches(found)


def test_the_times_of_a_step_add_up(profiled: Profile) -> None:
    inside = sum(kernel.seconds for kernel in profiled.kernels)
    assert profiled.active_seconds > 0
    assert len(profiled.spans) == sum(kernel.launches for kernel in profiled.kernels)
    last = max(span.start + span.seconds for span in profiled.spans)
    busy = sum(span.seconds for span in profiled.spans)
    idle = sum(gap for gap, _, _ in gaps(profiled.spans))
    assert last <= busy + idle + 1e-9  # launches may overlap
    assert inside > 0


def test_launches_name_their_module_phase_and_line(profiled: Profile) -> None:
    assert {"first", HOSTILE} <= {span.module for span in profiled.spans}
    assert {"forward", "backward", "update"} <= {span.phase for span in profiled.spans}
    assert any(span.line.startswith("test_profile.py:") or not span.line for span in profiled.spans)


def test_the_trace_is_one_that_perfetto_reads(artifact: Path, profiled: Profile) -> None:
    """The Trace Event Format: complete events, each within its track or apart from the others of its track."""
    events = json.loads((artifact.parent / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    assert {"phase", "module", "kernels 1"} <= set(names.values())
    assert sum(names[e["tid"]].startswith("kernels") for e in spans) == len(profiled.spans)
    for track in names:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == track)
        assert all(before[1] <= after[0] + 1e-3 for before, after in itertools.pairwise(own))


def test_launches_that_overlap_are_on_tracks_of_their_own() -> None:
    spans = tuple(Span(f"k{i}", "", "", "", start, 2.0) for i, start in enumerate((0.0, 1.0, 2.0, 3.5)))
    found = slices_of(Profile(1, "", "e", "t", "d", "m", 2, 1, 1.0, 1.0, 1.0, 0.0, (), spans))
    assert [s.track for s in found if s.track.startswith("kernels")] == [f"kernels {n}" for n in (1, 2, 1, 2)]
    assert gaps(spans) == []


def test_a_kernel_is_limited_by_its_launch_its_arithmetic_or_memory() -> None:
    machine = Machine("cpu", 2, flops=1e9, bandwidth=1e9)
    kernels = {
        "launch": KernelTime("k", 100, 1e-4, 10, 10, (), ()),
        "arithmetic": KernelTime("k", 1, 1e-2, 2_000_000, 10, (), ()),
        "memory": KernelTime("k", 1, 1e-2, None, 1_000_000, (), ()),
    }
    assert {name: kernel.reason(machine) for name, kernel in kernels.items()} == {name: name for name in kernels}
    assert kernels["arithmetic"].least(machine) == pytest.approx(2e-3)


def test_data_is_taken_from_a_file_and_refused_if_it_does_not_fit(artifact: Path, tmp_path: Path) -> None:
    good = {"x": np.zeros((9, 8), np.float32), "y": np.zeros(9, np.int64)}
    np.savez(tmp_path / "good.npz", **good)
    assert "one train_step" in run(artifact, "--data", tmp_path / "good.npz", "--steps", 1)
    bad = {
        "few": ({**good, "x": good["x"][:3], "y": good["y"][:3]}, UserError, "x has 3 samples, a step takes 4"),
        "wide": ({**good, "x": np.zeros((9, 7), np.float32)}, GuardError, "x is float32"),
        "class": ({**good, "y": np.full(9, 7)}, GuardError, "y"),
    }
    for name, (arrays, error, message) in bad.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
        with pytest.raises(error, match=message):
            run(artifact, "--data", tmp_path / f"{name}.npz", "--steps", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--entry", "nothing"), "there is no entry point 'nothing'"),
        (("--entry", "train_steps"), "profile train_step"),
        (("--entry", "apply_step"), "needs gradients: profile train_step"),
        (("--entry", "export_state"), "no kernels run in the entry point 'export_state'"),
        (("--entry", "import_state"), "no example of what import_state takes; give --data"),
        (("--device", "nonsense"), "nonsense"),
        (("--set", "speed=1"), "speed"),
    ],
)
def test_what_cannot_be_profiled_is_one_clear_error(artifact: Path, arguments: tuple[str, str], message: str) -> None:
    with pytest.raises(IronGradError, match=message):
        run(artifact, "--steps", 1, *arguments)


def test_the_profile_of_another_artifact_is_refused(artifact: Path, profiled: Profile, tmp_path: Path) -> None:
    other = ig.compile(make_step(12), tmp_path / "other", entry_points=["train_step"])
    analysis = read_analysis(other.directory, other.manifest)
    with pytest.raises(UserError, match="the profile of another artifact"):
        read_profile(artifact.parent / "profile.json", other.manifest, analysis)
    for name, data in {"empty": b"", "list": b"[]", "binary": b"\xff\x00"}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match="is no profile"):
            read_profile(tmp_path / name, other.manifest, analysis)
    with pytest.raises(UserError, match="cannot be read"):
        read_profile(tmp_path / "missing", other.manifest, analysis)


def test_a_record_without_some_launches_of_the_last_call_is_refused(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the number of all launches would do."""
    events = profiler._events

    def damaged(bundle: Path) -> Any:
        found = events(bundle)
        others = [event for event in found if event.kernel != found[0].kernel]
        return [others[0], *found[1:]]

    monkeypatch.setattr(profiler, "_events", damaged)
    result = CliRunner().invoke(verb.command, [str(artifact), "--steps", "5", "--device", "local-task"])
    assert isinstance(result.exception, UserError)
    assert "some not as often in each" in str(result.exception)
    assert "add --device local-sync" in str(result.exception)
