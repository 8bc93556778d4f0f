"""The module that an ONNX graph becomes: it runs the graph's nodes one after the other."""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

from irongrad.onnx import operators as operators
from irongrad.onnx.registry import Call, Node, Static, Value, operator_of, tensor
from irongrad.onnx.static import rule_of
from irongrad.runtime.argument_names import arguments_of
from irongrad.runtime.errors import UserError


@dataclass(frozen=True)
class Input:
    """An input of a graph.

    Attributes:
        shape: its sizes, None for a size that varies; None if the file does not give them.
        dtype: the type of its elements; None if the file does not give it, or PyTorch has none for it.
    """

    shape: tuple[int | None, ...] | None
    dtype: torch.dtype | None


class OnnxModel(nn.Module):
    """An ONNX graph as a module.

    Its parameters and buffers have the names of the graph's initialisers, and its `forward` takes the graph's inputs.
    To Python, each node is a line of a source file, the ONNX file itself. So tracebacks and messages name the node.

    Attributes:
        nodes: the nodes of the graph, in order.
        results: the names of the graph's outputs.
        inputs: the inputs of the graph.
        arguments: the argument of `forward` for each input of the graph.
    """

    nodes: tuple[Node, ...]
    results: tuple[str, ...]
    inputs: Mapping[str, Input]
    arguments: Mapping[str, str]

    def __init__(
        self,
        nodes: Sequence[Node],
        results: Sequence[str],
        statics: Mapping[str, Static],
        tensors: Mapping[str, torch.Tensor],
        inputs: Mapping[str, Input],
    ) -> None:
        super().__init__()
        self.inputs = dict(inputs)
        self.nodes, self.results = tuple(nodes), tuple(results)
        self._statics = dict(statics)
        self._has_float64 = any(t.dtype is torch.float64 for t in tensors.values())
        self._paths = {name: self._add_tensor(name, value) for name, value in tensors.items()}

    def _add_tensor(self, name: str, value: torch.Tensor) -> str:
        """Register a tensor under its name, with dots as nested modules as in PyTorch, and return its path."""
        *parents, last = [part or "_" for part in name.split(".")]
        owner: nn.Module = self
        for parent in parents:
            inner = owner._modules.get(parent)
            if inner is None:
                if hasattr(owner, parent):
                    return self._add_tensor(name.replace(".", "_"), value)
                inner = nn.Module()
                owner.add_module(parent, inner)
            owner = inner
        if hasattr(owner, last):
            last += "_"
        if isinstance(value, nn.Parameter):
            owner.register_parameter(last, value)
        else:
            owner.register_buffer(last, value)
        return ".".join([*parents, last])

    def begin(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, Value]:
        """Return the values that are known before the first node.

        Raises:
            UserError: an input has other sizes than those that are fixed in the file, or a type that would lose values.
        """
        for name, value in inputs.items():
            _check_input(name, value, self.inputs[name])
        values: dict[str, Value] = dict(self._statics)
        for name, path in self._paths.items():
            owner, _, last = path.rpartition(".")
            values[name] = getattr(self.get_submodule(owner), last)
        return values | {name: self._in_type_of_file(name, value) for name, value in inputs.items()}

    def _in_type_of_file(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Convert an input to the file's type if that holds all its values: uint8 images to float32.

        Arrays of numpy have no bfloat16, so a file in bfloat16 gets float32.
        """
        wanted = self.inputs[name].dtype
        if wanted is None:
            return value
        if wanted.is_floating_point and self._is_wide():
            wanted = torch.float64
        holds = torch.promote_types(value.dtype, wanted) is wanted or wanted is torch.bfloat16
        return value.to(wanted) if holds else value

    def compute(self, number: int, values: dict[str, Value]) -> None:
        """Run node `number`, and add its outputs to `values`."""
        self._compute(self.nodes[number], values)

    def _compute(self, node: Node, values: dict[str, Value]) -> None:
        operands = [values[name] if name else None for name in node.inputs]
        call = Call(node, self.training, self._is_wide(), values, self._compute, self._paths.keys())
        known = bool(operands) and all(v is None or isinstance(v, np.ndarray) for v in operands)
        function = (rule_of(node.operator, operands) if known else None) or operator_of(node)
        try:
            result = function(call, *operands)
        except TypeError as error:
            if "positional argument" not in str(error):
                raise
            raise node.unsupported("has inputs that are not supported") from error
        results = result if isinstance(result, list | tuple) else [result]
        # numpy returns scalars instead of arrays of rank 0.
        results = [np.asarray(r) if isinstance(r, np.generic) else r for r in results]
        values.update((name, value) for name, value in zip(node.outputs, results, strict=False) if name)

    def _is_wide(self) -> bool:
        return any(t.dtype is torch.float64 for t in self.parameters()) and not self._has_float64

    def end(self, values: Mapping[str, Value]) -> Any:
        """Return the output, or a dictionary if there are several."""
        found = {name: tensor(values[name]) for name in self.results}
        return next(iter(found.values())) if len(found) == 1 else found


def _check_input(name: str, value: torch.Tensor, about: Input) -> None:
    wanted, dtype = about.shape, about.dtype
    if dtype is not None and not torch.can_cast(value.dtype, dtype):
        given, made_for = (str(d).removeprefix("torch.") for d in (value.dtype, dtype))
        raise UserError(
            f"the input {name!r} is {given}, and the ONNX file is made for {made_for}, which cannot hold it. Convert "
            f"it to {made_for}"
        )
    if wanted is None:
        return
    pairs = list(zip(value.shape, wanted, strict=False))
    if varying := [i for i, (s, w) in enumerate(pairs) if w is not None and not isinstance(s, int)]:
        raise UserError(
            f"dimension {varying[0]} of the input {name!r} varies, and the ONNX file is made for {wanted[varying[0]]}. "
            "Export the model with sizes that vary (dynamic_shapes), or leave the dimension fixed"
        )
    if value.ndim != len(wanted) or any(w is not None and s != w for s, w in pairs):
        shown = ", ".join("?" if w is None else str(w) for w in wanted)
        raise UserError(
            f"the input {name!r} has shape {list(value.shape)}, and the ONNX file is made for [{shown}]. Give it that "
            "shape, or export the model with sizes that vary (dynamic_shapes)"
        )


def module_of(
    file: str,
    inputs: Mapping[str, Input],
    nodes: Sequence[Node],
    results: Sequence[str],
    statics: Mapping[str, Static],
    tensors: Mapping[str, torch.Tensor],
) -> OnnxModel:
    """Return a module of a class of its own, whose `forward` names the inputs and has a line for every node."""
    lines = [f"    self.compute({i}, v)" for i in range(len(nodes))] + ["    return self.end(v)"]
    names = arguments_of(inputs)
    given = ", ".join(f"{name!r}: {as_}" for name, as_ in names.items())
    lines[0] = f"    v = self.begin({{{given}}}); {lines[0].strip()}"
    source = "\n".join([f"def forward(self, {', '.join(names.values())}):", *lines])
    module = compile(source, file, "exec")
    code = next(c for c in module.co_consts if isinstance(c, CodeType))
    forward = FunctionType(code.replace(co_firstlineno=0), {"__name__": __name__})
    shown = [f"{node}\n" for node in nodes] + [f"return {', '.join(results)}\n"]
    linecache.cache[file] = (sum(map(len, shown)), None, shown, file)
    about = {"forward": forward, "arguments": names, "__doc__": f"The graph in {file}."}
    subclass = type("OnnxModel", (OnnxModel,), about)
    result: OnnxModel = subclass(nodes, results, statics, tensors, inputs)
    return result
