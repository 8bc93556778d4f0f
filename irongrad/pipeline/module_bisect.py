"""Whether a step's compiled numbers hold, and which pass over IREE's module spoils them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from irongrad.pipeline.bisect.module_passes import first_wrong
from irongrad.pipeline.choices import Choices
from irongrad.pipeline.driver import build
from irongrad.pipeline.iree.phases import module_passes
from irongrad.pipeline.options import make_options
from irongrad.runtime.errors import ToolchainError, VerificationError
from irongrad.step.train_step import TrainStep


@dataclass(frozen=True)
class ModuleFinding:
    """What compiling a step, and verifying it, showed.

    Attributes:
        failure: what the compiler said of the step with all passes; empty if it compiles and verifies.
        guilty: the first pass over IREE's module with which it fails; None if it fails without any of them.
        compilations: how often the step was compiled to find out.
    """

    failure: str
    guilty: str | None
    compilations: int


def bisect_module_passes(step: TrainStep, targets: tuple[str, ...], choices: Choices) -> ModuleFinding:
    """Compile and verify `step`, and where that fails leave passes over IREE's module out until it does not.

    Args:
        step: the training step.
        targets: what to compile for.
        choices: how to compile, complete; its `disable_passes` stay left out.

    Raises:
        UserError: the step or an option is refused.
    """
    failures: list[str] = []

    def holds(disabled: tuple[str, ...]) -> bool:
        leave_out = (*choices["disable_passes"], *disabled)
        with tempfile.TemporaryDirectory(prefix="irongrad-") as folder:
            options = make_options(Path(folder) / "step", targets, **(choices | {"disable_passes": leave_out}))
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
