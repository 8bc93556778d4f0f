"""Convert checkpoints to and from eager PyTorch, so that a run can move between compiled code and eager."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import save
from torch import nn

from irongrad.runtime.atomic_files import atomic_write
from irongrad.runtime.checkpoint import ARTIFACT, FINITE
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.manifest import DRAWS, GROWTH_TRACKER, SCALE, SEED, SKIPPED, STEPS, Manifest, Role
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.nonfinite import is_finite
from irongrad.runtime.safetensors_file import metadata, read_arrays

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> dict[str, torch.Tensor]:
    """Load a checkpoint of a compiled run into an eager model, and into its optimizer and scaler if they are given.

    Args:
        path: a file that `Session.save` wrote.
        model: an eager model with the parameters and buffers of the compiled one.
        optimizer: the eager optimizer, or several, over the model's parameters.
        scaler: the eager loss scale; its options stay as they are.

    Returns:
        The model's part of the checkpoint, as passed to `model.load_state_dict`.

    Raises:
        ArtifactError: the checkpoint is missing or damaged, or does not fit the model.
    """
    arrays, _ = read_arrays(path)
    tensors = {name: _tensor(array) for name, array in arrays.items()}
    wanted = model.state_dict().keys()
    mine = {n: t for n, t in tensors.items() if n in wanted}
    if missing := sorted(wanted - mine.keys()):
        raise ArtifactError(f"{path} has no {', '.join(missing[:4])}: it is a checkpoint of another model")
    model.load_state_dict(mine)
    names = {id(p): n for n, p in model.named_parameters()}
    for one in _each(optimizer):
        for parameter in [p for group in one.param_groups for p in group["params"]]:
            if id(parameter) not in names:
                raise ArtifactError("the optimizer holds a parameter that is none of the model's; make it anew")
            _load_state(one, parameter, names[id(parameter)], tensors)
    if scaler is not None:
        if SCALE not in tensors:
            raise ArtifactError(f"{path} has no {SCALE}: the compiled step has no loss scale")
        loaded = {"scale": tensors[SCALE].item(), "_growth_tracker": int(tensors.get(GROWTH_TRACKER, torch.tensor(0)))}
        scaler.load_state_dict({**scaler.state_dict(), **loaded})
    return mine


def _load_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]
) -> None:
    suffix = f"/{name}"
    keys = [k.split("/")[1] for k in tensors if k.startswith("optimizer/") and k.endswith(suffix)]
    loaded = {key: tensors[f"optimizer/{key}/{name}"].clone() for key in keys}
    if loaded:
        optimizer.state[parameter] = {**optimizer.state.get(parameter, {}), **loaded}


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None,
    artifact: str | os.PathLike[str] | Manifest,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Write an eager model's and optimizer's state as a checkpoint of the compiled step.

    Args:
        path: the safetensors file to write, atomically.
        model: the eager model.
        optimizer: its optimizer or optimizers. State that they do not hold yet gets the artifact's initial value.
        artifact: the artifact's directory, or its manifest; it lists the tensors of a checkpoint.
        scaler: the loss scale. Without one, the loss scale gets the artifact's initial value.

    Raises:
        ArtifactError: the model lacks a tensor, or a tensor has another shape.
    """
    manifest = artifact if isinstance(artifact, Manifest) else read_manifest(Path(artifact))
    names = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    names |= _scaler_state(scaler, manifest)
    states = {id(p): s for o in _each(optimizer) for p, s in o.state.items()}
    tensors: dict[str, torch.Tensor] = {}
    for spec in manifest.state:
        for key in (spec.name, *spec.aliases):
            value = _eager_value(key, spec.role, names, states)
            if value is None:
                value = _default(spec.name, spec.role, states, manifest, artifact)
            if tuple(value.shape) != spec.shape:
                raise ArtifactError(f"{key} has shape {tuple(value.shape)}, the compiled step has {spec.shape}")
            tensors[key] = value.detach().cpu().contiguous().clone()
    arrays = {name: _array(tensor) for name, tensor in tensors.items()}
    about = {ARTIFACT: manifest.digest, FINITE: all(map(is_finite, arrays.values()))}
    atomic_write(Path(path), save(tensors, metadata=metadata(arrays.items(), about)))


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


def _scaler_state(scaler: torch.amp.GradScaler | None, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The loss scale as state. It counts no skipped updates, because eager optimizers' step counts exclude them."""
    found = {s.name: torch.zeros(s.shape, dtype=torch.int64) for s in manifest.state if s.name == SKIPPED}
    if scaler is not None and scaler.is_enabled():
        state = scaler.state_dict()
        found[SCALE] = torch.tensor(state["scale"], dtype=torch.float32)
        found[GROWTH_TRACKER] = torch.tensor(state["_growth_tracker"], dtype=torch.int32)
    return found


def _eager_value(
    key: str, role: Role, names: dict[str, torch.Tensor], states: dict[int, dict[str, torch.Tensor]]
) -> torch.Tensor | None:
    if role is Role.OPTIMIZER:
        _, field, parameter = key.split("/", 2)
        return states.get(id(names.get(parameter)), {}).get(field)
    return names.get(key)


def _default(
    name: str,
    role: Role,
    states: dict[int, dict[str, torch.Tensor]],
    manifest: Manifest,
    artifact: str | os.PathLike[str] | Manifest,
) -> torch.Tensor:
    if name == SEED:
        return torch.tensor(manifest.seed, dtype=torch.int64)
    if name in (STEPS, DRAWS):  # as many draws as updates, so that no draw is repeated
        counts = [int(s["step"]) for s in states.values() if "step" in s]
        momentum = any(s.get("momentum_buffer") is not None for s in states.values())
        return torch.tensor(max([*counts, int(momentum)]), dtype=torch.int64)
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
    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
