"""Choose the forms of a module's matrix products by measurement on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from iree.compiler import ir

from irongrad.mlir.walk import bytecode_of, parsed
from irongrad.passes.base import Choice, Measured
from irongrad.passes.module.matmul_kernels import MatmulKernels, forms_in
from irongrad.passes.module.matmul_kernels.forms import ProductProblem
from irongrad.pipeline.iree.compile import COMMON_FLAGS, Compilation, compile_module
from irongrad.pipeline.iree.portable_module import PortableModule
from irongrad.pipeline.kept_times import keep, key_of, known
from irongrad.pipeline.stopwatch import Stopwatch, check_runs_here
from irongrad.pipeline.timed_calls import Call, Program, built, calls_of, device_of, fastest
from irongrad.runtime.manifest import ChoiceSpec
from irongrad.runtime.scratch import scratch_directory
from irongrad.targets import Target

# Products that are compiled at once, as most of the time to compile one alone is the start of IREE's tools.
_AT_ONCE = 8

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}

Names = Sequence[str]  # of the forms of a product; the first is the default


def choices_of_products(module: PortableModule, watch: Stopwatch) -> tuple[Choice, ...]:
    """Measure the forms of the products of `module` on each target; the largest products first.

    Raises:
        UserError: a target cannot run on this machine.
        ToolchainError: IREE failed.
    """
    return tuple(choice for target in watch.targets for choice in _choices(module, target, watch))


def with_forms(target: Target, choices: Sequence[Choice | ChoiceSpec]) -> Target:
    """`target` with the chosen forms that are not the default; without any it is `target` as it was."""
    chosen = ((c.what, c.chosen) for c in choices if c.target == target.name and c.chosen != c.default)
    return replace(target, forms=tuple(sorted(chosen)))


def current(choices: Sequence[ChoiceSpec], module: PortableModule, target: Target) -> tuple[ChoiceSpec, ...]:
    """The choices of an artifact as they are for `target` now, with another version or on another CPU.

    A form that no longer exists becomes the default. A product that has no kernel of ours any more has no choice.
    """
    if not with_forms(target, choices).forms:
        return tuple(choices)
    names = {str(problem): forms for problem, forms in _problems(module, target).items()}
    return tuple(
        choice if choice.target != target.name or choice.chosen in names[choice.what] else _default(choice, names)
        for choice in choices
        if choice.target != target.name or choice.what in names
    )


def _default(choice: ChoiceSpec, names: Mapping[str, Names]) -> ChoiceSpec:
    default = names[choice.what][0]
    return replace(choice, chosen=default, default=default)


def _choices(module: PortableModule, target: Target, watch: Stopwatch) -> Iterator[Choice]:
    problems = _problems(module, target)
    watch.expect(len(problems))
    kept = {problem: known(watch.store, _key(problem, names, target), Measured) for problem, names in problems.items()}
    measured = {problem: times for problem, times in kept.items() if times}
    watch.budget.known += len(measured)
    missing = [problem for problem in problems if problem not in measured]
    for start in range(0, len(missing), _AT_ONCE):
        group = missing[start : start + _AT_ONCE]
        if watch.budget.is_spent:
            watch.budget.left_out += len(group)
            continue
        check_runs_here([target])
        what = f"{group[0]} and {len(group) - 1} more products" if group[1:] else str(group[0])
        with watch.budget.measuring(what, len(group)):
            measured |= _measured({p: problems[p] for p in group}, target)
        for problem in group:
            keep(watch.store, _key(problem, problems[problem], target), measured[problem])
    for problem, names in problems.items():
        if problem in measured:
            yield Choice.of(str(problem), measured[problem], names[0], target.name)


def _problems(module: PortableModule, target: Target) -> dict[ProductProblem, Names]:
    """The products that kernels of ours compute for `target`, with the names of their forms."""
    if MatmulKernels.name in target.disabled_passes:
        return {}
    with scratch_directory() as folder:
        source = folder / "step.mlirbc"
        source.write_bytes(module.bytecode)
        compilation = Compilation.of(source, target, (*COMMON_FLAGS, *target.flags), module.entry_points)
        if not MatmulKernels().applies(compilation.context):
            return {}
        with parsed(compilation.to_global_optimization()) as whole, ir.Location.unknown():
            found = forms_in(whole)
    return {problem: [*forms] for problem, forms in found.items() if problem.dtype in _DTYPES}


def _key(problem: ProductProblem, names: Names, target: Target) -> str:
    return key_of(str(problem), names, target)


def _measured(problems: Mapping[ProductProblem, Names], target: Target) -> dict[ProductProblem, Measured]:
    """The seconds of each form of each product. One module has one form of all products."""
    calls: dict[ProductProblem, dict[str, Call]] = {problem: {} for problem in problems}
    failed: dict[ProductProblem, dict[str, str]] = {problem: {} for problem in problems}
    for number in range(max(map(len, problems.values()))):
        forms = {problem: names[number] for problem, names in problems.items() if number < len(names)}
        made, reasons = built(lambda some: _compiled(some, target), forms)
        for problem, name in forms.items():
            if problem in made:
                calls[problem][name] = made[problem]
            else:
                failed[problem][name] = reasons[problem]
    return {p: fastest(problems[p][0], of_forms, failed[p]) for p, of_forms in calls.items()}


def _compiled(forms: Mapping[ProductProblem, str], target: Target) -> dict[ProductProblem, Call]:
    """Compile one module of products, each in a form, and load it."""
    functions = {f"product_{i}": problem for i, problem in enumerate(forms)}
    chosen = tuple((str(problem), name) for problem, name in forms.items())
    with scratch_directory() as folder:
        compiled = compile_module(products_of(functions), replace(target, forms=chosen), Path(folder))
    operands = {name: _operands(problem) for name, problem in functions.items()}
    calls = calls_of(compiled.vmfb, device_of(target), operands)
    return {problem: calls[name] for name, problem in functions.items()}


def _operands(problem: ProductProblem) -> list[torch.Tensor]:
    sizes = dict(problem.sizes)
    shapes = [[sizes[x] for x in letters] for letters in (problem.left, problem.right)]
    return [torch.empty(shape, dtype=_DTYPES[problem.dtype], device="meta") for shape in shapes]


def products_of(functions: Mapping[str, ProductProblem]) -> Program:
    """A program with a function for each product, by name; its operands have the layouts of the problem."""
    text = "\n".join(_function(name, problem) for name, problem in functions.items())
    with parsed(f"module @products {{\n{text}\n}}".encode()) as module:
        return Program(bytecode_of(module))


def _function(name: str, problem: ProductProblem) -> str:
    """A function of one product."""
    batched = "b" in dict(problem.sizes)
    letters = [f"b{x}" if batched else x for x in ("rk", "kc", "rc")]
    left, right, result = (_tensor(problem, x, "f32" if x == letters[2] else problem.dtype) for x in letters)
    one, other = (_tensor(problem, x, problem.dtype) for x in (problem.left, problem.right))
    product = "linalg.batch_matmul" if batched else "linalg.matmul"
    return f"""
