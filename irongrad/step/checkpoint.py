"""Convert checkpoints to and from eager PyTorch, so that a run can move between compiled code and eager."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import save
from torch import nn

from irongrad.runtime.arguments import as_path
from irongrad.runtime.atomic_files import atomic_write
from irongrad.runtime.checkpoint import ARTIFACT, BASE, FINITE
from irongrad.runtime.errors import ArtifactError, UserError
from irongrad.runtime.manifest import DRAWS, GROWTH_TRACKER, SCALE, SEED, SKIPPED, Manifest, Role, steps_of
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.nonfinite import is_finite
from irongrad.runtime.safetensors_file import metadata, read_arrays
from irongrad.step.steps import Steps
from irongrad.step.tensor_names import state_tensors
from irongrad.step.train_step import TrainStep

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module | TrainStep | Steps,
    optimizer: Optimizers | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> dict[str, torch.Tensor]:
    """Load a checkpoint of a compiled run into eager objects: a model, or all that a step or several steps hold.

    Nothing is changed if anything does not fit. A checkpoint of the trainable state leaves frozen tensors as they are.

    Args:
        path: a file that `Session.save` wrote.
        model: an eager model with the parameters and buffers of the compiled one. Or the `TrainStep` or `Steps`: then
            their models, losses, `modules`, averages, optimizers and gradient scalers get the checkpoint's values.
        optimizer: the eager optimizer, or several, over the model's parameters. A step has its own.
        scaler: the eager loss scale; its options stay as they are. A step has its own.

    Returns:
        The model's part of the checkpoint, as passed to `model.load_state_dict`. For a step or several, the whole
        checkpoint; what no eager object holds is there, such as `irongrad/steps` and carried values (`carry/hidden`).

    Raises:
        ArtifactError: the checkpoint is missing or damaged, or does not fit the model.
        UserError: an optimizer or a scaler is given beside a step.
    """
    path = as_path(path, "a checkpoint")
    arrays, header = read_arrays(path)
    tensors = {name: _tensor(array) for name, array in arrays.items()}
    own = _parts_of(model, optimizer, scaler)
    frozen = {id(t) for t in own.tensors.values() if not t.requires_grad} if BASE in header.about else set()
    wanted = {n: t for n, t in own.tensors.items() if n in tensors or id(t) not in frozen}
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise ArtifactError(f"{path} has no {', '.join(missing[:4])}: it is a checkpoint of another model")
    for name, tensor in wanted.items():
        if tensor.shape != tensors[name].shape:
            raise ArtifactError(
                f"{path}: {name} has shape {tuple(tensors[name].shape)}, and in the eager model {tuple(tensor.shape)}"
            )
    names = own.names
    states: list[tuple[dict[Any, Any], torch.Tensor, dict[str, torch.Tensor]]] = []
    for one in own.optimizers:
        for parameter in [p for group in one.param_groups for p in group["params"]]:
            if id(parameter) not in names:
                raise ArtifactError(
                    "the optimizer holds a parameter that is none of the model's; make it anew. For modules beside "
                    "the model, give the TrainStep or the Steps in place of the model"
                )
            states.append((one.state, parameter, _state_of(names[id(parameter)], tensors)))
    scales = [_scale_of(tensors, step, path) for step in own.scalers]
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(tensors[name])
    for state, parameter, loaded in states:
        if loaded:
            state[parameter] = {**state.get(parameter, {}), **loaded}
    for one_scaler, scale in zip(own.scalers.values(), scales, strict=True):
        one_scaler.load_state_dict({**one_scaler.state_dict(), **scale})
    return {n: tensors[n] for n in wanted} if isinstance(model, nn.Module) else tensors


@dataclass(frozen=True)
class _Parts:
    """The eager objects whose state is a checkpoint's.

    Attributes:
        tensors: the parameters and buffers by their names in the checkpoint.
        parameters: all names of parameters; a tied one has several.
        optimizers: the optimizers, each once.
        scalers: the gradient scalers, by the name of their step.
        trained: the parameters that each step trains, by the step's name.
        steps: the steps by name; none for a model.
    """

    tensors: Mapping[str, torch.Tensor]
    parameters: Mapping[str, torch.Tensor]
    optimizers: tuple[torch.optim.Optimizer, ...]
    scalers: Mapping[str, torch.amp.GradScaler]
    trained: Mapping[str, Sequence[torch.Tensor]]
    steps: Mapping[str, TrainStep] = field(default_factory=dict)

    @property
    def names(self) -> dict[int, str]:
        """The first name of each parameter, by its id."""
        names: dict[int, str] = {}
        for name, tensor in self.parameters.items():
            names.setdefault(id(tensor), name)
        return names


def _parts_of(
    model: nn.Module | TrainStep | Steps, optimizer: Optimizers | None, scaler: torch.amp.GradScaler | None
) -> _Parts:
    """What a model with its optimizers, a step or several steps hold.

    Raises:
        UserError: an optimizer or a scaler is given beside a step; or `model` is neither.
    """
    if isinstance(model, nn.Module):
        optimizers = _each(optimizer)
        scalers = {"": scaler} if scaler is not None else {}
        trained = {"": [p for one in optimizers for group in one.param_groups for p in group["params"]]}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        return _Parts(_state_dict(model), parameters, optimizers, scalers, trained)
    if not isinstance(model, TrainStep | Steps):
        raise UserError(f"a checkpoint is for a model, a TrainStep or Steps, and this is a {type(model).__name__}")
    if optimizer is not None or scaler is not None:
        raise UserError("a step has its optimizers and its gradient scaler: give the step alone, and artifact= by name")
    steps = dict(model.steps) if isinstance(model, Steps) else {"": model}
    own = {id(one): one for step in steps.values() for one in step.optimizers}
    scales = {n: s.loss_scale for n, s in steps.items() if isinstance(s.loss_scale, torch.amp.GradScaler)}
    enabled = {name: scale for name, scale in scales.items() if scale.is_enabled()}
    tensors = state_tensors(model)
    return _Parts(tensors, tensors, tuple(own.values()), enabled, {n: s.trained for n, s in steps.items()}, steps)


def _state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a module's state dict themselves."""
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {name: held[name] for name in model.state_dict() if name in held}


