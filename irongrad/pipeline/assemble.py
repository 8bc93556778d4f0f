"""ImportedStep -> one IREE module: state in globals, guards, and the entry points around the functions.

The module is written as MLIR text, so that `08_step.mlir` of a dump reads like this file. For each function
of the step graph there is one private `@core.<name>` that loads its state, calls it and stores the result; an
entry point is its guards and a call of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from iree.compiler import ir

from irongrad.pipeline.dtypes import mlir_type
from irongrad.pipeline.graphs import Function, StepGraph, Value
from irongrad.pipeline.importer import ImportedStep
from irongrad.pipeline.interface import STEPS_DIM, Interface
from irongrad.runtime.errors import InternalError
from irongrad.runtime.manifest import SCOPE, EntryPoint, TensorSpec

# The function behind each entry point that runs one.
FUNCTION_OF = {
    "train_step": "train",
    "train_steps": "train",
    "grad_step": "grad",
    "apply_step": "apply",
    "eval_step": "eval",
    "predict": "predict",
}


@dataclass(frozen=True)
class AssembledModule:
    """A whole program for IREE.

    Attributes:
        graph: the step graph it was made of.
        interface: its entry points.
        text: the module as text.
        bytecode: the module as MLIR bytecode, the portable input of every target.
    """

    graph: StepGraph
    interface: Interface
    text: str
    bytecode: bytes


def assemble(step: ImportedStep, interface: Interface) -> AssembledModule:
    """Put the functions, the state and the entry points into one module and verify it.

    Raises:
        InternalError: the result is no valid MLIR.
    """
    shell = "\n".join(_shell(step.graph, interface))
    with ir.Context() as context:
        context.allow_unregistered_dialects = False
        try:
            module = ir.Module.parse(shell)
            functions = ir.Module.parse(step.linalg)
        except ir.MLIRError as error:
            raise InternalError(f"the assembled module does not parse: {error}") from error
        needed = {FUNCTION_OF[e.name] for e in interface.entry_points if e.name in FUNCTION_OF}
        _replace_declarations(module, functions, needed)
        if not module.operation.verify():
            raise InternalError("the assembled module does not verify")
        return AssembledModule(step.graph, interface, str(module), _bytecode(module))


def _bytecode(module: ir.Module) -> bytes:
    from io import BytesIO

    buffer = BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


def _replace_declarations(module: ir.Module, functions: ir.Module, needed: set[str]) -> None:
    """Move the imported functions into `module` in place of their declarations."""
    declared = {op.name.value: op for op in module.body.operations if op.operation.name == "func.func"}
    for function in list(functions.body.operations):
        name = function.name.value
        if name.removeprefix("graph.").removeprefix("check.") not in needed:
            continue
        declared[name].operation.erase()
        function.operation.attributes["sym_visibility"] = ir.StringAttr.get("private")
        function.detach_from_parent()
        module.body.append(function)


# --- text ---------------------------------------------------------------------------------------------------------


def _type(tensor: torch.Tensor) -> str:
    return mlir_type(tuple(tensor.shape), tensor.dtype)


def _spec_type(spec: TensorSpec) -> str:
    return mlir_type(spec.shape, _torch_dtype(spec.dtype))


def _torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def _symbol(kind: str, name: str) -> str:
    return f'@"{kind}:{name}"'


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _shell(graph: StepGraph, interface: Interface) -> Iterator[str]:
    """The module without its imported functions, which are only declared."""
    yield "module @irongrad {"
    for tensor in graph.state:
        attribute = f'#flow.parameter.named<"{SCOPE}"::"{_quoted(tensor.name)}">'
        yield f"  util.global private mutable {_symbol('state', tensor.name)} = {attribute} : {_type(tensor.initial)}"
    if any(name in interface for name in ("grad_step", "apply_step", "export_gradients", "import_gradients")):
        yield from _accumulators(graph)
    used = [e for e in interface.entry_points if e.name in FUNCTION_OF]
    for name in dict.fromkeys(FUNCTION_OF[e.name] for e in used):
        yield from _declaration(name, graph.functions[name])
        yield from _core(name, graph.functions[name])
        if f"check.{name}" in graph.functions:
            yield from _declaration(f"check.{name}", graph.functions[f"check.{name}"])
    for entry in interface.entry_points:
        yield from _entry(entry, graph)
    yield "}"


def _accumulators(graph: StepGraph) -> Iterator[str]:
    for name in graph.gradients:
        kind = _type(graph.tensor(name).initial)
        yield f"  util.global private mutable {_symbol('accumulator', name)} = dense<0.0> : {kind}"
    yield "  util.global private mutable @accumulated = 0 : i64"


def _declaration(name: str, function: Function) -> Iterator[str]:
    arguments = ", ".join(_type(function.example(i)) for i in range(len(function.arguments)))
    results = ", ".join(_type(t) for t in function.results_like())
    yield f'  func.func private @"graph.{name}"({arguments}) -> ({results})'


def _core(name: str, function: Function) -> Iterator[str]:
    """Load the state, call the function, store the new state, return its outputs."""
    kinds = [_type(function.example(i)) for i in range(len(function.arguments))]
    outer = [i for i, a in enumerate(function.arguments) if a.kind in ("input", "hyper", "count")]
    outputs = _outputs(function)
    signature = ", ".join(f"%a{i}: {kinds[i]}" for i in outer)
    returned = ", ".join(kind for _, kind in outputs)
    # Inlined into train_step and into train_steps' loop it would be compiled twice.
    attributes = "attributes {inlining_policy = #util.inline.never}"
    yield f'  func.func private @"core.{name}"({signature}) -> ({returned}) {attributes} {{'
    for i, argument in enumerate(function.arguments):
        if argument.kind in ("state", "accumulator"):
            yield f"    %a{i} = util.global.load {_symbol(argument.kind, argument.name)} : {kinds[i]}"
    results = [_type(t) for t in function.results_like()]
    operands = ", ".join(f"%a{i}" for i in range(len(kinds)))
    yield (
        f'    %r:{len(results)} = func.call @"graph.{name}"({operands}) : ({", ".join(kinds)}) -> ({", ".join(results)})'
    )
    for i, (result, kind) in enumerate(zip(function.results, results, strict=True)):
        if result.kind in ("state", "accumulator"):
            yield f"    util.global.store %r#{i}, {_symbol(result.kind, result.name)} : {kind}"
    yield f"    return {', '.join(f'%r#{i}' for i, _ in outputs)} : {returned}" if outputs else "    return"
    yield "  }"


def _outputs(function: Function) -> list[tuple[int, str]]:
    """Position and type of the results that go back to the caller."""
    kinds = [_type(t) for t in function.results_like()]
    return [(i, kinds[i]) for i, r in enumerate(function.results) if r.kind == "output"]


def _arguments(entry: EntryPoint) -> str:
    hyper = "tensor<?xf64>" if entry.name == "train_steps" else "f64"
    named = [(s.name, _spec_type(s)) for s in entry.inputs] + [(h, hyper) for h in entry.hypers]
    return ", ".join(f'%arg{i}: {kind} {{iree.abi.name = "{_quoted(n)}"}}' for i, (n, kind) in enumerate(named))


def _entry(entry: EntryPoint, graph: StepGraph) -> Iterator[str]:
    results = ", ".join(f'{_spec_type(s)} {{iree.abi.name = "{_quoted(s.name)}"}}' for s in entry.outputs)
    yield f"  func.func @{entry.name}({_arguments(entry)}) -> ({results}) {{"
    body = {
        "train_steps": _train_steps,
        "apply_step": _apply_step,
        "export_state": _export_state,
        "import_state": _import_state,
        "export_gradients": _export_gradients,
        "import_gradients": _import_gradients,
        "reset": _reset,
    }.get(entry.name, _run_once)
    yield from (f"    {line}" for line in body(entry, graph))
    yield "  }"


def _private(value: str, kind: str, name: str) -> Iterator[str]:
    """A copy of an input that IREE cannot see through, so that it never writes into the caller's buffer."""
    yield f"{name}.c = flow.tensor.clone {value} : {kind}"
    yield f"{name} = util.optimization_barrier {name}.c : {kind}"


