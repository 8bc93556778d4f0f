"""Open an artifact: choose its target, check its files, and load them onto the device."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from irongrad.runtime import checkpoint as checkpoints
from irongrad.runtime.arrays import Array
from irongrad.runtime.base_file import base_index, base_of, read_base
from irongrad.runtime.devices import is_local
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.integrity import check_files, checked_bytes
from irongrad.runtime.loaded_module import LoadedModule
from irongrad.runtime.manifest import INITIAL_STATE, Manifest, TargetSpec
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.memory import keep_freed_memory
from irongrad.runtime.module import Module
from irongrad.runtime.placed_module import PlacedModule
from irongrad.runtime.safetensors_file import numpy_dtype
from irongrad.runtime.selection import check_device, choose_target
from irongrad.runtime.signatures import Trusted, check_signature
from irongrad.runtime.stacks import give_workers_stack

# Publishing an artifact is atomic, but opening it takes several reads. Each further attempt means that a new artifact
# was published during the last one.
_ATTEMPTS = 100


@dataclass(frozen=True)
class Asked:
    """What the caller of `load` asks for.

    Attributes:
        target: the name of a target; None for the first that can run here.
        device: an IREE device URI; None for the target's own.
        checkpoint: the checkpoint to start from; None for the artifact's initial state.
        base: the base file; None for where it was when the artifact was compiled.
        trusted: the keys of which one must have signed the artifact; None to accept any artifact.
        verifying: whether the caller verifies the numbers, so that an unverified device is accepted.
        part: the name of the only part of a placed step to load; None for all.
    """

    target: str | None
    device: str | None
    checkpoint: Path | None
    base: Path | None
    trusted: Trusted | None
    verifying: bool
    part: str | None = None


@dataclass(frozen=True)
class Opened:
    """An artifact that is loaded.

    Attributes:
        manifest: its manifest.
        target: the target that was chosen; of a placed step, that of the first part.
        device: the URI of the device.
        module: the module on the device, with its state.
        nonfinite: the names of the tensors of the checkpoint that hold NaN or infinite values.
        base: the tensors of the base file, by name.
    """

    manifest: Manifest
    target: TargetSpec
    device: str
    module: Module
    nonfinite: tuple[str, ...]
    base: dict[str, Array]


def opened_artifact(directory: Path, asked: Asked) -> Opened:
    """Open the artifact in `directory`; if it is replaced meanwhile, open the new one.

    Raises:
        ArtifactError: the artifact or checkpoint is missing, damaged, foreign or not trusted, or cannot run here.
    """
    for _ in range(_ATTEMPTS):
        manifest = read_manifest(directory)
        try:
            return _opened(manifest, directory, asked)
        except ArtifactError:
            if not _replaced(manifest, directory):
                raise
    raise ArtifactError(f"{directory} was replaced {_ATTEMPTS} times while it was read")


def _replaced(manifest: Manifest, directory: Path) -> bool:
    try:
        return read_manifest(directory).digest != manifest.digest
    except ArtifactError:
        return False


def _opened(manifest: Manifest, directory: Path, asked: Asked) -> Opened:
    if asked.trusted is not None:
        check_signature(manifest, directory, asked.trusted)
    targets = _chosen(manifest, directory, asked)
    target = targets[0]
    device = asked.device or target.device
    check_files(manifest, directory, (INITIAL_STATE,))
    codes = [checked_bytes(manifest, directory, each.file) for each in targets]
    for each in targets:
        check_device(each, directory, asked.device or each.device, verifying=asked.verifying)
    base = base_of(manifest, directory, asked.base)
    shared = read_base(manifest, base)
    states = [directory / INITIAL_STATE]
    nonfinite: tuple[str, ...] = ()
    if asked.checkpoint is not None:
        checked = checkpoints.check(asked.checkpoint, manifest, shared)
        nonfinite = checked.nonfinite
        states = [asked.checkpoint, *(() if checked.is_whole else states)]  # IREE takes a tensor from the first file
    if any(is_local(asked.device or each.device) for each in targets):
        keep_freed_memory()
        give_workers_stack()
    modules = [
        LoadedModule(
            directory / each.file,
            code,
            states,
            uri,
            base_index(manifest, base, mapped=is_local(uri)),
            _size(manifest, each),
        )
        for each, code in zip(targets, codes, strict=True)
        for uri in [asked.device or each.device]
    ]
    module: Module = modules[0]
    if manifest.placement is not None and asked.part is None:
        module = PlacedModule(manifest, manifest.placement, modules)
    return Opened(manifest, target, device, module, nonfinite, shared)


def _size(manifest: Manifest, target: TargetSpec) -> int:
    """The bytes of the state outside of a base file, and of the intermediate values of the largest entry point."""
    shared = manifest.base_file.tensors if manifest.base_file is not None else {}
    own = (spec for spec in manifest.state if spec.name not in shared)
    return sum(prod(spec.shape) * numpy_dtype(spec.dtype).itemsize for spec in own) + max(
        target.transients.values(), default=0
    )


def _chosen(manifest: Manifest, directory: Path, asked: Asked) -> tuple[TargetSpec, ...]:
    """The target to load, or those of all parts of a placed step."""
    if manifest.placement is None:
        return (choose_target(manifest, directory, asked.target, asked.device),)
    if asked.target is not None or asked.device is not None:
        where = ", ".join(f"{p.name} on {p.target}" for p in manifest.placement.parts)
        raise ArtifactError(f"{directory} is compiled with place, so each part has its target ({where}): give none")
    parts = zip(manifest.placement.parts, manifest.targets, strict=True)
    return tuple(target for part, target in parts if asked.part in (None, part.name))
