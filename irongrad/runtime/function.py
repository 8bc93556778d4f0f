"""`CompiledFunction`: a compiled function of arrays; needs numpy and the IREE runtime only."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from irongrad.runtime.arguments import as_seed
from irongrad.runtime.errors import ArtifactError, GuardError, UserError
from irongrad.runtime.manifest import FunctionSpec, Manifest
from irongrad.runtime.session import Session
from irongrad.runtime.structure import Structure, flatten, unflatten


class CompiledFunction:
    """A compiled function; call it with arrays in the structure of the example arguments.

    Attributes:
        manifest: the artifact's manifest.
    """

    def __init__(self, session: Session) -> None:
        self.manifest: Manifest = session.manifest
        spec = session.manifest.function
        if spec is None:
            raise ArtifactError(f"{session.directory} is a training step, not a function; use irongrad.runtime.load")
        self._session, self._spec = session, spec

    def __call__(self, *arguments: Any, seed: int | None = None) -> Any:
        """Run the function and return its result, with numpy arrays in place of tensors.

        Args:
            arguments: values with the structure, shapes and dtypes that the function was compiled for.
            seed: the seed of a function that draws random numbers, 0 by default. The same seed gives the same numbers.

        Raises:
            GuardError: the arguments have another structure, shape or dtype than the function was compiled for, or a
                seed is given to a function that draws no random numbers.
        """
        leaves = _leaves(arguments, self._spec)
        default = self.manifest.seed
        if default is not None:
            leaves.append(as_seed(default if seed is None else seed))
        elif seed is not None:
            raise GuardError("the function draws no random numbers, so it takes no seed")
        return unflatten(self._spec.result, self._session._invoke("call", leaves))

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Copy the artifact to `directory`; `irongrad.runtime.load_function` loads it, without torch.

        Raises:
            UserError: the directory exists already.
        """
        if Path(directory).exists():
            raise UserError(f"{directory} exists already; remove it, or save to another directory")
        shutil.copytree(self._session.directory, directory)


def load_function(
    directory: str | os.PathLike[str], *, target: str | None = None, device: str | None = None
) -> CompiledFunction:
    """Load a function that `CompiledFunction.save` wrote.

    The arguments are those of `irongrad.runtime.load`.

    Raises:
        ArtifactError: the artifact is missing, damaged, or a training step.
    """
    return CompiledFunction(Session(Path(directory), target=target, device=device))


def _leaves(arguments: tuple[Any, ...], spec: FunctionSpec) -> list[Any]:
    expected = spec.arguments
    if len(arguments) != len(expected.items):
        raise GuardError(f"the function takes {len(expected.items)} arguments, {len(arguments)} were given")
    leaves: list[Any] = []
    for number, (argument, part) in enumerate(zip(arguments, expected.items, strict=True)):
        if part.kind == "leaf":
            leaves.append(argument)
            continue
        found, structure = flatten(argument, lambda v: hasattr(v, "__array__") or hasattr(v, "__dlpack__"))
        if structure != part:
            raise GuardError(f"argument {number} is {_text(structure)}; the function was compiled for {_text(part)}")
        leaves += found
    return leaves


def _text(structure: Structure) -> str:
    match structure.kind:
        case "leaf":
            return "array"
        case "constant":
            return repr(structure.value)
        case "dict":
            pairs = zip(structure.keys, structure.items, strict=True)
            return f"{{{', '.join(f'{k!r}: {_text(i)}' for k, i in pairs)}}}"
    inner = ", ".join(map(_text, structure.items))
    return f"[{inner}]" if structure.kind == "list" else f"({inner})"
