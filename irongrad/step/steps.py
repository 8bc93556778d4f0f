"""`Steps`: several training steps over one state, such as the two phases of a GAN."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from irongrad.diagnostics.source_lines import caller
from irongrad.diagnostics.stage_errors import refusals_name
from irongrad.runtime.errors import CaptureError
from irongrad.runtime.manifest import RESERVED, STANDARD
from irongrad.step.argument_checks import names_taken
from irongrad.step.optimizer_slots import is_foreign
from irongrad.step.train_step import TrainStep


@dataclass(frozen=True)
class Steps:
    """Several named training steps over one state: each sees what the others have changed.

    The steps may share modules, such as a generator and a critic, or one model of which each trains a part. Each has
    its own inputs, loss, optimizer and guards. They compile into one artifact with one checkpoint.
    `session.train_step(step="critic", ...)` trains one of them.

    If all steps have the same model, its tensors have their own names in the state. Otherwise a tensor is named by the
    first step whose model holds it, as in `critic.0.weight`; its names in later steps are aliases.

    Attributes:
        steps: the steps by name.

    Raises:
        CaptureError: a name is no identifier. A parameter is held by the optimizers of two steps that are not the same
            object. The steps have different seeds, an entry of the same name, or one is in pieces.
    """

    steps: Mapping[str, TrainStep]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_made_at", caller())
        with refusals_name(self.made_at):
            _check_names(self.steps)
            _check_alike(self.steps)
            _check_owners(self.steps)
            _check_scalers(self.steps)

    @property
    def made_at(self) -> str:
        """The user's line that made the steps; empty if there is none."""
        return str(vars(self)["_made_at"])


def named_steps(step: TrainStep | Steps) -> dict[str, TrainStep]:
    """The steps by name, each with the modules of the others beside its own; a step of its own has an empty name."""
    return _over_one_state(step.steps) if isinstance(step, Steps) else {"": step}


def _over_one_state(steps: Mapping[str, TrainStep]) -> dict[str, TrainStep]:
    """The steps, each with the modules of the others beside its own: what it reaches of them is no constant."""
    return {name: replace(step, modules={**step.modules, **_of_others(name, steps)}) for name, step in steps.items()}


def _of_others(name: str, steps: Mapping[str, TrainStep]) -> dict[str, nn.Module]:
    step = steps[name]
    own = [step.model, step.loss, *step.modules.values()]
    known = {id(part) for module in own if isinstance(module, nn.Module) for part in module.modules()}
    taken = names_taken(step.model) | set(step.modules)
    found: dict[str, nn.Module] = {}
    for other_name, other in steps.items():
        held = {other_name: other.model, f"{other_name}_loss": other.loss, **other.modules}
        for module_name, module in held.items():
            if isinstance(module, nn.Module) and id(module) not in known:
                while module_name in taken:
                    module_name += "_"
                found[module_name] = module
                taken.add(module_name)
                known |= {id(part) for part in module.modules()}
    return found


def _check_names(steps: Mapping[str, TrainStep]) -> None:
    if not isinstance(steps, Mapping) or not steps:
        raise CaptureError("Steps takes a dictionary of names and steps, such as {'critic': step_a, 'actor': step_b}")
    for name, step in steps.items():
        if not (isinstance(name, str) and name.isidentifier()) or name in STANDARD | RESERVED:
            raise CaptureError(f"a step has the name {name!r}; it must be an identifier that no entry point has")
        if not isinstance(step, TrainStep):
            raise CaptureError(f"the step {name!r} is a {type(step).__name__}; it must be a TrainStep")
        if step.between:
            raise CaptureError(f"the step {name!r} is in pieces; one of several steps cannot be")
        if "step" in step.inputs:
            raise CaptureError(f"the step {name!r} has an input 'step', as train_step(step={name!r}) has; rename it")
    owners: dict[str, str] = {}
    for name, step in steps.items():
        for entry in step.own_entries:
            if entry in steps or owners.setdefault(entry, name) != name:
                raise CaptureError(f"the entry {entry!r} of the step {name!r} has the name of another; rename it")


def _check_alike(steps: Mapping[str, TrainStep]) -> None:
    first, *others = steps.values()
    for other in others:
        if other.seed != first.seed:
            raise CaptureError(
                f"the steps have the seeds {first.seed} and {other.seed}, and all steps draw from one stream of random "
                "numbers: give them one seed"
            )


def _check_scalers(steps: Mapping[str, TrainStep]) -> None:
    owner: dict[int, str] = {}
    for name, step in steps.items():
        scaler = step.loss_scale
        if isinstance(scaler, torch.amp.GradScaler) and owner.setdefault(id(scaler), name) != name:
            raise CaptureError(
                f"the steps {owner[id(scaler)]!r} and {name!r} share a GradScaler, and each keeps a scale of its own: "
                "give each its own GradScaler"
            )


def _check_owners(steps: Mapping[str, TrainStep]) -> None:
    owner: dict[int, tuple[str, torch.optim.Optimizer]] = {}
    for name, step in steps.items():
        for optimizer in step.optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                other, held = owner.setdefault(id(parameter), (name, optimizer))
                if held is not optimizer:
                    raise CaptureError(
                        f"the steps {other!r} and {name!r} update a parameter of shape {tuple(parameter.shape)} with "
                        "two optimizers, whose states would disagree. Give both steps the same optimizer, or each "
                        "its own parameters"
                    )
                if other != name:
                    _check_shared(optimizer, other, name)


def _check_shared(optimizer: torch.optim.Optimizer, one: str, other: str) -> None:
    """Refuse an optimizer of two steps whose first update differs from later ones: each step counts its own updates."""
    dampened = any(group.get("dampening", 0) for group in optimizer.param_groups)
    if is_foreign(optimizer) or (isinstance(optimizer, torch.optim.SGD) and dampened):
        raise CaptureError(
            f"the steps {one!r} and {other!r} share a {type(optimizer).__name__}, which counts its updates outside of "
            "its parameters' state. Give each step an optimizer of its own parameters"
        )
