"""Refuse the side effects of a captured forward: changes to Python state, to inputs and to constants.

A side effect on a Python object happens once, at capture, and in no compiled step. torch.export restores module
attributes at its end. So they are compared before and after the model's own call, while the export runs.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, NoReturn, TypeGuard
from unittest import mock

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from irongrad.diagnostics.advice import KEEP_SHAPE, ONLY_THE_OPTIMIZER, VALUES_AS_SHAPE
from irongrad.diagnostics.source_lines import here, is_user_class, is_user_file, line_of, where
from irongrad.graph.flat_graph import FlatGraph
from irongrad.pipeline.capture.attributes import Attributes
from irongrad.pipeline.capture.known_values import StateUse
from irongrad.pipeline.capture.module_calls import around_calls
from irongrad.pipeline.capture.python_values import NUMBERS, fingerprint, has_hidden_state
from irongrad.runtime.errors import CaptureError, UnsupportedOpError, UserError

_INTERNAL = frozenset(vars(nn.Module()))

# (module path or location of a function, name) -> a fingerprint that changes when the named value changes.
_Snapshot = dict[tuple[str, str], object]


class ChangedAttributeError(CaptureError):
    """A call changes an attribute, and what it reads was not watched."""


@contextmanager
def refused(module: nn.Module, use: StateUse) -> Iterator[None]:
    """While open, a call of `module` that changes a plain Python value of the user's code raises CaptureError.

    If attributes are watched, one that calls only set is put back instead: no call reads what an earlier one left.
    """
    before: list[_Snapshot] = []
    attributes = Attributes()

    def record(module: nn.Module, inputs: object) -> None:
        before.append(_python_state(module))
        attributes.start(_owners(module, _reached(module)[1]).values())

    def compare(module: nn.Module, inputs: object, output: object) -> None:
        _check_unchanged(module, before.pop(), attributes, use)

    watched = attributes.watched(_owners(module, _reached(module)[1]).values())
    with around_calls(module, record, compare), watched if use.watches else nullcontext():
        yield


@contextmanager
def backward_refused(
    caller: str = "the model or the loss", instead: str = "Return the sum of the losses instead"
) -> Iterator[None]:
    """While open, a call of `backward()` raises CaptureError, with its `caller` and what to do `instead`."""

    def backward(*args: object, **kwargs: object) -> NoReturn:
        raise CaptureError(
            f"{here()}\n  {caller} calls backward() itself, and the compiled step has one backward, from the loss. "
            f"{instead}"
        )

    with mock.patch.object(torch.autograd, "backward", backward):
        yield


@contextmanager
def assignments_as_updates(module: nn.Module) -> Iterator[None]:
    """While open, an assignment to a buffer in `module` (`self.mean = 0.9 * self.mean`) is a write into that buffer.

    torch.export drops the assignment of a buffer, and keeps an in-place write.

    Raises:
        CaptureError: the assigned tensor has another shape or dtype than the buffer.
    """
    before: list[dict[tuple[str, str], torch.Tensor | None]] = []

    def record(module: nn.Module, inputs: object) -> None:
        before.append({(p, n): b for p, m in module.named_modules() for n, b in m._buffers.items()})

    def write(module: nn.Module, inputs: object, output: object) -> None:
        """Copy a tensor that the forward assigned to a buffer into the buffer itself."""
        modules = dict(module.named_modules())
        assigned = {
            (path, name): (old, new)
            for (path, name), old in before.pop().items()
            if (new := modules[path]._buffers.get(name)) is not old
        }
        values: list[tuple[torch.Tensor, torch.Tensor]] = []
        for (path, name), (old, new) in assigned.items():
            if old is None or new is None or (old.shape, old.dtype) != (new.shape, new.dtype):
                raise CaptureError(
                    f"{_line_that_changes(name, module)}: the buffer {name} is assigned a tensor of another shape or "
                    "dtype. State keeps its shape and dtype; convert the new value, or create the buffer with that "
                    "shape and dtype"
                )
            # A new value may lie in the memory of another buffer that is assigned, too: self.a, self.b = self.b, self.a
            values.append((old, new.detach().clone() if len(assigned) > 1 else new.detach()))
            modules[path]._buffers[name] = old
        for old, value in values:
            old.copy_(value)

    with around_calls(module, record, write):
        yield


def _python_state(module: nn.Module) -> _Snapshot:
    """Plain values that the user's forwards could change: attributes, globals and variables of enclosing functions."""
    state: _Snapshot = {}
    functions, objects = _reached(module)
    for path, owner in _owners(module, objects).items():
        if is_user_class(type(owner)):
            own = {n: v for n, v in vars(owner).items() if n not in _INTERNAL}
            state |= {(path, n): fingerprint(v) for n, v in (_of_class(type(owner)) | own).items()}
        elif type(owner).__module__.startswith("torch."):  # a layer whose settings a forward may change
            plain = {n: v for n, v in vars(owner).items() if n not in _INTERNAL and isinstance(v, NUMBERS)}
            state |= {(path, n): fingerprint(v) for n, v in plain.items()}
    for function in functions:
        state |= {(where(function), n): fingerprint(v) for n, v in _outside(function)}
    return state


