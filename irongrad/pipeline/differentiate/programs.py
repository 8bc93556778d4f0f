"""The programs of a step: its functions before they are traced at a bucket's sizes or for any size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from irongrad.diagnostics.source_lines import without_folders
from irongrad.graph.step_graph import Relied, StateTensor
from irongrad.operators.legalize.complex_numbers import refuse_complex
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.pipeline.capture.step_modules import StepModule, name_of
from irongrad.pipeline.differentiate.inference import decomposed, inference_program
from irongrad.pipeline.differentiate.joint_program import joint_program
from irongrad.pipeline.differentiate.specialise import Interpret, Program
from irongrad.pipeline.differentiate.state_names import StateNames
from irongrad.pipeline.guards.decisions import EarlyProgram, Indices
from irongrad.pipeline.guards.range_checks import farthest
from irongrad.pipeline.guards.step_indices import guarded_programs
from irongrad.step.train_step import TrainStep


@dataclass(frozen=True)
class Programs:
    """The functions of a step before they are traced at a bucket's sizes or for any size.

    Attributes:
        state: the tensors of the model, and of a loss that is a module, by name.
        joint: as in `JointStep`.
        inference: as in `JointStep`.
        checks: as in `JointStep`, for functions of any bucket.
        conditions: relations between named dimensions under which all indices that depend on sizes alone are in range.
    """

    state: Mapping[str, StateTensor]
    joint: Program
    inference: Mapping[str, Program]
    checks: Mapping[str, Program] = field(default_factory=dict)
    conditions: tuple[Any, ...] = ()


def programs(captured: CapturedStep, indices: Indices) -> Programs:
    """Build the programs of a step; a parameter that no gradient reaches has no gradient among the results.

    Raises:
        CaptureError: no parameter of the optimizer gets a gradient, or AOTAutograd refuses the graph.
    """
    captured, step = guarded_programs(captured), captured.step
    relied = {name_of(path): what for path, what in indices.relied.items()}
    relied |= {name: Relied(without_folders(line)) for name, line in captured.relied.items()}
    names = StateNames(StepModule(step), relied)
    refuse_complex({**step.examples, **{n: t.initial for n, t in names.state.items()}})
    joint = joint_program(captured, names)
    exported = [made.program for made in captured.inference.values()]
    exported += [early.program for early in indices.early.values()]
    ready = iter(decomposed(exported, dynamic=bool(step.dynamic)))
    inference = {
        name: inference_program(next(ready), names, step, made.inputs, made.outputs)
        for name, made in captured.inference.items()
    }
    checks = {
        name: _check_program(
            replace(early, program=next(ready)), names, step, step.accumulate if name == "joint" else 1
        )
        for name, early in indices.early.items()
    }
    return Programs(names.state, joint, inference, checks, indices.conditions)


def _check_program(early: EarlyProgram, names: StateNames, step: TrainStep, count: int) -> Program:
    """The program of a decomposed check; that of a step with `count` micro-batches runs on each of them."""
    program = inference_program(early.program, names, step, early.inputs, early.results)
    if count == 1:
        return program

    def run(interpret: Interpret, *values: torch.Tensor) -> list[torch.Tensor]:
        is_cut = [a.kind == "input" and v.ndim > 0 for a, v in zip(program.arguments, values, strict=True)]
        parts = [v.chunk(count) if cut else [v] * count for v, cut in zip(values, is_cut, strict=True)]
        rows = [program.run(interpret, *part) for part in zip(*parts, strict=True)]
        return [farthest(torch.stack(list(same))) for same in zip(*rows, strict=True)]

    return replace(program, run=run)