def _copied(value: str, kind: str, name: str) -> Iterator[str]:
    """A copy between the state and a caller's buffer."""
    yield f"{name} = flow.tensor.clone {value} : {kind}"


def _call(name: str, function: Function, values: dict[Value, str], result: str) -> Iterator[str]:
    outer = [(i, a) for i, a in enumerate(function.arguments) if a.kind in ("input", "hyper", "count")]
    kinds = ", ".join(_type(function.example(i)) for i, _ in outer)
    operands = ", ".join(values[a] for _, a in outer)
    outputs = _outputs(function)
    assigned = f"{result}:{len(outputs)} = " if outputs else ""
    yield f'{assigned}func.call @"core.{name}"({operands}) : ({kinds}) -> ({", ".join(k for _, k in outputs)})'


def _guards(name: str, graph: StepGraph, values: dict[Value, str], prefix: str) -> Iterator[str]:
    """Check the ranges of integer inputs with the function `check.<name>`; a refusal comes before any effect."""
    check = graph.functions.get(f"check.{name}")
    if check is None:
        return
    kinds = [_type(check.example(i)) for i in range(len(check.arguments))]
    operands = ", ".join(values[a] for a in check.arguments)
    results = ", ".join(["tensor<i1>"] * len(check.results))
    yield (
        f'{prefix}:{len(check.results)} = func.call @"graph.check.{name}"({operands}) : ({", ".join(kinds)}) -> ({results})'
    )
    for i, result in enumerate(check.results):
        yield f"{prefix}.{i} = tensor.extract {prefix}#{i}[] : tensor<i1>"
        yield f'cf.assert {prefix}.{i}, "{_quoted(result.name)}"'


