"""Run the user's own objects, and put every one of them back as it was.

A deep copy of a model loses what a user may have put on it: hooks, two tensors over one storage, a lambda over its own
layers, a bound method, tensors that are results of a computation. So an eager run takes the objects themselves. Their
tensors get other memory meanwhile, with the same values; all other state is recorded, and restored at the end.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from irongrad.diagnostics.source_lines import is_user_class, is_user_file
from irongrad.step.train_step import TrainStep

Generator: TypeAlias = torch.Generator | random.Random | np.random.RandomState | np.random.Generator

# Objects of the standard library hold locks, files and loggers; their state is not the step's.
_FOREIGN = frozenset(sys.stdlib_module_names)


@contextmanager
def borrowed(step: TrainStep, dtype: torch.dtype | None = None, *, in_place: bool = False) -> Iterator[Record]:
    """While open, the step's model, loss and optimizers may be run, trained and changed; on exit they are as before.

    Restored are: values, gradients and flags of tensors; attributes, lists, dictionaries and sets that the objects
    reach, those of hooks and enclosing functions included; globals that the user's functions name; the optimizer's
    state and groups; the states of random generators, PyTorch's, NumPy's and Python's own among them.

    Args:
        step: the step.
        dtype: the dtype that floating-point tensors have meanwhile; None for their own.
        in_place: whether tensors keep their memory, and get their values back at the end. Then a NumPy array over it
            sees what the step does, but no other thread may read it.

    Yields:
        What was recorded.
    """
    with unchanged(roots_of(step)) as record:
        for optimizer in step.optimizers if dtype is not None else ():
            _keep_epsilon(optimizer)
        record.keep_values() if in_place else record.lend_memory(dtype)
        yield record


def roots_of(step: TrainStep) -> tuple[object, ...]:
    """The objects of the user's that a run of a step may reach and change."""
    functions = [*(entry.function for entry in step.own_entries.values()), *(after.function for after in step.after)]
    carried = [c.leaves for c in (*step.carried, *(entry.carried for entry in step.own_entries.values()))]
    return (*carried, step.model, step.loss, *step.optimizers, step.scaler, *step.modules.values(), *functions)


