"""The base file: frozen parameters and buffers in a file beside the artifact, which artifacts and processes share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from irongrad.graph.dtypes import to_numpy
from irongrad.graph.step_graph import StepGraph
from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest import BaseSpec
from irongrad.runtime.manifest_file import file_spec
from irongrad.runtime.parameter_archive import read_archive, write_archive

_SUFFIX = ".irpa"


def base_path(given: str | os.PathLike[str] | None) -> Path | None:
    """Return the path of the base file.

    Raises:
        UserError: its name does not end in `.irpa`, or it cannot be written.
    """
    if given is None:
        return None
    path = Path(given)
    if path.suffix != _SUFFIX:
        raise UserError(f"base is {str(path)!r}; give a file whose name ends in {_SUFFIX}, such as model{_SUFFIX}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"base {path} cannot be written: make its directory first, and give the name of a file")
    return path


@contextmanager
def shared_base(graph: StepGraph, path: Path | None) -> Iterator[Path | None]:
    """Write the base file of a step, or check the one that is there; a new file is removed if the block fails.

    Raises:
        UserError: the step has nothing that is frozen, or the file is the base of another model.
    """
    tensors = {t.name: bytes_of(t.initial) for t in graph.state if t.in_base}
    if path is None:
        yield None
        return
    if not tensors:
        raise UserError(f"base {path} would be empty: no parameter and no buffer of the model is frozen. Leave it out")
    is_new = not path.exists()
    if is_new:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            write_archive(temporary, tensors)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    else:
        _check(path, tensors)
    try:
        yield path
    except BaseException:
        if is_new:
            path.unlink(missing_ok=True)
        raise


def base_spec(path: Path, output: Path) -> BaseSpec:
    """The manifest's entry for the base file of the artifact in `output`."""
    found = file_spec(path)
    relative = os.path.relpath(path.resolve(), output.absolute().parent.resolve() / output.name)
    return BaseSpec(Path(relative).as_posix(), found.sha256, found.size)


def bytes_of(tensor: torch.Tensor) -> Array:
    """Return a tensor's values as bytes, in row-major order."""
    return to_numpy(tensor).reshape(-1).view(np.uint8)


def _check(path: Path, tensors: dict[str, Array]) -> None:
    try:
        found = read_archive(path)
    except Exception as error:
        raise UserError(f"base {path} is no parameter archive of IREE: {error}") from None
    wrong = next((n for n, raw in tensors.items() if n not in found or not np.array_equal(found[n], raw)), None)
    if wrong is not None:
        state = "has other values" if wrong in found else "is missing"
        raise UserError(
            f"base {path} is that of another model: {wrong} {state}. Give another file; a new one is written"
        )
