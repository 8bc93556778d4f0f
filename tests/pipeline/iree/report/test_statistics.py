"""Reading IREE's statistics of a compiled module."""

from __future__ import annotations

from pathlib import Path

import torch

import irongrad as ig
from irongrad.pipeline.driver import build
from irongrad.pipeline.iree.report.statistics import read_statistics
from irongrad.pipeline.options import make_options

SAMPLE = """\
;
; Aggregate Statistics (static, whole-program)
;

"Constants","Constant Size","Variables","Variable Size","Awaits","Submissions","Transient Size","Fills","Copies",\
"Dispatches","Async Calls","Executables"
0,402,1,0,6,6,4096,2,7,3,0,57

;
; Execution
;

; builtin.module @irongrad > util.func @train_step > stream.cmd.execute
"Depth","Command","Symbol","Length","Invocations","Workload","Operands","Resources"
1,"dispatch","@train_step_dispatch_0::@train_step_dispatch_0",,1,"",5,5
0,"copy",,1,,,,

; builtin.module @irongrad > util.func @train_step > stream.cmd.execute
"Depth","Command","Symbol","Length","Invocations","Workload","Operands","Resources"
1,"dispatch","@train_step_dispatch_1::@train_step_dispatch_1_matmul",,1,"1;2",0,2

; builtin.module @irongrad > util.func @core.joint > stream.cmd.execute
"Depth","Command","Symbol","Length","Invocations","Workload","Operands","Resources"
1,"fill",,1024,,,,
1,"dispatch","@core_dispatch_0::@core_dispatch_0",,1,"",0,2

; builtin.module @irongrad > util.initializer > stream.cmd.execute
"Depth","Command","Symbol","Length","Invocations","Workload","Operands","Resources"
1,"fill",,1024,,,,
"""


def test_a_statistics_file_is_read(tmp_path: Path):
    (tmp_path / "s.csv").write_text(SAMPLE)
    found = read_statistics(tmp_path / "s.csv", {"train_step": 512}, {}, None)
    assert (found.dispatches, found.kernels, found.copies, found.transient_bytes) == (3, 57, 7, 4096)
    assert found.by_function == {"train_step": 2, "core.joint": 1}


def test_a_step_is_counted(tmp_path: Path):
    """`train_steps` makes IREE run twice; only the first run counts. It shares the core function of `train_step`."""
    model = torch.nn.Linear(4, 2)
    inputs = {"x": torch.randn(3, 4), "y": torch.randn(3, 2)}
    step = ig.TrainStep(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters()), inputs)
    options = make_options(tmp_path / "artifact", entry_points=("train_step", "train_steps"))
    found = build(step, options).statistics["llvm-cpu"]
    assert found.dispatches == sum(found.by_function.values())
    assert 0 < found.kernels <= found.dispatches
    assert found.traffic["shared.joint.update"] > 4 * (4 * 2 + 3 * 4 + 3 * 2)
    assert found.dispatches > found.by_function["shared.joint.update"] > 0
    assert found.transient_bytes > 0
