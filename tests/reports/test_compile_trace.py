"""`irongrad compile --trace`: stages, our passes, IREE's tools and their passes, on the threads that ran them."""

from __future__ import annotations

import json
import time
from pathlib import Path

from click.testing import CliRunner

from irongrad.analysis.timeline import noted, recorded, recording
from irongrad.cli import compile as verb
from irongrad.mlir.pass_timing import passes_in, without_timing
from irongrad.pipeline.options import STAGES

STEP = """
import torch
import irongrad as ig

def make_step():
    model = torch.nn.Linear(4, 2)
    inputs = {"x": torch.randn(3, 4), "y": torch.randint(0, 2, (3,))}
    return ig.TrainStep(model, torch.nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
"""

REPORT = """[
{"user": {"duration": 1.0}, "wall": {"duration": 2.0}, "name": "Outer", "passes": [
  {"user": {"duration": 9.0}, "wall": {"duration": 8.0}, "name": "Inner", "passes": [
  {}]},
{}]},
{"user": {"duration": -3.0}, "wall": {"duration": -3.0}, "name": "Rest"},
{"user": {"duration": 1.0}, "wall": {"duration": 2.5}, "name": "Total"}
]
"""


def test_a_compilation_is_traced(tmp_path: Path) -> None:
    (tmp_path / "step.py").write_text(STEP)
    arguments = [f"{tmp_path}/step.py:make_step", "-o", f"{tmp_path}/net", "--trace", f"{tmp_path}/trace.json"]
    result = CliRunner().invoke(verb.command, [*arguments, "--entry-point", "train_step"], catch_exceptions=False)
    assert result.exit_code == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    of_main = [e for e in spans if tracks[e["tid"]] == "MainThread"]
    assert {*STAGES} <= {e["name"] for e in of_main}
    (passes,) = (e for e in of_main if e["name"] == "passes")
    (fold, *_) = (e for e in of_main if e["name"] == "fold")
    assert passes["ts"] <= fold["ts"] <= fold["ts"] + fold["dur"] <= passes["ts"] + passes["dur"]
    target = {e["name"] for e in spans if tracks[e["tid"]].startswith("target")}
    assert {"iree-compile to=global-optimization", "matmul-kernels", "TranslateAllExecutablesPass"} <= target


def test_nothing_is_noted_unless_somebody_records() -> None:
    with noted("outside"):
        assert recording() is None
    with recorded() as timeline, noted("inside", function="f"):
        time.sleep(0.001)
    assert [(s.name, s.track, s.about) for s in timeline.slices] == [("inside", "MainThread", {"function": "f"})]
    assert timeline.slices[0].seconds >= 0.001


def test_messages_of_a_tool_come_without_its_report() -> None:
    messages, report = without_timing(f"net.py:3: error: [\n bad\n{REPORT}later\n")
    assert messages == "net.py:3: error: [\n bad\nlater\n"
    assert [row["name"] for row in report] == ["Outer", "Rest", "Total"]
    for text in ("", "error: [\n{ no report", "plain"):
        assert without_timing(text) == (text, [])


def test_passes_lie_inside_those_around_them() -> None:
    _, report = without_timing(REPORT)
    found = [(name, start, taken, whole) for name, start, taken, whole in passes_in(report, 10.0, 1.0)]
    assert found == [("Outer", 10.0, 1.0, 2.0), ("Inner", 10.0, 1.0, 8.0)]