def _run_once(entry: EntryPoint, graph: StepGraph) -> Iterator[str]:
    """`train_step`, `grad_step`, `eval_step` and `predict`."""
    name = FUNCTION_OF[entry.name]
    function = graph.functions[name]
    values: dict[Value, str] = {}
    for i, spec in enumerate(entry.inputs):
        yield from _private(f"%arg{i}", _spec_type(spec), f"%in{i}")
        values[Value("input", spec.name)] = f"%in{i}"
    for i, hyper in enumerate(entry.hypers, len(entry.inputs)):
        yield f"%h{i} = tensor.from_elements %arg{i} : tensor<f64>"
        values[Value("hyper", hyper)] = f"%h{i}"
    yield from _guards(name, graph, values, "%ok")
    yield from _call(name, function, values, "%out")
    if name == "grad":
        yield "%n0 = util.global.load @accumulated : i64"
        yield "%one = arith.constant 1 : i64"
        yield "%n1 = arith.addi %n0, %one : i64"
        yield "util.global.store %n1, @accumulated : i64"
    kinds = [k for _, k in _outputs(function)]
    yield f"return {', '.join(f'%out#{i}' for i in range(len(kinds)))} : {', '.join(kinds)}" if kinds else "return"


def _apply_step(entry: EntryPoint, graph: StepGraph) -> Iterator[str]:
    function = graph.functions["apply"]
    yield "%n = util.global.load @accumulated : i64"
    yield "%zero = arith.constant 0 : i64"
    yield "%some = arith.cmpi sgt, %n, %zero : i64"
    yield 'cf.assert %some, "no gradients are accumulated; call grad_step first"'
    yield "%nf = arith.sitofp %n : i64 to f64"
    yield "%count = tensor.from_elements %nf : tensor<f64>"
    values = {Value("count", "accumulated"): "%count"}
    for i, hyper in enumerate(entry.hypers):
        yield f"%h{i} = tensor.from_elements %arg{i} : tensor<f64>"
        values[Value("hyper", hyper)] = f"%h{i}"
    yield from _call("apply", function, values, "%out")
    yield from _clear(graph)
    yield "return"


def _clear(graph: StepGraph) -> Iterator[str]:
    """Set the accumulators back to zero."""
    for i, name in enumerate(graph.gradients):
        kind = _type(graph.tensor(name).initial)
        yield f"%clear{i} = arith.constant dense<0.0> : {kind}"
        yield f"util.global.store %clear{i}, {_symbol('accumulator', name)} : {kind}"
    yield "%cleared = arith.constant 0 : i64"
    yield "util.global.store %cleared, @accumulated : i64"


def _train_steps(entry: EntryPoint, graph: StepGraph) -> Iterator[str]:
    """Two loops over the stacked inputs: all guards first, so that a refused call changes nothing; then the steps."""
    function = graph.functions["train"]
    yield "%c0 = arith.constant 0 : index"
    yield "%c1 = arith.constant 1 : index"
    kinds = [_spec_type(s) for s in entry.inputs] + ["tensor<?xf64>"] * len(entry.hypers)
    names = [s.name for s in entry.inputs] + list(entry.hypers)
    yield f"%k = tensor.dim %arg0, %c0 : {kinds[0]}"
    for i in range(1, len(kinds)):
        yield f"%k{i} = tensor.dim %arg{i}, %c0 : {kinds[i]}"
        yield f"%same{i} = arith.cmpi eq, %k, %k{i} : index"
        text = f"{names[i]} and {names[0]} are stacked over different numbers of steps (dimension 0)"
        yield f'cf.assert %same{i}, "{text}"'
    if "check.train" in graph.functions:
        yield "scf.for %i = %c0 to %k step %c1 {"
        values: dict[Value, str] = {}
        for line in _slices(entry, values, "%i", "g"):
            yield f"  {line}"
        for line in _guards("train", graph, values, "%ok"):
            yield f"  {line}"
        yield "}"
    loss_kind = _outputs(function)[0][1]
    element = loss_kind.removeprefix("tensor<").removesuffix(">")
    yield f"%none = tensor.empty(%k) : tensor<?x{element}>"
    yield f"%losses = scf.for %i = %c0 to %k step %c1 iter_args(%acc = %none) -> (tensor<?x{element}>) {{"
    values = {}
    for line in _slices(entry, values, "%i", "s"):
        yield f"  {line}"
    for line in _call("train", function, values, "%out"):
        yield f"  {line}"
    yield f"  %row = tensor.expand_shape %out#0 [] output_shape [1] : {loss_kind} into tensor<1x{element}>"
    yield f"  %next = tensor.insert_slice %row into %acc[%i][1][1] : tensor<1x{element}> into tensor<?x{element}>"
    yield f"  scf.yield %next : tensor<?x{element}>"
    yield "}"
    yield f"return %losses : tensor<?x{element}>"