def _state_of(name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An optimizer's state of the parameter of this name."""
    keys = [k.split("/")[1] for k in tensors if k.startswith("optimizer/") and k.endswith(f"/{name}")]
    return {key: tensors[f"optimizer/{key}/{name}"].clone() for key in keys}


def _scale_of(tensors: Mapping[str, torch.Tensor], step: str, path: str | os.PathLike[str]) -> dict[str, Any]:
    """A step's loss scale, as GradScaler's state dict has it."""
    scale = _of_step(SCALE, step)
    if scale not in tensors:
        raise ArtifactError(f"{path} has no {scale}: the compiled step has no loss scale")
    tracker = tensors.get(_of_step(GROWTH_TRACKER, step), torch.tensor(0))
    return {"scale": tensors[scale].item(), "_growth_tracker": int(tracker)}


def _of_step(name: str, step: str) -> str:
    return f"{name}/{step}" if step else name


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module | TrainStep | Steps,
    optimizer: Optimizers | None = None,
    artifact: str | os.PathLike[str] | Manifest | None = None,
    scaler: torch.amp.GradScaler | None = None,
    *,
    updates: int | Mapping[str, int] | None = None,
) -> None:
    """Write eager state as a checkpoint of the compiled step, or of several: of a model, or of all that a step holds.

    Args:
        path: the safetensors file to write, atomically.
        model: the eager model; or the `TrainStep` or `Steps` over the eager objects.
        optimizer: the model's optimizer or optimizers. State that they do not hold yet gets the artifact's initial
            value. A step has its own.
        artifact: the artifact's directory, or its manifest; it lists the tensors of a checkpoint.
        scaler: the loss scale. Without one, the loss scale gets the artifact's initial value. A step has its own.
        updates: the number of updates so far, or that of each of several steps by name. By default, what the
            optimizers' state counts.

    Raises:
        ArtifactError: the model lacks a tensor, or a tensor has another shape.
        UserError: there is no artifact. Or `every` of `after_step` needs the number of updates, which no optimizer
            tells.
    """
    own = _parts_of(model, optimizer, scaler)
    if artifact is None:
        raise UserError("give the artifact's directory, which lists the tensors of a checkpoint: artifact='build/net'")
    manifest = artifact if isinstance(artifact, Manifest) else read_manifest(Path(artifact))
    names = dict(own.tensors)
    if isinstance(model, nn.Module):
        names = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    states = {id(p): s for o in own.optimizers for p, s in o.state.items()}
    names |= _scaler_state(own.scalers, manifest) | _counters(own, states, manifest, updates)
    tensors: dict[str, torch.Tensor] = {}
    for spec in manifest.state:
        for key in (spec.name, *spec.aliases):
            value = _eager_value(key, spec.role, names, states)
            if value is None:
                value = tensors.get(spec.name)  # the name that another step has for it
            if value is None:
                value = _default(spec.name, spec.role, manifest, artifact)
            if tuple(value.shape) != spec.shape:
                raise ArtifactError(f"{key} has shape {tuple(value.shape)}, the compiled step has {spec.shape}")
            tensors[key] = value.detach().cpu().contiguous().clone()
    arrays = {name: _array(tensor) for name, tensor in tensors.items()}
    about = {ARTIFACT: manifest.digest, FINITE: all(map(is_finite, arrays.values()))}
    atomic_write(Path(path), save(tensors, metadata=metadata(arrays.items(), about)))


