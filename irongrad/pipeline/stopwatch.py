"""Measure functions of tensors on this machine, each compiled separately; `--tune` chooses by the times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from irongrad.cache import Store
from irongrad.graph.step_graph import Function, StepGraph, Value
from irongrad.operators.legalize.retrace import retrace
from irongrad.passes import parse_passes, run_passes
from irongrad.passes.base import Candidate, Measured
from irongrad.pipeline.iree.compile import CompiledModule, compile_module
from irongrad.pipeline.kept_times import keep, key_of, known
from irongrad.pipeline.lower.importer import import_functions
from irongrad.pipeline.package import target_spec
from irongrad.pipeline.timed_calls import Call, Program, built, calls_of, device_of, fastest
from irongrad.pipeline.tuning_budget import TuningBudget
from irongrad.runtime.errors import UserError
from irongrad.runtime.scratch import scratch_directory
from irongrad.runtime.selection import why_not
from irongrad.targets import Target

# Passes that also run on a step's graph, so a function has the same form as in a step.
_CLEAN_UP = "simplify,cse,layout,cse,dce"


@dataclass(frozen=True)
class Stopwatch:
    """Measures functions on the devices of targets; earlier measurements come from the cache.

    Attributes:
        targets: the targets to compile for.
        store: the cache of times; None for no cache.
        budget: the time that measurements may take.
    """

    targets: tuple[Target, ...]
    store: Store | None = None
    budget: TuningBudget = field(default_factory=lambda: TuningBudget(float("inf")))

    def expect(self, count: int) -> None:
        """Announce `count` measurements."""
        self.budget.expected += count

    def __call__(
        self, what: str, candidates: Mapping[str, Candidate], operands: Sequence[torch.Tensor]
    ) -> Measured | None:
        """Measure functions that compute the same result; their times on several targets are added.

        Args:
            what: a description of the computation.
            candidates: the functions, by name.
            operands: tensors with the shapes and dtypes of the arguments.

        Returns:
            What was measured; None if the budget has run out.

        Raises:
            UserError: a target cannot run on this machine.
        """
        like = [(tuple(o.shape), str(o.dtype)) for o in operands]
        keys = {target: key_of(what, tuple(candidates), like, target) for target in self.targets}
        found = {target: known(self.store, key, Measured) for target, key in keys.items()}
        missing = [target for target, times in found.items() if times is None]
        if not missing:
            self.budget.known += 1
        elif self.budget.is_spent:
            self.budget.left_out += 1
            return None
        else:
            check_runs_here(missing)
            with self.budget.measuring(what):
                for target in missing:
                    found[target] = _measured(candidates, operands, target)
                    keep(self.store, keys[target], found[target])
        return _sum([times for times in found.values() if times is not None])


def _sum(of_targets: Sequence[Measured]) -> Measured:
    """The sums of times on several targets; what fails on one of them has failed, and what is faster is so on all."""
    failed = {name: why for one in of_targets for name, why in one.failed.items()}
    names = [name for name in of_targets[0].seconds if name not in failed]
    seconds = {name: sum(one.seconds[name] for one in of_targets) for name in names}
    faster = [name for name in names if all(name in one.faster for one in of_targets)]
    return Measured(seconds, tuple(sorted(faster, key=seconds.__getitem__)), failed)


def check_runs_here(targets: Iterable[Target]) -> None:
    """Refuse targets that cannot run on this machine.

    Raises:
        UserError: there is one.
    """
    for target in targets:
        if reason := _why_not(target):
            raise UserError(f"--tune measures on this machine, and the target {target.name} cannot run here: {reason}")


@cache
def _why_not(target: Target) -> str:
    """Why `target` cannot run on this machine, found with a module that adds two numbers; empty if it can."""
    with scratch_directory() as folder:
        compiled = _compiled([lambda x: x + x], [torch.empty(1, device="meta")], target, folder)
        return why_not(target_spec(compiled, target.name), folder, target.device)


def _compiled(
    functions: Iterable[Candidate], operands: Sequence[torch.Tensor], target: Target, scratch: Path
) -> CompiledModule:
    """Compile one module of `functions`, each named by its position."""
    named = {str(i): _function(fn, operands) for i, fn in enumerate(functions)}
    graph = run_passes(StepGraph((), (), {}, {}, functions=named), parse_passes(_CLEAN_UP), [target.backend])
    linalg = import_functions(graph, scratch).modules.linalg
    return compile_module(Program(linalg), target, scratch)


def _measured(candidates: Mapping[str, Candidate], operands: Sequence[torch.Tensor], target: Target) -> Measured:
    def build(some: Mapping[str, Candidate]) -> dict[str, Call]:
        with scratch_directory() as folder:
            compiled = _compiled(some.values(), operands, target, folder)
        functions = {f"graph.{i}": operands for i in range(len(some))}
        return dict(zip(some, calls_of(compiled.vmfb, device_of(target), functions).values(), strict=True))

    default, *_ = candidates
    return fastest(default, *built(build, candidates))


def _function(fn: Candidate, operands: Sequence[torch.Tensor]) -> Function:
    def results(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        found = fn(*tensors)
        return [found] if isinstance(found, torch.Tensor) else found

    graph = retrace(results, operands)
    arguments = tuple(Value("input", f"x{i}") for i in range(len(operands)))
    (output,) = graph.graph.find_nodes(op="output")
    return Function(graph, arguments, tuple(Value("output", f"result{i}") for i in range(len(output.args[0]))))
