"""Find the pass over IREE's module that makes a compiled step fail."""

from __future__ import annotations

from dataclasses import dataclass

from irongrad.pipeline.bisect.module_passes import first_wrong
from irongrad.pipeline.choices import Choices
from irongrad.pipeline.driver import build
from irongrad.pipeline.iree.phases import module_passes
from irongrad.pipeline.options import make_options
from irongrad.runtime.errors import ToolchainError, VerificationError
from irongrad.runtime.scratch import scratch_directory
from irongrad.step.steps import Steps
from irongrad.step.train_step import TrainStep


@dataclass(frozen=True)
class ModuleFinding:
    """The result of compiling and verifying a step with and without passes over IREE's module.

    Attributes:
        failure: the error of the step with all passes; empty if it compiles and verifies.
        guilty: the first pass over IREE's module with which the step fails; None if it fails without all of them.
        compilations: the number of times that the step was compiled.
    """

    failure: str
    guilty: str | None
    compilations: int


def bisect_module_passes(step: TrainStep | Steps, targets: tuple[str, ...], choices: Choices) -> ModuleFinding:
    """Compile and verify `step`; if that fails, leave out passes over IREE's module until it succeeds.

    Args:
        step: the training step, or several over one state.
        targets: the targets to compile for.
        choices: how to compile, complete; its `disable_passes` are always left out.

    Raises:
        UserError: the step or an option is refused.
    """
    failures: list[str] = []

    def holds(disabled: tuple[str, ...]) -> bool:
        leave_out = (*choices["disable_passes"], *disabled)
        with scratch_directory() as folder:
            options = make_options(folder / "step", targets, **(choices | {"disable_passes": leave_out}))
            try:
                build(step, options)
            except (VerificationError, ToolchainError) as error:
                failures.append(str(error))
                return False
        return True

    if holds(()):
        return ModuleFinding("", None, 1)
    count = 1

    def counted(disabled: tuple[str, ...]) -> bool:
        nonlocal count
        count += 1
        return holds(disabled)

    names = [name for name, kind in module_passes().items() if not kind.required]
    guilty = first_wrong(names, counted)
    return ModuleFinding(failures[0], guilty, count)
