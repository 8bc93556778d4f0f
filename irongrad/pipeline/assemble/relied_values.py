"""Refusals of state with other values than the ones at capture on which the step relies.

Python code of the model read them, or they keep an index within its tensor. The module looks at the state when it is
loaded, so also with a checkpoint in the place of the initial state, and when `import_state` replaces it. Constants of
the program are left to the manifest: they may be large, and no other state than that of another program has others.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from irongrad.graph.dtypes import to_numpy
from irongrad.graph.step_graph import StateTensor, StepGraph, Value
from irongrad.pipeline.assemble.ordering import after
from irongrad.pipeline.assemble.refusal_messages import Lines, refuse_unless_equal
from irongrad.pipeline.assemble.step_functions import spec_type
from irongrad.pipeline.assemble.storage import Storage, element_of, quoted, tensor_type
from irongrad.runtime.arrays import shown_values
from irongrad.runtime.manifest import EntryPoint
from irongrad.runtime.refusals import other_values

_BITS = {"f64": "i64", "f32": "i32", "f16": "i16", "bf16": "i16"}


def refuse_other_initial_values(graph: StepGraph) -> Iterator[str]:
    """Initializers that refuse the state with which the module is loaded, if it has other values."""
    storage = Storage(graph)
    for tensor in _relied(graph):
        kind = tensor_type(tensor.initial)
        yield "util.initializer {"
        yield from (f"  {line}" for line in storage.load("%given", Value("state", tensor.name), kind))
        yield from (f"  {line}" for line in _accepted("%accepted", "%given", tensor))
        yield f'  cf.assert %accepted, "{quoted(_message(tensor, numbered=False))}"'
        yield "  util.return"
        yield "}"


def refuse_other_values(entry: EntryPoint, graph: StepGraph) -> Lines:
    """Refuse arguments of `import_state` that have other values, before any of the state is replaced.

    Returns:
        The SSA names that stand for the arguments from there on.
    """
    names = [f"%arg{i}" for i in range(len(entry.inputs))]
    numbers = {spec.name: i for i, spec in enumerate(entry.inputs)}
    passed: list[str] = []
    for tensor in (t for t in _relied(graph) if t.name in numbers):
        number = numbers[tensor.name]
        own = f"%relied{number}"
        yield from _accepted(own, names[number], tensor)
        yield f"{own}.true = arith.constant true"
        yield f"{own}.other = arith.xori {own}, {own}.true : i1"
        yield f"{own}.given = arith.index_castui {own}.other : i1 to index"
        yield f"{own}.wanted = arith.constant 0 : index"
        text = _message(tensor, numbered=True)
        yield from refuse_unless_equal(entry, number, [f"{own}.given"], [f"{own}.wanted"], text, f"{own}.refused")
        passed.append(own)
    if not passed:
        return names
    for i, spec in enumerate(entry.inputs):
        yield from after(passed, f"%passed{i}", f"%arg{i}", spec_type(spec))
    return [f"%passed{i}" for i in range(len(names))]


def _relied(graph: StepGraph) -> list[StateTensor]:
    return [t for t in graph.state if t.relied is not None and t.relied.line and t.initial.numel() > 0]


def _message(tensor: StateTensor, *, numbered: bool) -> str:
    assert tensor.relied is not None
    bounds = tensor.relied.bounds
    values = f"in [{bounds[0]}, {bounds[1]}]" if bounds is not None else shown_values(to_numpy(tensor.initial))
    return other_values(tensor.relied.line, tensor.name, values, numbered=numbered)


def _accepted(result: str, value: str, tensor: StateTensor) -> Iterator[str]:
    """Whether a tensor has values that the step relies on; an i1."""
    kind, size = tensor_type(tensor.initial), tensor.initial.numel()
    own = element_of(kind)
    flat = f"tensor<{size}x{own}>"
    yield f"{result}.flat = flow.tensor.reshape {value} : {kind} -> {flat}"
    yield from _differs(f"{result}.ne", f"{result}.flat", tensor, own)
    yield f"{result}.zero = arith.constant dense<0> : tensor<i32>"
    yield f"{result}.any = linalg.generic {{"
    yield "  indexing_maps = [affine_map<(d0) -> (d0)>, affine_map<(d0) -> ()>],"
    yield '  iterator_types = ["reduction"]'
    yield f"}} ins({result}.ne : tensor<{size}xi1>) outs({result}.zero : tensor<i32>) {{"
    yield "^bb0(%differs: i1, %before: i32):"
    yield "  %wide = arith.extui %differs : i1 to i32"
    yield "  %now = arith.ori %before, %wide : i32"
    yield "  linalg.yield %now : i32"
    yield "} -> tensor<i32>"
    yield f"{result}.host = tensor.extract {result}.any[] : tensor<i32>"
    yield f"{result}.none = arith.constant 0 : i32"
    yield f"{result} = arith.cmpi eq, {result}.host, {result}.none : i32"


def _differs(result: str, value: str, tensor: StateTensor, own: str) -> Iterator[str]:
    """The elements, of the MLIR type `own`, that the step does not accept; a tensor of i1."""
    assert tensor.relied is not None
    bounds, size = tensor.relied.bounds, tensor.initial.numel()
    kind = own
    if own == "i1":
        kind = "i8"
        yield f"{result}.wide = arith.extui {value} : tensor<{size}xi1> to tensor<{size}xi8>"
        value = f"{result}.wide"
    elif bounds is None and own in _BITS:
        kind = _BITS[own]
        yield f"{result}.bits = arith.bitcast {value} : tensor<{size}x{own}> to tensor<{size}x{kind}>"
        value = f"{result}.bits"
    whole = f"tensor<{size}x{kind}>"
    if bounds is None:
        yield f'{result}.kept = arith.constant dense<"0x{to_numpy(tensor.initial).tobytes().hex()}"> : {whole}'
        yield f"{result} = arith.cmpi ne, {value}, {result}.kept : {whole}"
        return
    is_float, is_signed = tensor.initial.dtype.is_floating_point, tensor.initial.dtype.is_signed
    compare = "arith.cmpf u" if is_float else "arith.cmpi s" if is_signed else "arith.cmpi u"
    for name, bound in zip(("lt", "gt"), bounds, strict=True):
        yield f"{result}.{name}.limit = arith.constant dense<{_literal(bound, tensor.initial.dtype)}> : {whole}"
        yield f"{result}.{name} = {compare}{name}, {value}, {result}.{name}.limit : {whole}"
    yield f"{result} = arith.ori {result}.lt, {result}.gt : tensor<{size}xi1>"


def _literal(bound: float, dtype: torch.dtype) -> str:
    """A number in MLIR's syntax: an integer, or the bits of a float."""
    if not dtype.is_floating_point:
        return str(int(bound))
    return f"0x{int.from_bytes(to_numpy(torch.tensor(bound, dtype=dtype)).tobytes(), 'little'):0{2 * dtype.itemsize}X}"
