"""The table of operators: for each ONNX operator, a function of tensors that PyTorch differentiates.

A value in an ONNX graph is a tensor, or a numpy array if it is known without data. Known without data are integer
constants, single numbers, shapes, and values computed from these (`irongrad.onnx.static`). An operator's function takes
a `Call` and the node's inputs, with None for an input that is left out. It returns one value or a sequence of values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import torch

from irongrad.runtime.errors import UnsupportedOpError

Static = np.ndarray[Any, Any]
Value: TypeAlias = torch.Tensor | Static
Operator = Callable[..., Any]

DOMAINS = ("", "ai.onnx")
_OPERATORS: dict[str, Operator] = {}


@dataclass(frozen=True)
class Region:
    """A graph inside a node: a branch of If, or the body of Loop or Scan.

    Attributes:
        inputs: the names of its inputs.
        nodes: its nodes, in order.
        outputs: the names of its results.
        outside: the names of the values that it reads from the graphs around it.
    """

    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    outside: tuple[str, ...]


@dataclass(frozen=True)
class Node:
    """A node of an ONNX graph.

    Attributes:
        operator: the name of its ONNX operator.
        domain: the operator's domain; empty for ONNX's own.
        name: the node's name; the name of its first output if the file gives none.
        inputs: the names of its inputs, empty for an input that is left out.
        outputs: the names of its outputs, empty for an output that nothing reads.
        attributes: its attributes by name, as Python values; graphs are of class `Region`.
        opset: the version of the operator set that the file uses.
        file: the name of the file.
        number: its position in the file, from 1; messages give it as the line.
    """

    operator: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 0
    file: str = ""
    number: int = 0

    def __str__(self) -> str:
        return f"{self.name} = {self.operator}({', '.join(n or '-' for n in self.inputs)})"

    @property
    def regions(self) -> list[Region]:
        """The graphs inside."""
        return [a for a in self.attributes.values() if isinstance(a, Region)]

    @property
    def reads(self) -> list[str]:
        """Names of all values that the node reads, also in its regions."""
        return [n for n in self.inputs if n] + [n for r in self.regions for n in r.outside]

    def unsupported(self, why: str) -> UnsupportedOpError:
        """Return the error to raise if this node cannot be converted."""
        return UnsupportedOpError(
            f"{self.file}:{self.number}: {self}\n  {self.operator} of opset {self.opset} {why}. Export the model "
            "without it, or with other arguments"
        )


@dataclass(frozen=True)
class Call:
    """The computation of a node.

    Attributes:
        node: the node.
        training: whether the module is in training mode.
        wide: whether the module was converted to float64, although the file is not in float64.
        values: the values that the node's regions may read, by name.
        compute: a function that computes a node of a region, and adds its outputs to the values that it is given.
        state: the names of the model's parameters and buffers.
    """

    node: Node
    training: bool
    wide: bool
    values: Mapping[str, Value]
    compute: Callable[[Node, dict[str, Value]], None]
    state: Collection[str] = ()

    @property
    def opset(self) -> int:
        """The version of the operator set."""
        return self.node.opset

    def get(self, name: str, default: Any = None) -> Any:
        """Return the attribute `name`."""
        return self.node.attributes.get(name, default)

    def wants(self, output: int) -> bool:
        """Return whether the node has output number `output`."""
        return len(self.node.outputs) > output and bool(self.node.outputs[output])

    def ints(self, value: Value | None, what: str) -> list[Any]:
        """Return the integers of an input that is an option, not an operand.

        Raises:
            UnsupportedOpError: they depend on data.
        """
        if isinstance(value, torch.Tensor):
            raise self.node.unsupported(f"takes {what} that depends on data, which is not supported")
        return [] if value is None else [_plain(v) for v in np.asarray(value).reshape(-1)]

    def option(self, value: Value | None, name: str) -> list[Any] | None:
        """Return integers from an attribute (older operator sets) or an input (newer ones); None for neither."""
        if value is not None:
            return self.ints(value, name)
        attribute = self.get(name)
        return list(attribute) if attribute is not None else None

    def number(self, value: Value | None, default: float, what: str) -> float:
        """Return the number of an input that is an option, or `default`; a number that depends on data is refused."""
        found = self.ints(value, what)
        return found[0] if found else default


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def operator(*names: str) -> Callable[[Operator], Operator]:
    """Register the decorated function for these operators of ONNX."""

    def register(function: Operator) -> Operator:
        for name in names:
            assert name not in _OPERATORS, name
            _OPERATORS[name] = function
        return function

    return register


def with_inner(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield all nodes, those inside other nodes too."""
    for node in nodes:
        yield node
        for region in node.regions:
            yield from with_inner(region.nodes)


def operator_of(node: Node) -> Operator:
    """Return the function that computes `node`.

    Raises:
        UnsupportedOpError: the table has no function for it.
    """
    if node.domain not in DOMAINS or node.operator not in _OPERATORS:
        domain = f" of the domain {node.domain}" if node.domain not in DOMAINS else ""
        raise node.unsupported(f"has no differentiable form here{domain}")
    return _OPERATORS[node.operator]


def operators() -> list[str]:
    """Return the names of all operators in the table."""
    return sorted(_OPERATORS)


def tensor(value: Value) -> torch.Tensor:
    """Return a value as a tensor."""
    if isinstance(value, torch.Tensor):
        return value
    if value.dtype == object:  # symbolic sizes
        return torch.tensor(value.tolist())
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.array(value).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(value))


def tensors(values: Sequence[Value]) -> list[torch.Tensor | float]:
    """Return values for an operator that broadcasts; single numbers beside tensors stay numbers."""
    if not any(isinstance(v, torch.Tensor) for v in values):
        return [tensor(v) for v in values]
    return [v.item() if isinstance(v, np.ndarray) and v.ndim == 0 else tensor(v) for v in values]
