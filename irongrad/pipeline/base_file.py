"""The base file: frozen parameters and buffers in a file beside the artifact, which artifacts and processes share."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from irongrad.graph.dtypes import to_numpy
from irongrad.graph.step_graph import StateTensor, StepGraph
from irongrad.runtime.arrays import Array
from irongrad.runtime.byte_sizes import readable
from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest import OF_BASE, BaseSpec
from irongrad.runtime.manifest_file import file_spec
from irongrad.runtime.parameter_archive import write_archive
from irongrad.runtime.parameter_files import FORMATS, read_parameters

_NEW = ".irpa"


def base_path(given: str | os.PathLike[str] | None) -> Path | None:
    """Return the path of the base file.

    Raises:
        UserError: its name does not end in that of a format, it does not exist, or it cannot be written.
    """
    if given is None:
        return None
    path = Path(given)
    if path.suffix[1:] not in FORMATS:
        raise UserError(
            f"base is {str(path)!r}; give a file whose name ends in {_NEW}, such as model{_NEW}, or the model's own "
            "file, whose name ends in .safetensors or .gguf"
        )
    if path.suffix != _NEW and not path.is_file():
        raise UserError(f"base {path} does not exist; a file is written if its name ends in {_NEW}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"base {path} cannot be written: make its directory first, and give the name of a file")
    return path


def with_base(graphs: Mapping[str, StepGraph], path: Path | None) -> dict[str, StepGraph]:
    """Mark the frozen parameters and buffers that lie in the base file.

    Of a file that exists it is these whose bytes are in it, whatever they are called there. All others stay in the
    artifact.

    Raises:
        UserError: the step has nothing that is frozen, or the file is the base of another model.
        ArtifactError: the file is damaged, or IREE cannot read it.
    """
    if path is None:
        return dict(graphs)
    frozen = {t.name: t for g in graphs.values() for t in g.state if t.frozen and t.role in OF_BASE}
    if not frozen:
        raise UserError(f"base {path} would be empty: no parameter and no buffer of the model is frozen. Leave it out")
    names = _found(frozen, path) if path.exists() else {name: name for name in frozen}

    def marked(tensor: StateTensor) -> StateTensor:
        return replace(tensor, base_name=names.get(tensor.name, ""))

    return {name: replace(graph, state=tuple(map(marked, graph.state))) for name, graph in graphs.items()}


@contextmanager
def shared_base(graph: StepGraph, path: Path | None) -> Iterator[Path | None]:
    """Write the base file of a step, or check the one that is there; a new file is removed if the block fails.

    Raises:
        UserError: the file has changed since it was read, or another one was written meanwhile.
    """
    if path is None:
        yield None
        return
    tensors = {t.base_name: bytes_of(t.initial) for t in graph.state if t.in_base}
    is_new = not path.exists()
    if is_new:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            write_archive(temporary, tensors)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    else:
        found = read_parameters(path, path.suffix[1:])
        wrong = next((n for n, raw in tensors.items() if n not in found or not np.array_equal(found[n], raw)), None)
        if wrong is not None:
            raise UserError(f"base {path} was replaced while the step was compiled: {wrong} differs. Compile it again")
    try:
        yield path
    except BaseException:
        if is_new:
            path.unlink(missing_ok=True)
        raise


def base_spec(graph: StepGraph, path: Path, output: Path) -> BaseSpec:
    """The manifest's entry for the base file of the artifact in `output`."""
    found = file_spec(path)
    # The name of the file tells its format, so a link to it is kept.
    place = path.absolute().parent.resolve() / path.name
    relative = os.path.relpath(place, output.absolute().parent.resolve() / output.name)
    tensors = {t.name: t.base_name for t in graph.state if t.in_base}
    return BaseSpec(Path(relative).as_posix(), found.sha256, found.size, tensors)


def bytes_of(tensor: torch.Tensor) -> Array:
    """Return a tensor's values as bytes, in row-major order."""
    return to_numpy(tensor).reshape(-1).view(np.uint8)


def _found(frozen: Mapping[str, StateTensor], path: Path) -> dict[str, str]:
    """The names in a base file of the tensors that are in it, by their names in the model."""
    stored = read_parameters(path, path.suffix[1:])
    wanted = {name: bytes_of(tensor.initial) for name, tensor in frozen.items()}
    sizes = {raw.size for raw in wanted.values()} - {0}
    places: dict[bytes, str] = {}
    for name, raw in stored.items():
        if raw.size in sizes:
            places.setdefault(_digest(raw), name)
    found: dict[str, str] = {}
    for name, raw in wanted.items():
        own = stored.get(name)
        if own is not None and own.size == raw.size and not np.array_equal(own, raw):
            raise UserError(
                f"base {path} is that of another model: {name} has other values. Give another file; one whose name "
                f"ends in {_NEW} is written if it does not exist"
            )
        if own is not None and own.size == raw.size:
            found[name] = name
        elif (place := places.get(_digest(raw))) is not None:
            found[name] = place
    _refuse_few(found, wanted, path)
    return found


def _refuse_few(found: Mapping[str, str], wanted: Mapping[str, Array], path: Path) -> None:
    """Refuse a file with less than half of the frozen bytes: it is another model's, or has them in another form."""
    held = sum(wanted[name].size for name in found)
    whole = sum(raw.size for raw in wanted.values())
    if 2 * held >= whole:
        return
    largest = max((name for name in wanted if name not in found), key=lambda name: wanted[name].size)
    raise UserError(
        f"base {path} has {readable(held)} of the {readable(whole)} of frozen tensors: its tensors have other "
        f"values, or are stored in another way. {largest} is not in it. Give another file; one whose name ends in "
        f"{_NEW} is written if it does not exist"
    )


def _digest(raw: Array) -> bytes:
    return hashlib.sha256(raw.tobytes()).digest()
