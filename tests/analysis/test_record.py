"""The record of a compilation: its counts agree with PyTorch's own, and with the compiled kernels."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import irongrad as ig
from irongrad.analysis.file import encoded, read_analysis
from irongrad.analysis.records import Analysis, Operator, Source
from irongrad.analysis.totals import (
    Work,
    executed,
    operator_work,
    operators_of,
    source_of_launch,
    total,
    with_parents,
    work_of,
)
from irongrad.cli import analyze
from irongrad.cli.common import console
from irongrad.pipeline.rebuild import rebuild
from irongrad.reports.placed import ALL_PARTS
from irongrad.reports.report import report_on
from irongrad.reports.summary import summary_of
from irongrad.runtime.errors import ArtifactError, IronGradError
from irongrad.runtime.manifest import ANALYSIS
from irongrad.runtime.manifest_file import file_spec, read_manifest, write_manifest

HOSTILE = "<b>|ü[red]&'"


class Net(nn.Module):
    """A convolution, a product, and a layer whose name is hostile to every format it is written in."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.rest = nn.ModuleDict({HOSTILE: nn.Linear(8, 16)})
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).mean((2, 3))
        return self.head(torch.relu(self.rest[HOSTILE](x)))


def make_step(accumulate: int = 1) -> ig.TrainStep:
    torch.manual_seed(0)
    model = Net()
    inputs = {"x": torch.randn(4, 3, 8, 8), "y": torch.randint(0, 5, (4,))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ig.TrainStep(model, nn.functional.cross_entropy, optimizer, inputs, accumulate=accumulate)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ig.compile(make_step(), tmp_path_factory.mktemp("record") / "net").directory


@pytest.fixture(scope="module")
def analysis(artifact: Path) -> Analysis:
    return read_analysis(artifact, read_manifest(artifact))


def eager_flops(step: ig.TrainStep) -> int:
    with FlopCounterMode(display=False) as counter:
        step.loss(step.model(step.inputs["x"]), step.inputs["y"]).backward()
    return counter.get_total_flops()


def test_the_flops_of_a_step_are_those_that_pytorch_counts(analysis: Analysis) -> None:
    step = total(operator_work(analysis, "train_step", lambda source: source.phase), "step")
    assert step.flops == eager_flops(make_step())


def test_each_micro_batch_counts(tmp_path: Path) -> None:
    step = make_step(accumulate=2)
    found = ig.compile(step, tmp_path / "net", entry_points=["train_step"])
    record = read_analysis(found.directory, found.manifest)
    work = total(operator_work(record, "train_step", lambda source: source.phase), "step")
    assert work.flops == eager_flops(step)
    assert {s.function: times for _, s, times in operators_of(record, "train_step")} == {
        "joint": 2,
        "accumulate": 2,
        "update": 1,
    }


def test_the_kernels_do_what_the_operators_ask_for(analysis: Analysis) -> None:
    """Kernels also count elementwise code."""
    found = summary_of(analysis, "llvm-cpu", "train_step")
    assert found.captured.flops is not None
    assert found.compiled.flops is not None
    assert found.captured.flops <= found.compiled.flops < 2 * found.captured.flops


def test_what_kernels_write_is_state_results_or_an_intermediate(analysis: Analysis, artifact: Path) -> None:
    launches = [e.launch for e in executed(analysis.targets["llvm-cpu"], "train_step") if e.launch.kernel is not None]
    kept = sum(launch.written - launch.intermediate_bytes for launch in launches)
    packed = 4 * 480  # all parameters: 453 numbers, in one tensor with gaps
    assert kept == packed + 8 + 4  # and the count of steps, and the loss
    assert any(launch.intermediates for launch in launches)


def test_backward_operators_belong_to_the_module_that_they_differentiate(analysis: Analysis) -> None:
    phases = {(s.module, s.phase) for _, s, _ in operators_of(analysis, "train_step")}
    for module in ("stem.0", f"rest.{HOSTILE}", "head"):
        assert {(module, "forward"), (module, "backward")} <= phases


def test_kernels_name_their_module_whatever_its_name(analysis: Analysis) -> None:
    target = analysis.targets["llvm-cpu"]
    named = {target.sources[n].module for k in target.kernels for n in k.sources}
    launched = {target.sources[e.launch.source].module for e in executed(target, "train_step") if e.launch.source}
    assert f"rest.{HOSTILE}" in named & launched


def test_every_source_and_line_is_known(analysis: Analysis) -> None:
    lines = {s.line for _, s, _ in operators_of(analysis, "train_step") if s.phase in ("forward", "backward")}
    text = Path(__file__).read_text().splitlines()
    assert lines
    for place in lines - {""}:
        file, number = place.split(":")
        assert file == Path(__file__).name
        assert analysis.lines[place] == text[int(number) - 1].strip()


def test_the_schedule_accounts_for_the_planned_memory(analysis: Analysis, artifact: Path) -> None:
    (joint,) = (t for t in analysis.timelines if t.function == "joint")
    live = [sum(b.bytes for b in joint.buffers if b.start <= m <= b.end) for m in range(len(joint.kernels))]
    assert max(live) == joint.peak <= joint.allocated
    assert read_manifest(artifact).memory.predicted["grad_step"] >= joint.peak  # type: ignore[union-attr]


def test_a_parent_has_the_work_of_its_children(analysis: Analysis) -> None:
    works = {w.name: w for w in with_parents(operator_work(analysis, "train_step", lambda s: s.module or "none"))}
    assert works["stem"].flops == works["stem.0"].flops
    assert works["stem"].count == works["stem.0"].count + works["stem.1"].count


def test_equal_steps_have_equal_records(artifact: Path, tmp_path: Path) -> None:
    again = ig.compile(make_step(), tmp_path / "again", cache=False).directory
    assert (again / ANALYSIS).read_bytes() == (artifact / ANALYSIS).read_bytes()


def test_a_rebuild_keeps_the_record(artifact: Path, tmp_path: Path, analysis: Analysis) -> None:
    copy = shutil.copytree(artifact, tmp_path / "copy")
    built = rebuild(copy)
    assert read_analysis(copy, built.manifest) == analysis


def test_a_step_with_buckets_is_counted_in_one_bucket(tmp_path: Path, analysis: Analysis) -> None:
    """All buckets are branches of one entry point, and their copies and fills name no operator."""
    step = make_step()
    sized = {"x": {0: "B"}, "y": {0: "B"}}
    step = replace(step, dynamic=sized, buckets={"B": [2, 4]}, bucket_fallback="dynamic")
    found = ig.compile(step, tmp_path / "net", entry_points=["train_step"])
    record = read_analysis(found.directory, found.manifest)
    target = record.targets["llvm-cpu"]
    assert {target.sources[x.source].function for x in target.launches if x.source is not None} >= {
        "joint",
        "joint@B2",
        "joint@any",
    }
    ran = {source.function for e in executed(target, "train_step") if (source := source_of_launch(target, e.launch))}
    assert ran <= {"joint", "check.joint", "update", ""}
    counted = summary_of(record, "llvm-cpu", "train_step")
    assert counted.captured.flops is not None
    assert counted.compiled.flops is not None
    assert counted.captured.flops <= counted.compiled.flops < 2 * counted.captured.flops
    assert counted.compiled.count < 2 * summary_of(analysis, "llvm-cpu", "train_step").compiled.count
    assert counted.captured.flops == summary_of(analysis, "llvm-cpu", "train_step").captured.flops


def test_the_examples_own_bucket_is_counted(tmp_path: Path) -> None:
    """The functions without a size in their name are those of the largest bucket."""
    step = make_step()
    sized, batch = {"x": {0: "B"}, "y": {0: "B"}}, len(step.inputs["x"])
    flops = []
    for buckets in ([batch, 4 * batch], [batch]):
        sizes = replace(step, dynamic=sized, buckets={"B": buckets})
        found = ig.compile(sizes, tmp_path / str(len(buckets)), entry_points=["train_step"])
        counted = summary_of(read_analysis(found.directory, found.manifest), "llvm-cpu", "train_step")
        flops.append((counted.captured.flops, counted.compiled.flops))
    assert flops[0][0] == flops[1][0]
    assert flops[0][1] is not None
    assert flops[1][1] is not None
    assert flops[0][1] < 1.5 * flops[1][1]


@pytest.mark.slow
def test_further_buckets_add_no_launches(tmp_path: Path) -> None:
    """Copies and packings of other buckets name no operator, but run in their branches."""
    step = make_step()
    sized, batch = {"x": {0: "B"}, "y": {0: "B"}}, len(step.inputs["x"])
    counts = []
    for buckets in ([batch, 2 * batch], [batch, 2 * batch, 4 * batch, 8 * batch]):
        sizes = replace(step, dynamic=sized, buckets={"B": buckets})
        found = ig.compile(sizes, tmp_path / str(len(buckets)), entry_points=["train_step"])
        counts.append(summary_of(read_analysis(found.directory, found.manifest), "llvm-cpu", "train_step"))
    assert counts[0].compiled.count == counts[1].compiled.count


def test_a_step_of_any_size_is_counted_at_the_examples_sizes(tmp_path: Path) -> None:
    step = replace(make_step(), dynamic={"x": {0: "B"}, "y": {0: "B"}})
    found = ig.compile(step, tmp_path / "net", entry_points=["train_step"])
    record = read_analysis(found.directory, found.manifest)
    work = total(operator_work(record, "train_step", lambda source: source.phase), "step")
    assert work.flops == eager_flops(make_step())
    assert work.nbytes > sum(tensor.nbytes for tensor in step.inputs.values())
    assert "unknown of any kind" in (text := run(found.directory))
    assert "kernels of any size count no operations" in text


def test_sizes_that_depend_on_data_have_unknown_work() -> None:
    assert Work("", 1, None, 1, 1) + Work("", 1, 5, 1, 1) == Work("", 2, None, 2, 2)
    operator = Operator("mm", 0, "float32", (), None, 0, 0, 0, 1, ())
    assert work_of(operator, 3, "mm") == Work("mm", 3, None, 0, 0)


@pytest.mark.slow
def test_the_phases_of_one_of_several_steps_are_those_of_a_step(tmp_path: Path) -> None:
    first = make_step()
    second = replace(first, loss=lambda y, t: 2 * nn.functional.cross_entropy(y, t))
    found = ig.compile(ig.Steps({"a": first, "b": second}), tmp_path / "net")
    record = read_analysis(found.directory, found.manifest)
    entry = next(e.symbol for e in found.manifest.all_entry_points if e.name == "train_step")
    target = record.targets["llvm-cpu"]
    captured = {source.phase for _, source, _ in operators_of(record, entry)}
    launched = {s.phase for e in executed(target, entry) if (s := source_of_launch(target, e.launch))}
    assert captured == {"forward", "backward", "update"}
    assert {"forward", "backward"} <= launched <= {"forward", "backward", "update", "check", ""}


def test_the_parts_of_a_placed_step_count_together(tmp_path: Path) -> None:
    step = make_step()
    found = ig.compile(step, tmp_path / "net", place={"stem": "llvm-cpu", "rest+head": "llvm-cpu"})
    summary = json.loads(run(found.directory, "--json"))
    assert summary["target"] == ALL_PARTS
    assert summary["captured"]["flops"] == eager_flops(make_step())
    assert summary["captured"]["flops"] <= summary["compiled"]["flops"]
    assert {row["name"] for row in summary["phases"]} == {"forward", "backward", "update"}
    modules = {row["name"] for row in summary["kernel_modules"]}
    assert {"stem", "head", f"rest.{HOSTILE}"} <= modules
    parts = {row["name"].partition("/")[0] for row in summary["kernels"]} - {"copy"}
    assert parts == {target.name for target in found.manifest.targets}
    of_one = json.loads(run(found.directory, "--json", "--target", found.manifest.targets[0].name))
    assert of_one["compiled"]["count"] < summary["compiled"]["count"]
    report = report_on(found.directory)
    assert report.compiled.count == summary["compiled"]["count"]
    assert {judged.key for judged in report.judged} >= {"loss"} or report.judged


def test_a_compiled_function_is_recorded(tmp_path: Path) -> None:
    function = ig.compile_function(lambda x, w: torch.tanh(x @ w), (torch.randn(4, 8), torch.randn(8, 2)))
    function.save(tmp_path / "f")
    record = read_analysis(tmp_path / "f", read_manifest(tmp_path / "f"))
    assert total(operator_work(record, "call", lambda s: s.operator), "call").flops == 2 * 4 * 8 * 2


def test_a_source_survives_its_spelling() -> None:
    source = Source("joint@T64", "backward", "aten.mm.default", f"a.{HOSTILE}|b", "net.py:3")
    assert Source.of(source.spelled()) == source
    assert Source.of("torch/nn/linear.py") is None


def damaged(artifact: Path, folder: Path, data: bytes | None, *, listed: bool) -> Path:
    """A copy of the artifact with another record; `listed` if the manifest has its hash."""
    shutil.copytree(artifact, folder)
    (folder / ANALYSIS).unlink()
    if data is not None:
        (folder / ANALYSIS).write_bytes(data)
        if listed:
            manifest = read_manifest(folder)
            files = {**manifest.files, ANALYSIS: file_spec(folder / ANALYSIS)}
            write_manifest(replace(manifest, files=files), folder)
    return folder


def with_target(analysis: Analysis, **changes: object) -> bytes:
    target = replace(analysis.targets["llvm-cpu"], **changes)  # type: ignore[arg-type]
    return encoded(replace(analysis, targets={"llvm-cpu": target}))


def test_a_missing_damaged_or_newer_record_is_one_clear_error(
    artifact: Path, tmp_path: Path, analysis: Analysis
) -> None:
    newer = gzip.compress(json.dumps({"format_version": 99}).encode())
    negative = replace(analysis.operators[0], flops=-1)
    cases = {
        "missing": (None, True, "has no analysis.json.gz"),
        "text": (b"hello", True, "is damaged"),
        "empty": (gzip.compress(b"[]"), True, "is damaged"),
        "newer": (newer, True, "has version 99"),
        "changed": (encoded(analysis)[:-9], False, "is damaged"),
        "version": (gzip.compress(b'{"format_version": "one"}'), True, "is damaged"),
        "nested": (gzip.compress(b"[" * 100_000), True, "is damaged"),
        "targets": (encoded(replace(analysis, targets={})), True, "it has no target"),
        "index": (with_target(analysis, sources=()), True, "points to nothing"),
        "calls": (with_target(analysis, calls={"a": ("b",), "b": ("a",)}), True, "calls itself"),
        "count": (encoded(replace(analysis, operators=(negative,))), True, "a count is negative"),
    }
    for name, (data, listed, message) in cases.items():
        folder = damaged(artifact, tmp_path / name, data, listed=listed)
        with pytest.raises(ArtifactError, match=message):
            read_analysis(folder, read_manifest(folder))


def run(*arguments: object) -> str:
    result = CliRunner().invoke(analyze.command, [*map(str, arguments)], catch_exceptions=False, standalone_mode=False)
    assert result.exit_code == 0
    return result.output


def test_the_verb_prints_what_json_says(artifact: Path, analysis: Analysis, monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(run(artifact, "--json"))
    summary = summary_of(analysis, "llvm-cpu", "train_step")
    assert found["captured"]["flops"] == summary.captured.flops
    assert found["machine"]["flops"] > 0
    assert HOSTILE in "".join(row["name"] for row in found["modules"])
    monkeypatch.setattr(console, "width", 200)
    text = run(artifact, "--by", "modules", "--top", "0")
    assert f"rest.{HOSTILE}" in text
    assert "least time on this machine" in text


def test_an_unknown_entry_or_target_is_refused(artifact: Path) -> None:
    for arguments, message in (
        (("--entry", "nothing"), "launches no kernels; those that do are train_step"),
        (("--target", "vulkan"), "nothing is recorded for the target 'vulkan'; there are llvm-cpu"),
    ):
        with pytest.raises(IronGradError, match=message):
            run(artifact, *arguments)


def test_model_explorer_gets_each_operator_in_the_layers_of_its_module(artifact: Path, tmp_path: Path) -> None:
    run(artifact, "--graph", tmp_path / "graph.json")
    collection = json.loads((tmp_path / "graph.json").read_text())
    assert collection["label"] == artifact.name
    (joint,) = (graph for graph in collection["graphs"] if graph["id"] == "joint")
    known = [node["id"] for node in joint["nodes"]]
    assert len(known) == len(set(known))
    assert all(edge["sourceNodeId"] in known for node in joint["nodes"] for edge in node["incomingEdges"])
    assert {"forward/stem/0", f"backward/rest/{HOSTILE}", "forward"} <= {node["namespace"] for node in joint["nodes"]}
