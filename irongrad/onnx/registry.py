"""The table of operators: for each of ONNX's, a function of tensors that PyTorch differentiates.

A value in an ONNX graph is a tensor, or a numpy array where it is known without data: integer constants, single
numbers, shapes, and what is computed of them (`irongrad.onnx.static`). A function takes a `Call` and the node's inputs,
None for one that is left out, and returns one value or a sequence of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        inputs: names of what it is called with.
        nodes: in order.
        outputs: names of its results.
        outside: names of what it reads of the graphs around it.
    """

    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    outside: tuple[str, ...]


@dataclass(frozen=True)
class Node:
    """A node of an ONNX graph.

    Attributes:
        operator: ONNX's name of what it computes.
        domain: of the operator; empty for ONNX's own.
        name: the node's; made of its first output where the file gives none.
        inputs: names of values, empty for one that is left out.
        outputs: names of values, empty for one that nobody reads.
        attributes: by name, as Python values, and graphs as `Region`.
        opset: the version of the operator set that the file uses.
        file: the file.
        number: its place in the file, from 1; what a message says as the line.
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
        """Names of all values that it reads, in its regions too."""
        return [n for n in self.inputs if n] + [n for r in self.regions for n in r.outside]

    def unsupported(self, why: str) -> UnsupportedOpError:
        """The error to raise where this node cannot be converted."""
        return UnsupportedOpError(
            f"{self.file}:{self.number}: {self}\n  {self.operator} of opset {self.opset} {why}. Export the model "
            "without it, or with other arguments"
        )


@dataclass(frozen=True)
class Call:
    """A node that is being computed.

    Attributes:
        node: the node.
        training: whether the module is in training mode.
        wide: whether the module was taken to float64, which the file does not say.
        values: what its regions may read, by name.
        compute: computes a node of a region, with values that it adds to.
    """

    node: Node
    training: bool
    wide: bool
    values: Mapping[str, Value]
    compute: Callable[[Node, dict[str, Value]], None]

    @property
    def opset(self) -> int:
        """The version of the operator set."""
        return self.node.opset

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute."""
        return self.node.attributes.get(name, default)

    def wants(self, output: int) -> bool:
        """Whether the node has the output of that number."""
        return len(self.node.outputs) > output and bool(self.node.outputs[output])

    def ints(self, value: Value | None, what: str) -> list[Any]:
        """The integers in an input that says how, not what, to compute.

        Raises:
            UnsupportedOpError: they depend on data.
        """
        if isinstance(value, torch.Tensor):
            raise self.node.unsupported(f"takes {what} that depends on data, which is not supported")
        return [] if value is None else [_plain(v) for v in np.asarray(value).reshape(-1)]

    def option(self, value: Value | None, name: str) -> list[Any] | None:
        """Integers that older operator sets have as an attribute and newer ones as an input; None for neither."""
        if value is not None:
            return self.ints(value, name)
        given = self.get(name)
        return list(given) if given is not None else None

    def number(self, value: Value | None, default: float, what: str) -> float:
        """A number that says how to compute; one that varies is refused."""
        found = self.ints(value, what)
        return found[0] if found else default


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def operator(*names: str) -> Callable[[Operator], Operator]:
    """Register the function below for these operators of ONNX."""

    def register(function: Operator) -> Operator:
        for name in names:
            assert name not in _OPERATORS, name
            _OPERATORS[name] = function
        return function

    return register


def with_inner(nodes: Iterable[Node]) -> Iterator[Node]:
    """All nodes, those inside others too."""
    for node in nodes:
        yield node
        for region in node.regions:
            yield from with_inner(region.nodes)


def operator_of(node: Node) -> Operator:
    """The function that computes `node`.

    Raises:
        UnsupportedOpError: there is none.
    """
    if node.domain not in DOMAINS or node.operator not in _OPERATORS:
        domain = f" of the domain {node.domain}" if node.domain not in DOMAINS else ""
        raise node.unsupported(f"has no differentiable form here{domain}")
    return _OPERATORS[node.operator]


def operators() -> list[str]:
    """The names of all operators in the table."""
    return sorted(_OPERATORS)


def tensor(value: Value) -> torch.Tensor:
    """A value as a tensor."""
    if isinstance(value, torch.Tensor):
        return value
    if value.dtype == object:  # sizes that are symbols
        return torch.tensor(value.tolist())
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.array(value).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(value))


def tensors(values: Sequence[Value]) -> list[torch.Tensor | float]:
    """Values for an operator that broadcasts; single numbers beside tensors stay numbers."""
    if not any(isinstance(v, torch.Tensor) for v in values):
        return [tensor(v) for v in values]
    return [v.item() if isinstance(v, np.ndarray) and v.ndim == 0 else tensor(v) for v in values]