def _slices(entry: EntryPoint, values: dict[Value, str], index: str, prefix: str) -> Iterator[str]:
    """Slice `index` of every stacked input and hyperparameter; a slice is a copy, so the caller's is safe."""
    for i, spec in enumerate(entry.inputs):
        inner = [d for d in spec.shape if d != STEPS_DIM]
        kind = mlir_type(tuple(inner), _torch_dtype(spec.dtype))
        offsets = ", ".join([index, *("0" for _ in inner)])
        sizes = ", ".join(["1", *map(str, inner)])
        ones = ", ".join("1" for _ in spec.shape)
        name = f"%{prefix}{i}"
        yield f"{name} = tensor.extract_slice %arg{i}[{offsets}][{sizes}][{ones}] : {_spec_type(spec)} to {kind}"
        values[Value("input", spec.name)] = name
    for i, hyper in enumerate(entry.hypers, len(entry.inputs)):
        name = f"%{prefix}{i}"
        yield f"{name} = tensor.extract_slice %arg{i}[{index}][1][1] : tensor<?xf64> to tensor<f64>"
        values[Value("hyper", hyper)] = name


def _export_state(entry: EntryPoint, graph: StepGraph) -> Iterator[str]:
    yield from _export([("state", s) for s in entry.outputs], ())


def _export_gradients(entry: EntryPoint, graph: StepGraph) -> Iterator[str]:
    tail = ("%n = util.global.load @accumulated : i64", "%count = tensor.from_elements %n : tensor<i64>")
    yield from _export([("accumulator", s) for s in entry.outputs[:-1]], tail)


def _export(specs: Sequence[tuple[str, TensorSpec]], tail: Sequence[str]) -> Iterator[str]:
    kinds = [_spec_type(s) for _, s in specs]
    for i, (kind, spec) in enumerate(specs):
        yield f"%g{i} = util.global.load {_symbol(kind, spec.name)} : {kinds[i]}"
        yield from _copied(f"%g{i}", kinds[i], f"%o{i}")
    yield from tail
    names = [f"%o{i}" for i in range(len(specs))] + (["%count"] if tail else [])
    yield f"return {', '.join(names)} : {', '.join(kinds + (['tensor<i64>'] if tail else []))}"


def _import_state(entry: EntryPoint, graph: StepGraph) -> Iterator[str]:
    yield from _import([("state", s) for s in entry.inputs])
    yield "return"


def _import_gradients(entry: EntryPoint, graph: StepGraph) -> Iterator[str]:
    last = len(entry.inputs) - 1
    yield f"%n = tensor.extract %arg{last}[] : tensor<i64>"
    yield from _import([("accumulator", s) for s in entry.inputs[:-1]])
    yield "util.global.store %n, @accumulated : i64"
    yield "return"


def _import(specs: Sequence[tuple[str, TensorSpec]]) -> Iterator[str]:
    for i, (kind, spec) in enumerate(specs):
        yield from _copied(f"%arg{i}", _spec_type(spec), f"%i{i}")
        yield f"util.global.store %i{i}, {_symbol(kind, spec.name)} : {_spec_type(spec)}"


def _reset(entry: EntryPoint, graph: StepGraph) -> Iterator[str]:
    for i, tensor in enumerate(graph.state):
        kind = _type(tensor.initial)
        attribute = f'#flow.parameter.named<"{SCOPE}"::"{_quoted(tensor.name)}">'
        yield f"%p{i} = flow.tensor.constant {attribute} : {kind}"
        yield from _copied(f"%p{i}", kind, f"%v{i}")
        yield f"util.global.store %v{i}, {_symbol('state', tensor.name)} : {kind}"
    yield from _clear(graph)
    yield "return"