def _owners(module: nn.Module, objects: Iterable[object]) -> dict[str, Any]:
    """What has attributes that a call may change, by a path: the submodules, and other objects of the user's."""
    own = {f"<{type(o).__qualname__} {number}>": o for number, o in enumerate(objects)}
    return {**dict(module.named_modules()), **own}


def _outside(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Plain values outside of a function that it names, those of the user's classes among them, and its own."""
    for name, value in _outer_values(function).items():
        if _may_change(value):
            yield name, value
        elif isinstance(value, type) and is_user_class(value):
            yield from ((f"{name}.{n}", v) for n, v in _of_class(value).items())
    yield from ((f"{function.__name__}.{n}", v) for n, v in vars(function).items() if _may_change(v))
    defaults = {p.name: p.default for p in inspect.signature(function).parameters.values()}
    yield from ((n, v) for n, v in defaults.items() if _may_change(v))


def _of_class(kind: type) -> dict[str, object]:
    """Plain values that a class of the user's holds itself, or a class of the user's that it extends."""
    held = {n: v for cls in reversed(kind.__mro__) if is_user_class(cls) for n, v in vars(cls).items()}
    return {n: v for n, v in held.items() if _may_change(v) and not n.startswith("__")}


def _check_unchanged(module: nn.Module, before: _Snapshot, attributes: Attributes, use: StateUse) -> None:
    after = _python_state(module)
    owners = _owners(module, _reached(module)[1])
    for path, name in after:
        if (path, name) in before and before[path, name] == after[path, name]:
            continue
        line = _line_that_changes(name.rpartition(".")[2], module)
        if path in owners and attributes.is_only_set(owners[path], name):
            attributes.put_back(owners[path], name)
            use.dropped[path, name] = line
        else:
            raise _changes(line, f"self.{name}" if path in owners else name, of_owner=path in owners, use=use)
    names = {id(m): path for path, m in owners.items()}
    use.read.update((names[number], name) for number, name in attributes.read() if number in names)
    for path, name in use.dropped.keys() & use.read:
        raise _changes(use.dropped[path, name], f"self.{name}", of_owner=True, use=use)


def _changes(line: str, spelled: str, *, of_owner: bool, use: StateUse) -> CaptureError:
    kind = ChangedAttributeError if of_owner and not use.watches else CaptureError
    return kind(
        f"{line}: running the step changes {spelled}, a Python value. That would happen once, at capture, and in no "
        "compiled step. Keep such state in a buffer (self.register_buffer) and update it in place, or return it"
    )


_PLAIN = (bool, int, float, str, list, dict, set, deque)


def _may_change(value: object) -> bool:
    """Whether a value outside of a function is one that the function may change."""
    return isinstance(value, _PLAIN) or has_hidden_state(value)


def plain_values_outside(function: Callable[..., Any]) -> dict[str, object]:
    """Fingerprints of plain values that a user's function names: globals, and variables of enclosing functions."""
    inner = inspect.unwrap(function)
    if not isinstance(inner, FunctionType):
        return {}
    return {n: fingerprint(v) for n, v in _outer_values(inner).items() if _may_change(v)}


def _functions(module: nn.Module) -> list[FunctionType]:
    """The user's functions that a call of `module` may run: methods, hooks, the loss, and functions that they name."""
    return _reached(module)[0]


def _reached(module: nn.Module) -> tuple[list[FunctionType], list[object]]:
    """The user's functions that a call of `module` may run, and objects of the user's classes that these may change."""
    functions: dict[int, FunctionType] = {}
    objects: dict[int, object] = {}
    queue: list[object] = []
    for submodule in module.modules():
        queue += [*submodule._forward_pre_hooks.values(), *submodule._forward_hooks.values()]
        queue += [v for v in vars(submodule).values() if callable(v) and not isinstance(v, type)]
        queue += [f for n, f in vars(type(submodule)).items() if n != "__init__"]
    while queue:
        item = queue.pop()
        if isinstance(item, MethodType):
            queue += [item.__self__, item.__func__]
        elif isinstance(item, partial):
            queue += [item.func, *item.args, *item.keywords.values()]
        elif isinstance(item, FunctionType):
            function = inspect.unwrap(item)
            if not isinstance(function, FunctionType):  # torch.compile wraps modules so
                queue.append(function)
            elif id(function) not in functions and is_user_file(function.__code__.co_filename):
                functions[id(function)] = function
                queue += _outer_values(function).values()
        elif _has_attributes(item) and id(item) not in objects:
            objects[id(item)] = item
            queue += [f for n, f in vars(type(item)).items() if n != "__init__" and isinstance(f, FunctionType)]
    return list(functions.values()), list(objects.values())


def _has_attributes(item: object) -> bool:
    """Whether an object of the user's own class keeps its state in attributes, which only its methods change."""
    foreign = isinstance(item, (type, nn.Module, torch.Tensor, torch.optim.Optimizer))
    return not foreign and is_user_class(type(item)) and hasattr(item, "__dict__")


def _outer_values(function: FunctionType) -> dict[str, object]:
    """What `function` names: globals, variables of enclosing functions, and what other modules of the user's hold."""
    found = {n: function.__globals__[n] for n in function.__code__.co_names if n in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
    for module in (v for v in [*found.values(), *map(sys.modules.get, function.__code__.co_names)] if _is_users(v)):
        own = {n: vars(module)[n] for n in function.__code__.co_names if n in vars(module)}
        found |= {f"{module.__name__}.{n}": v for n, v in own.items()}
    return found


def _is_users(value: object) -> TypeGuard[ModuleType]:
    return isinstance(value, ModuleType) and is_user_file(getattr(value, "__file__", None) or "")


def _line_that_changes(name: str, module: nn.Module) -> str:
    writes = re.compile(
        rf"\b{re.escape(name)}(\.\w+|\[[^\]]*\])*\s*"
        r"([+\-*/%|&^]?=(?!=)|//=|\*\*=|\.(append|extend|insert|add|update|pop|popleft|remove|clear|setdefault|discard)\()"
    )
    functions = _functions(module)
    for function in functions:
        try:
            lines, start = inspect.getsourcelines(function)
        except OSError:
            continue
        for offset, line in enumerate(lines):
            if writes.search(line) and not line.lstrip().startswith("def "):  # a default is no change
                return f"{function.__code__.co_filename}:{start + offset}: {line.strip()}"
    return where(functions[0]) if functions else where(module)


# --- the exported graph -------------------------------------------------------------------------------------------


def check_graph(program: ExportedProgram, untrained: Collection[str] = ()) -> None:
    """Refuse numbers and shapes that depend on values, and writes into anything but state.

    Args:
        program: the exported program.
        untrained: paths of parameters that no optimizer updates; they are state like buffers.

    Raises:
        CaptureError: a number is taken from a tensor's values, or an input, a trained parameter or a constant is
            written in place; names the user's line.
        UnsupportedOpError: a shape depends on a tensor's values; names the user's line.
    """
    for node in FlatGraph(program.graph_module).nodes:
        if isinstance(node.target, torch._ops.OpOverload) and free_unbacked_symbols(node.meta.get("val")):
            raise _unknown(node)
    for node, spec in _writes(program):
        _check_write(node, spec, untrained)


def written_state(program: ExportedProgram) -> frozenset[str]:
    """The paths of the buffers and parameters that `program` writes into."""
    return frozenset(written_lines(program))


def written_lines(program: ExportedProgram) -> dict[str, str]:
    """The paths of the buffers and parameters that `program` writes into, each with the first line that does."""
    state = (InputKind.PARAMETER, InputKind.BUFFER)
    lines: dict[str, str] = {}
    for node, spec in _writes(program):
        if spec.kind in state:
            lines.setdefault(str(spec.target), line_of(node))
    return lines


def _writes(program: ExportedProgram) -> Iterator[tuple[torch.fx.Node, InputSpec]]:
    """The operators that write into an argument of the program, each with that argument."""
    specs = {s.arg.name: s for s in program.graph_signature.input_specs if hasattr(s.arg, "name")}
    graph = FlatGraph(program.graph_module)
    source: dict[object, InputSpec] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and graph.origins(node) == [node]:
            source[node] = specs[node.name]
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        arguments = zip(node.args, node.target._schema.arguments, strict=False)
        tensors = [t for a, schema in arguments if _is_written(schema) for t in (a if isinstance(a, list) else [a])]
        written = [origin for tensor in tensors for origin in graph.origins(tensor)]
        yield from ((node, source[w]) for w in written if w in source)
        first = node.args[0] if node.args and not isinstance(node.args[0], list) else None
        of_first = [source[o] for o in graph.origins(first) if o in source]
        if (node.target.is_view or written) and of_first:
            source[node] = of_first[0]


def _unknown(node: torch.fx.Node) -> UserError:
    if any(user.target is torch.ops.aten.select.int for user in node.users):
        return CaptureError(
            f"{line_of(node)}\n  a tensor of no dimensions is used as an index (x[i]), and torch.export takes its "
            "value out as a number, which is not known at compile time. Write x[i.reshape(1)].squeeze(0)"
        )
    if not any(isinstance(v, torch.Tensor) for v in tree_leaves(node.meta["val"])):  # torch.where(mask) gives a tuple
        return CaptureError(
            f"{line_of(node)}\n  a tensor's value is taken out as a number (.item(), int(), float()), which is not "
            "known at compile time. Keep it a tensor: arithmetic takes a tensor of no dimensions wherever it takes a "
            "number"
        )
    return UnsupportedOpError(f"{line_of(node)}\n  {node.target}: {VALUES_AS_SHAPE} {KEEP_SHAPE}")


def _is_written(argument: torch._C.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _check_write(node: torch.fx.Node, spec: InputSpec, untrained: Collection[str]) -> None:
    if spec.kind is InputKind.BUFFER or spec.target in untrained:
        return
    name = str(spec.target).split(".")[-1]
    if node.target is torch.ops.aten.embedding_renorm_.default:
        raise CaptureError(
            f"{line_of(node)}\n  max_norm of this embedding rescales rows of the parameter {name} in the forward. "
            f"{ONLY_THE_OPTIMIZER}: leave max_norm out, and rescale the rows that were looked up"
        )
    instead = (
        "Register it with self.register_buffer(...) in __init__. If a module beside the model holds it, name that "
        "module in TrainStep.modules"
    )
    what, instead = {
        InputKind.USER_INPUT: ("an input of the step", "Make a new tensor: x = x * 2 in place of x.mul_(2)"),
        InputKind.PARAMETER: (
            f"the parameter {name}, in place or through .data",
            ONLY_THE_OPTIMIZER,
        ),
    }.get(spec.kind, (f"the constant tensor {name}", instead))
    raise CaptureError(f"{line_of(node)}\n  {node.target} writes into {what}. {instead}")