@contextmanager
def unchanged(roots: Iterable[object]) -> Iterator[Record]:
    """While open, objects that `roots` reach may change, except values of tensors; on exit they are as before.

    Yields:
        What was recorded; its `lend_memory` lets tensors change, too.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    record = Record(roots)
    try:
        yield record
    finally:
        record.restore()
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@dataclass(frozen=True)
class Addition:
    """What a dictionary or a set got.

    Attributes:
        container: the dictionary or set.
        before: what it held.
        new: the new entries; a value of None, or a tensor of another shape or dtype, may have been there before.
    """

    container: Any
    before: Any
    new: Any

    def apply(self) -> None:
        """Add the entries."""
        self.container.update(self.new)

    def remove(self) -> None:
        """Take the entries out."""
        _refill(self.container, self.before)


class Record:
    """The state of all mutable objects that some objects reach.

    Attributes:
        tensors: the tensors among them, each once.
        generators: the random generators among them, each once.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self._roots = tuple(roots)
        self.tensors: list[torch.Tensor] = []
        self.generators: list[Generator] = []
        self._restore: list[Callable[[], object]] = []
        self._same: list[tuple[str | Callable[[], str], Callable[[], bool]]] = []
        self._held: list[tuple[Any, Any]] = []
        self._seen: dict[int, object] = {}  # the object keeps its id from being used again
        waiting = list(self._roots)
        while waiting:
            item = waiting.pop()
            if id(item) not in self._seen:
                self._seen[id(item)] = item
                waiting += self._reached(item)

    def restore(self) -> None:
        """Put everything back."""
        for restore in reversed(self._restore):  # a gradient may be set once its tensor has its own dtype again
            restore()

    def changed(self) -> str:
        """A recorded container, attribute or variable that changed since, in a few words; empty for none."""
        for description, is_same in self._same:
            if not is_same():
                return description() if callable(description) else description
        return ""

    def renewed(self) -> Record:
        """A record of the same objects as they are now."""
        return Record(self._roots)

    def values(self) -> Callable[[], None]:
        """Copy the values of all tensors; return a function that puts them back into the same memory."""
        tensors = [(t, t.data) for t in self.tensors if _has_memory(t)]
        memories = {t.untyped_storage()._cdata: t.untyped_storage() for t, _ in tensors}
        copies = [(memory, memory.clone()) for memory in memories.values()]

        def put_back() -> None:
            for tensor, data in tensors:
                if tensor.untyped_storage()._cdata != data.untyped_storage()._cdata:  # assigned to `.data`
                    tensor.data = data
            for memory, copy in copies:
                if memory.nbytes() != copy.nbytes():  # a buffer that the first call of an observer resizes
                    memory.resize_(copy.nbytes())
                memory.copy_(copy)

        return put_back

    def keep_values(self) -> None:
        """Have `restore` put back the values of all tensors, in the memory that they have now."""
        with torch.no_grad():
            for tensor in filter(_has_memory, self.tensors):
                self._restore.append(partial(_put_back, tensor, tensor.data, tensor.grad_dtype))
        self._restore.append(self.values())

    def additions(self) -> list[Addition]:
        """What dictionaries, attributes and sets got since, without changes of what they held."""
        found: list[Addition] = []
        for container, held in self._held:
            if isinstance(container, set):
                new: Any = container - held
            else:
                new = {k: _kept(v) for k, v in container.items() if _is_new(held.get(k), v)}
            if new:
                found.append(Addition(container, held, new))
        return found

    def lend_memory(self, dtype: torch.dtype | None) -> None:
        """Give all tensors other memory with the same values until `restore`; tensors that share memory go on to.

        Args:
            dtype: the dtype that floating-point tensors get; None for their own.
        """
        groups: dict[int, list[torch.Tensor]] = {}
        for tensor in self.tensors:
            if _has_memory(tensor):
                groups.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        with torch.no_grad():
            for group in groups.values():
                for tensor, lent in zip(group, _elsewhere(group, dtype), strict=True):
                    self._restore.append(partial(_put_back, tensor, tensor.data, tensor.grad_dtype))
                    _lend(tensor, lent)

    def _reached(self, item: object) -> Iterable[object]:
        """Record the state of one object; what it refers to."""
        if isinstance(item, torch.Tensor):
            return self._of_tensor(item)
        if isinstance(item, dict):
            held = dict(item)
            self._held.append((item, held))
            self._restore.append(partial(_refill, item, held))
            self._same.append((partial(_changed_entry, item, held), partial(_is_same, item, held)))
            return chain(held.values(), held)
        if isinstance(item, (list, deque, set, bytearray)):
            kept = item.copy()
            if isinstance(item, set):
                self._held.append((item, kept))
            self._restore.append(partial(_refill, item, kept))
            self._same.append((f"a {type(item).__name__}", partial(_is_same, item, kept)))
            return () if isinstance(kept, bytearray) else kept
        if isinstance(item, (tuple, frozenset)):
            return iter(item)  # its length, which a list would ask for, may be forbidden
        if isinstance(item, FunctionType):
            return self._of_function(item)
        if isinstance(item, MethodType):
            return item.__self__, item.__func__
        if isinstance(item, partial):
            return item.func, item.args, item.keywords
        if isinstance(item, type):
            return self._of_class(item)
        return self._of_object(item)

    def _of_tensor(self, tensor: torch.Tensor) -> Iterable[object]:
        self.tensors.append(tensor)
        if tensor.is_leaf:
            self._restore.append(partial(setattr, tensor, "grad", tensor.grad))
            if not is_lazy(tensor):
                self._restore.append(partial(tensor.requires_grad_, tensor.requires_grad))
        hooks = (getattr(tensor, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
        return vars(tensor), *hooks

    def _of_function(self, function: FunctionType) -> Iterable[object]:
        outside: list[object] = [function.__defaults__, function.__kwdefaults__, vars(function)]
        for cell in function.__closure__ or ():
            outside += self._of_cell(cell)
        if is_user_file(function.__code__.co_filename):
            names = [n for n in function.__code__.co_names if n in function.__globals__]
            held = {n: function.__globals__[n] for n in names}
            self._restore.append(partial(function.__globals__.update, held))
            for name, value in held.items():
                self._same.append((f"the global {name}", partial(_is_global, function, name, value)))
            outside += held.values()
        return outside

    def _of_cell(self, cell: CellType) -> Iterable[object]:
        try:
            held = cell.cell_contents
        except ValueError:  # a variable without a value yet
            return ()
        self._restore.append(partial(setattr, cell, "cell_contents", held))
        self._same.append(("a variable of an enclosing function", lambda: cell.cell_contents is held))
        return (held,)

    def _of_class(self, cls: type) -> Iterable[object]:
        """A user's class: its methods, and data that they may change, such as a counter."""
        if not is_user_class(cls) or issubclass(cls, Enum):  # an Enum's members cannot be assigned
            return ()
        own = dict(vars(cls))
        for name, value in own.items():
            if not name.startswith("__") and not callable(value) and not hasattr(value, "__get__"):
                self._restore.append(partial(setattr, cls, name, value))
                self._same.append((f"{cls.__qualname__}.{name}", partial(_is_attribute, cls, name, value)))
        return [v for n, v in own.items() if not n.startswith("__") or isinstance(v, FunctionType)]

    def _of_object(self, item: object) -> Iterable[object]:
        if isinstance(item, random.SystemRandom):  # it draws from the operating system, and has no state
            return ()
        for kind, state, restore in _GENERATORS:
            if isinstance(item, kind):
                self.generators.append(item)
                self._restore.append(partial(restore, item, state(item)))
                return ()
        if isinstance(item, np.ndarray):
            self._restore.append(partial(np.copyto, item, item.copy()) if item.flags.writeable else tuple)
            return ()
        if isinstance(item, ModuleType) or _is_foreign(type(item)):
            return ()
        slots = [n for cls in type(item).__mro__ for n in _slots(cls) if hasattr(item, n)]
        for name in slots:
            self._restore.append(partial(object.__setattr__, item, name, getattr(item, name)))
        return getattr(item, "__dict__", None), type(item), *(getattr(item, name) for name in slots)


def _is_foreign(cls: type) -> bool:
    """Whether a class is one of the standard library; one made by `exec` without a name says that it is a builtin."""
    module = cls.__module__
    if module.partition(".")[0] not in _FOREIGN or module == "__main__" or is_user_class(cls):
        return False
    return not (module == "builtins" and issubclass(cls, (nn.Module, torch.optim.Optimizer)))


def _is_new(before: object, now: object) -> bool:
    if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor) and not isinstance(before, nn.Parameter):
        return (before.shape, before.dtype) != (now.shape, now.dtype)
    return before is None and now is not None


def _kept(value: object) -> object:
    """A value without the computation that it comes from."""
    return value.detach() if isinstance(value, torch.Tensor) and not value.is_leaf else value


def _lend(tensor: torch.Tensor, lent: torch.Tensor) -> None:
    """Give `tensor` the memory and the dtype of `lent`; a gradient from before gets the dtype, too."""
    gradient = tensor.grad if tensor.is_leaf else None
    if gradient is not None and lent.dtype != tensor.dtype:
        tensor.grad = None
    tensor.data = lent
    if tensor.requires_grad:
        tensor.grad_dtype = lent.dtype
        if gradient is not None and tensor.grad is None:
            tensor.grad = gradient.to(lent.dtype)


def _put_back(tensor: torch.Tensor, data: torch.Tensor, grad_dtype: torch.dtype | None) -> None:
    tensor.grad = None
    tensor.data = data
    if tensor.requires_grad:
        tensor.grad_dtype = grad_dtype


def _slots(cls: type) -> Iterable[str]:
    names = vars(cls).get("__slots__", ())
    return [n for n in ((names,) if isinstance(names, str) else names) if n not in ("__dict__", "__weakref__")]


def _is_same(container: Any, held: Any) -> bool:
    return _parts(container) == _parts(held)


def _changed_entry(container: dict[Any, Any], held: dict[Any, Any]) -> str:
    changed = [k for k in {**held, **container} if container.get(k) is not held.get(k)]
    key = f" ({changed[0]})" if changed and isinstance(changed[0], str) else ""
    return f"a dictionary or an attribute{key}"


def _is_global(function: FunctionType, name: str, value: object) -> bool:
    return function.__globals__.get(name) is value


def _is_attribute(cls: type, name: str, value: object) -> bool:
    return vars(cls).get(name) is value


def _refill(container: Any, held: Any) -> None:
    """Put back what was in a container, unless nothing changed: another thread may be reading it."""
    if _is_same(container, held):
        return
    if isinstance(container, (list, bytearray)):
        container[:] = held
        return
    container.clear()
    (container.extend if isinstance(container, deque) else container.update)(held)


def _parts(container: Any) -> list[Any]:
    """The identities of what a container holds, in order; a copy of a set has another order."""
    items = container.items() if isinstance(container, dict) else ((item,) for item in container)
    parts = [tuple(map(id, item)) for item in items]
    return sorted(parts) if isinstance(container, set) else parts


def state_of(generator: Generator) -> object:
    """The state of a random generator, in its own form."""
    return next(state(generator) for kind, state, _ in _GENERATORS if isinstance(generator, kind))


_GENERATORS: tuple[tuple[type, Callable[[Any], Any], Callable[[Any, Any], object]], ...] = (
    (torch.Generator, lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    (random.Random, lambda g: g.getstate(), lambda g, state: g.setstate(state)),
    (np.random.RandomState, lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    (
        np.random.Generator,
        lambda g: g.bit_generator.state,
        lambda g, state: setattr(g.bit_generator, "state", state),
    ),
)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own that can be exchanged; a result of a computation is computed again."""
    plain = tensor.layout is torch.strided and tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)
    return plain and tensor.is_leaf and not tensor.is_inference() and not is_lazy(tensor)


def _elsewhere(group: list[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Tensors like those of `group`, which share one storage, over one new storage with the same values."""
    dtypes = {t.dtype for t in group}
    old = group[0].untyped_storage()
    if dtype is not None and len(dtypes) == 1 and group[0].is_floating_point():
        (own,) = dtypes
        whole = torch.empty(0, dtype=own).set_(old, 0, (old.nbytes() // own.itemsize,), (1,))
        new = whole.to(dtype, copy=True).untyped_storage()
        return [torch.empty(0, dtype=dtype).set_(new, t.storage_offset(), t.shape, t.stride()) for t in group]
    new = old.clone()
    return [torch.empty(0, dtype=t.dtype).set_(new, t.storage_offset(), t.shape, t.stride()) for t in group]


def _keep_epsilon(optimizer: torch.optim.Optimizer) -> None:
    """Have Adafactor use the epsilon of the compiled step's dtype: None means that of the parameters' dtype."""
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.Adafactor) and group["eps"][0] is None:
            group["eps"] = (torch.finfo(group["params"][0].dtype).eps, group["eps"][1])