func.func @{name}(%one: {one}, %other: {other}) -> {result} {{
  {_moved("%left", "%one", problem.left, letters[0], problem)}
  {_moved("%right", "%other", problem.right, letters[1], problem)}
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : {result}
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : {result}) -> {result}
  %product = {product} ins(%left, %right : {left}, {right}) outs(%zeros : {result}) -> {result}
  return %product : {result}
}}"""


def _moved(name: str, source: str, of_source: str, letters: str, problem: ProductProblem) -> str:
    """The operation that brings dimensions into the order of `letters`, and repeats an operand for each batch."""
    before, after = (_tensor(problem, x, problem.dtype) for x in (of_source, letters))
    axes = [f"d{i}" for i in range(len(letters))]
    read = ", ".join(axes[letters.index(x)] for x in of_source)
    every = ", ".join(axes)
    maps = f"[affine_map<({every}) -> ({read})>, affine_map<({every}) -> ({every})>]"
    kinds = ", ".join('"parallel"' for _ in axes)
    dtype = problem.dtype
    return f"""{name}_room = tensor.empty() : {after}
  {name} = linalg.generic {{indexing_maps = {maps}, iterator_types = [{kinds}]}}
      ins({source} : {before}) outs({name}_room : {after}) {{
  ^bb0(%in: {dtype}, %out: {dtype}):
    linalg.yield %in : {dtype}
  }} -> {after}"""


def _tensor(problem: ProductProblem, letters: str, dtype: str) -> str:
    sizes = dict(problem.sizes)
    return f"tensor<{'x'.join(str(sizes[x]) for x in letters)}x{dtype}>"
