"""Refusals of other values of state that Python code of the model read when the step was captured.

The step is right for these values alone. The module compares the state when it is loaded, so also with a checkpoint in
the place of the initial state, and when `import_state` replaces it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from irongrad.graph.dtypes import to_numpy
from irongrad.graph.step_graph import StateTensor, StepGraph, Value
from irongrad.pipeline.assemble.ordering import after
from irongrad.pipeline.assemble.refusal_messages import refuse_unless_equal
from irongrad.pipeline.assemble.storage import Storage, element_of, elements, quoted, tensor_type
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
        yield from (f"  {line}" for line in _same("%same", "%given", tensor))
        yield f'  cf.assert %same, "{quoted(_message(tensor, numbered=False))}"'
        yield "  util.return"
        yield "}"


def refuse_other_values(entry: EntryPoint, graph: StepGraph, names: Sequence[str]) -> Iterator[str]:
    """Refuse arguments of `import_state` that have other values, before any of the state is replaced.

    Args:
        entry: the entry point.
        graph: the step graph.
        names: the SSA names that stand for the arguments from there on.
    """
    relied, passed = {t.name: t for t in _relied(graph)}, list[str]()
    for i, spec in enumerate(entry.inputs):
        if spec.name in relied:
            tensor, own = relied[spec.name], f"%relied{i}"
            yield from _same(own, f"%arg{i}", tensor)
            yield f"{own}.true = arith.constant true"
            yield f"{own}.other = arith.xori {own}, {own}.true : i1"
            yield f"{own}.given = arith.index_castui {own}.other : i1 to index"
            yield f"{own}.wanted = arith.constant 0 : index"
            text = _message(tensor, numbered=True)
            yield from refuse_unless_equal(entry, i, [f"{own}.given"], [f"{own}.wanted"], text, f"{own}.refused")
            passed.append(own)
    for i, (name, spec) in enumerate(zip(names, entry.inputs, strict=True)):
        yield from after(passed, name, f"%arg{i}", tensor_type(graph.tensor(spec.name).initial))


def _relied(graph: StepGraph) -> list[StateTensor]:
    return [t for t in graph.state if t.relied_at and t.initial.numel() > 0]


def _message(tensor: StateTensor, *, numbered: bool) -> str:
    values = shown_values(to_numpy(tensor.initial))
    return other_values(tensor.relied_at, tensor.name, values, numbered=numbered)


def _same(result: str, value: str, tensor: StateTensor) -> Iterator[str]:
    """Whether a tensor has the values, bit for bit, that it had at capture; an i1."""
    kind, size = tensor_type(tensor.initial), tensor.initial.numel()
    own = element_of(kind)
    bits = _BITS.get(own, own)
    flat = f"tensor<{elements(kind)}x{own}>"
    whole = flat.replace(own, bits) if own != "i1" else f"tensor<{size}xi8>"
    yield f"{result}.flat = flow.tensor.reshape {value} : {kind} -> {flat}"
    if own == "i1":
        yield f"{result}.bits = arith.extui {result}.flat : {flat} to {whole}"
    elif own != bits:
        yield f"{result}.bits = arith.bitcast {result}.flat : {flat} to {whole}"
    given = f"{result}.bits" if whole != flat else f"{result}.flat"
    yield f'{result}.kept = arith.constant dense<"0x{_hexadecimal(tensor)}"> : {whole}'
    yield f"{result}.ne = arith.cmpi ne, {given}, {result}.kept : {whole}"
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


def _hexadecimal(tensor: StateTensor) -> str:
    return to_numpy(tensor.initial).tobytes().hex().upper()