def _counters(
    own: _Parts,
    states: Mapping[int, Mapping[str, Any]],
    manifest: Manifest,
    updates: int | Mapping[str, int] | None,
) -> dict[str, torch.Tensor]:
    """The number of updates of each step, and as many draws, so that no draw is repeated.

    Raises:
        UserError: `updates` is no count of each step; or it is needed.
    """
    if updates is None:
        counts = {name: _updates_of(name, own, states, manifest) for name in own.trained}
    else:
        given = dict(updates) if isinstance(updates, Mapping) else dict.fromkeys(own.trained, updates)
        if given.keys() != own.trained.keys() or not all(isinstance(n, int) and n >= 0 for n in given.values()):
            raise UserError(f"updates is {updates!r}; it must be a count, or a dictionary with one for each step")
        counts = given
    found = {steps_of(name): torch.tensor(count, dtype=torch.int64) for name, count in counts.items()}
    found[DRAWS] = torch.tensor(sum(counts.values()), dtype=torch.int64)
    return {name: count for name, count in found.items() if any(s.name == name for s in manifest.state)}


def _updates_of(name: str, own: _Parts, states: Mapping[int, Mapping[str, Any]], manifest: Manifest) -> int:
    """How many updates a step has made, as the state of its optimizers tells.

    Raises:
        UserError: `after_step` runs after every so many updates, and no state counts those of this step.
    """
    others = {id(p) for other, trained in own.trained.items() if other != name for p in trained}
    names = {id(p): n for n, p in own.parameters.items()}
    alone = [p for p in own.trained[name] if id(p) not in others]
    counted = {key for s in manifest.state for key in (s.name, *s.aliases) if key.startswith("optimizer/step/")}
    step = own.steps.get(name)
    periodic = step is not None and any(after.every > 1 for after in step.after)
    if periodic and not any(f"optimizer/step/{names[id(p)]}" in counted for p in alone):
        example = f"{{{name!r}: 100}}" if name else "100"
        raise UserError(
            f"after_step runs after every so many updates, and no optimizer's state counts those of this step. Give "
            f"their number so far: updates={example}"
        )
    held = [states.get(id(p), {}) for p in alone or own.trained[name]]
    momentum = any(s.get("momentum_buffer") is not None for s in held)
    return max([*(int(s["step"]) for s in held if "step" in s), int(momentum)])


def _tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """The array as a tensor over the same memory; torch reads no numpy array of bfloat16."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The inverse of `_tensor`."""
    half = tensor.dtype == torch.bfloat16
    array: np.ndarray[Any, Any] = tensor.view(torch.int16).numpy() if half else tensor.numpy()
    return array.view(ml_dtypes.bfloat16) if half else array


def _scaler_state(scalers: Mapping[str, torch.amp.GradScaler], manifest: Manifest) -> dict[str, torch.Tensor]:
    """The loss scales as state. They count no skipped updates, because eager optimizers' step counts exclude them."""
    skipped = (s for s in manifest.state if s.name.startswith(SKIPPED))
    found = {s.name: torch.zeros(s.shape, dtype=torch.int64) for s in skipped}
    for step, scaler in scalers.items():
        if scaler.is_enabled():
            state = scaler.state_dict()
            found[_of_step(SCALE, step)] = torch.tensor(state["scale"], dtype=torch.float32)
            found[_of_step(GROWTH_TRACKER, step)] = torch.tensor(state["_growth_tracker"], dtype=torch.int32)
    return found


def _eager_value(
    key: str, role: Role, names: dict[str, torch.Tensor], states: dict[int, dict[str, torch.Tensor]]
) -> torch.Tensor | None:
    if role is Role.OPTIMIZER:
        _, field, parameter = key.split("/", 2)
        return states.get(id(names.get(parameter)), {}).get(field)
    return names.get(key)


def _default(name: str, role: Role, manifest: Manifest, artifact: str | os.PathLike[str] | Manifest) -> torch.Tensor:
    if name == SEED:
        return torch.tensor(manifest.seed, dtype=torch.int64)
    if isinstance(artifact, Manifest) or role in (Role.PARAMETER, Role.BUFFER):
        raise ArtifactError(
            f"the model (or its optimizer) has no {name}, which the compiled step's state has. Give the model that was "
            "compiled, and the artifact's directory for state that an optimizer does not hold yet"
        )
    from irongrad.runtime.initial_state import initial_state

    return torch.from_numpy(np.array(initial_state(Path(artifact))[name]))


def _each(optimizer: Optimizers | None) -> tuple[torch.optim.Optimizer, ...]:
    if optimizer is None:
        return ()
    each = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
    for one in each:
        if not isinstance(one, torch.optim.Optimizer):
            raise UserError(
                f"the optimizer of a checkpoint is a {type(one).__name__}; it must be a torch.optim.Optimizer"
            )
    return each
