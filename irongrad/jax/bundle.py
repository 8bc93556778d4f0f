"""A bundle: a directory with a training step from JAX as StableHLO, its initial state, and its golden values.

    bundle.json            the index that this module describes
    step.stablehlo         the step as a portable artifact of StableHLO (openxla.org/stablehlo/bytecode)
    eval.stablehlo         functions beside the step, if there are any, in the same format
    predict.stablehlo
    state.safetensors      the initial state by name
    golden.safetensors     inputs, and JAX's float64 results for them (`irongrad.runtime.golden`)

`irongrad.jax` writes a bundle where JAX is installed, and `irongrad import` reads it where the compiler is installed.
Neither needs the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import safetensors.numpy

from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.golden import Golden, read_golden, write_golden
from irongrad.runtime.manifest import HyperSpec, IndexSpec, StateSpec, TensorSpec
from irongrad.runtime.safetensors_file import read_arrays

# 2: programs have no index that may be out of range.
FORMAT_VERSION = 2
INDEX = "bundle.json"
STATE = "state.safetensors"
GOLDEN = "golden.safetensors"


@dataclass(frozen=True)
class Port:
    """An argument or a result of a program.

    Attributes:
        kind: `state`, `input`, `hyper` or `output`, the kinds of `irongrad.graph.step_graph.Value`.
        name: the name of the state tensor, input, hyperparameter or output.
        dtype: numpy's name of its element type.
        shape: its dimensions.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """One exported function.

    Attributes:
        file: the name of the file that holds its module.
        arguments: the arguments of the module's `main`, in order.
        results: the results of the module's `main`, in order.
    """

    file: str
    arguments: tuple[Port, ...]
    results: tuple[Port, ...]


@dataclass(frozen=True)
class Index:
    """The contents of `bundle.json`.

    Attributes:
        format_version: the version of the bundle's layout.
        state: all state tensors.
        inputs: the inputs of the step, with their declared ranges.
        hypers: the hyperparameters of the step, with their defaults.
        programs: `step`, and `eval` and `predict` if the user gave them.
        versions: the versions of Python and of the packages that made the bundle.
        stablehlo: the version of StableHLO in which the modules are written.
        indices: a record of every index, for the manifest.
    """

    format_version: int
    state: tuple[StateSpec, ...]
    inputs: tuple[TensorSpec, ...]
    hypers: tuple[HyperSpec, ...]
    programs: dict[str, Program]
    versions: dict[str, str] = field(default_factory=dict)
    stablehlo: str = ""
    indices: tuple[IndexSpec, ...] = ()


@dataclass(frozen=True)
class Bundle:
    """A complete bundle in memory.

    Attributes:
        index: its index.
        modules: the bytes of each program's module, by program.
        state: the initial state by name.
        golden: the inputs and expected values.
    """

    index: Index
    modules: Mapping[str, bytes]
    state: Mapping[str, Array]
    golden: Golden


def is_bundle(directory: Path) -> bool:
    """Return whether `directory` looks like a bundle."""
    return (directory / INDEX).is_file()


def write_bundle(bundle: Bundle, directory: Path) -> None:
    """Write `bundle` into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, program in bundle.index.programs.items():
        (directory / program.file).write_bytes(bundle.modules[name])
    arrays = {n: np.asarray(a, order="C") for n, a in bundle.state.items()}
    (directory / STATE).write_bytes(safetensors.numpy.save(arrays))
    write_golden(bundle.golden, directory / GOLDEN)
    (directory / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(bundle.index), indent=2) + b"\n")


def read_bundle(directory: Path) -> Bundle:
    """Read the bundle in `directory`.

    Raises:
        ArtifactError: the directory holds no bundle, or the bundle is damaged or of another format version.
    """
    path = directory / INDEX
    try:
        data = path.read_bytes()
        version = msgspec.json.decode(data).get("format_version")
        if version != FORMAT_VERSION:
            raise ArtifactError(
                f"{path} has format version {version}; this IronGrad reads version {FORMAT_VERSION}. Export the step "
                "again with this version's irongrad.jax.export_step"
            )
        index = msgspec.json.decode(data, type=Index)
        if outside := [p.file for p in index.programs.values() if Path(p.file).name != p.file]:
            raise ArtifactError(f"{path} names the file {outside[0]!r}, which is not in the bundle's directory")
        modules = {n: (directory / p.file).read_bytes() for n, p in index.programs.items()}
        state, _ = read_arrays(directory / STATE)
    except (OSError, msgspec.DecodeError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        raise ArtifactError(f"{directory} is no whole bundle of irongrad.jax.export_step: {error}") from None
    if missing := [s.name for s in index.state if s.name not in state]:
        raise ArtifactError(f"{directory / STATE} lacks {', '.join(missing)}; export the step again")
    return Bundle(index, modules, state, read_golden(directory / GOLDEN))
