"""Values that a trace knows: those of constants, of buffers that no step changes, and of what is computed from these.

A trace has tensors without values, so `torch.arange(3).tolist()` or a decision on a constant buffer would stop it. Here
each such tensor has a twin with its values. A call whose tensors all have twins runs on the twins, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from irongrad.diagnostics.source_lines import here
from irongrad.pipeline.capture.module_calls import around_calls
from irongrad.runtime.errors import CaptureError

LARGEST = 2**20  # the most elements of a twin

_READERS: frozenset[object] = frozenset(
    {
        *(getattr(Tensor, f"__{n}__") for n in ("bool", "int", "float", "complex", "index", "contains", "format")),
        *(getattr(Tensor, n) for n in ("item", "tolist", "numpy", "__array__", "is_nonzero", "equal", "allclose")),
        *(torch.equal, torch.allclose, torch.is_nonzero),
    }
)
# Functions whose results have shapes that depend on values.
_SHAPED_BY_VALUES: frozenset[object] = frozenset(
    {
        getattr(owner, name)
        for owner in (torch, Tensor)
        for name in ("nonzero", "argwhere", "unique", "unique_consecutive", "bincount")
        if hasattr(owner, name)
    }
    | {torch.repeat_interleave, Tensor.repeat_interleave, functional.one_hot}
)
# Functions whose results have values that depend on no argument but the last.
_BY_SHAPE: frozenset[object] = frozenset(
    {
        *(torch.ones_like, torch.zeros_like, torch.full_like),
        *(getattr(Tensor, n) for n in ("new_ones", "new_zeros", "new_full")),
    }
)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _UnknownError(Exception):
    """A call whose result is no constant."""


class _Constant(TorchDispatchMode):
    """While open, an operator that draws random numbers or leaves memory as it is raises `_UnknownError`."""

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ):
        name = func._schema.name.partition("::")[2]
        if torch.Tag.nondeterministic_seeded in func.tags or name.startswith(("empty", "new_empty", "resize")):
            raise _UnknownError
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Memory:
    """Memory that tensors of the trace share, while their twins follow it.

    Attributes:
        version: the version that it had after the last call that ran on the twins, too.
        buffers: paths of the buffers that its values come from.
    """

    version: int
    buffers: frozenset[str]


@dataclass(frozen=True)
class StateUse:
    """What the traces of a step's programs do with its state.

    Attributes:
        untrained: paths of parameters that no optimizer updates, which a program may write into.
        written: paths of the buffers and parameters that the programs so far write into.
        relied: for each buffer on whose values a trace relies, the user's line that does.
        watches: whether to watch which attributes the programs read and set.
        dropped: for each attribute that a program only sets, by its module's path and its name, the user's line.
        read: attributes that a program reads and has not set before.
    """

    untrained: frozenset[str] = frozenset()
    written: set[str] = field(default_factory=set)
    relied: dict[str, str] = field(default_factory=dict)
    watches: bool = False
    dropped: dict[tuple[str, str], str] = field(default_factory=dict)
    read: set[tuple[str, str]] = field(default_factory=set)

    def note_written(self, paths: Collection[str]) -> None:
        """Note that a program writes into state.

        Raises:
            CaptureError: a decision relied on the values of one of these at capture; names its line.
        """
        self.written.update(paths)
        for path in self.relied.keys() & self.written:
            raise CaptureError(
                f"{self.relied[path]}\n  a Python decision or number depends on the values of the buffer "
                f"{path.rpartition('.')[2]}, which the step changes. Write a decision with torch.where(condition, a, "
                "b), a mask, or torch.cond, and a place with indices: queue[(start + torch.arange(n)) % size] = rows"
            )


class KnownValues:
    """The twins of one traced call of `module`."""

    def __init__(self, module: nn.Module, use: StateUse) -> None:
        self._relied = use.relied
        self._buffers = {
            path: buffer
            for path, buffer in module.named_buffers()
            if path not in use.written and _has_values(buffer) and buffer.numel() <= LARGEST
        }
        self._is_open = False
        self._twins = WeakTensorKeyDictionary()
        self._memory: dict[int, _Memory] = {}

    @contextmanager
    def of_buffers(self, module: nn.Module) -> Iterator[None]:
        """While open, a call of `module`, which has tensors without values, knows those of its buffers.

        Outside of such a call, nothing is known: the inputs still have the values of the example.
        """

        def bind(module: nn.Module, inputs: object) -> None:
            self._is_open = True
            with _plainly():
                for path, buffer in module.named_buffers():
                    if path in self._buffers and isinstance(buffer, FakeTensor):
                        self._keep(buffer, self._buffers[path].detach().clone(), frozenset({path}))

        def close(module: nn.Module, inputs: object, output: object) -> None:
            self._is_open = False

        with around_calls(module, bind, close):
            yield

    def answer(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a function returns that reads values; NotImplemented if it reads none, or they are unknown."""
        if not self._is_open:
            return NotImplemented
        if function in _READERS:
            return self._read(function, args, kwargs)
        if function in _SHAPED_BY_VALUES or (function is torch.where and len(args) + len(kwargs) == 1):
            found = self._read(function, args, kwargs)
            return found if found is NotImplemented else tree_map_only(Tensor, self._constant, found)
        if function in (torch.masked_select, Tensor.masked_select):
            return self._select(*args, **kwargs)
        return NotImplemented

    def indices(self, key: Any) -> Any:
        """An index with each mask of known values replaced by indices."""
        keys = key if isinstance(key, tuple) else (key,)
        found: list[Any] = []
        for k in keys:
            places = self._read(torch.nonzero, (k,), {}) if _is_mask(k) else NotImplemented
            found += [k] if places is NotImplemented else self._places(places)
        return key if all(one is other for one, other in zip(found, keys, strict=False)) else tuple(found)

    def sources(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> frozenset[str] | None:
        """The buffers that the values of a call's result come from; None if some are unknown."""
        leaves = tree_leaves((args, kwargs))
        if self._is_open and function in _BY_SHAPE and not any(isinstance(leaf, Tensor) for leaf in leaves[1:]):
            leaves = leaves[1:]
        if not self._is_open or any(isinstance(leaf, _SYMBOLS) for leaf in leaves):
            return None
        found: frozenset[str] = frozenset()
        for tensor in (leaf for leaf in leaves if isinstance(leaf, Tensor)):
            if not self._has_twin(tensor):
                return None
            found |= self._memory[_memory_of(tensor)].buffers
        return found

    def follow(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        buffers: frozenset[str],
    ) -> None:
        """Run a call of the trace on the twins, too; `buffers` are its sources before the call."""
        results = [r for r in tree_leaves(result) if isinstance(r, Tensor)]
        if not (results or function is Tensor.__setitem__) or not all(map(_may_have_twin, results)):
            return
        try:
            twins = self._run(function, args, kwargs)
        except Exception:  # the trace goes on without
            return
        made = [t for t in tree_leaves(twins) if isinstance(t, Tensor)]
        if [t.shape for t in made] != [r.shape for r in results]:
            return
        for tensor, twin in zip(results, made, strict=True):
            self._keep(tensor, twin, buffers)
        for tensor in _tensors(args, kwargs) if function not in _BY_SHAPE else ():
            memory = self._memory[_memory_of(tensor)]
            if memory.version != tensor._version:
                self._memory[_memory_of(tensor)] = _Memory(tensor._version, memory.buffers | buffers)

    def _read(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        buffers = self.sources(function, args, kwargs)
        if buffers is None or not _tensors(args, kwargs):
            return NotImplemented
        found = self._run(function, args, kwargs)
        for path in buffers - self._relied.keys():
            self._relied[path] = here()
        return found.copy() if isinstance(found, np.ndarray) else found

    def _select(self, input: Tensor, mask: Tensor) -> Any:
        if mask.shape != input.shape or (places := self._read(torch.nonzero, (mask,), {})) is NotImplemented:
            return NotImplemented
        return input[tuple(self._places(places))]

    def _places(self, places: Tensor) -> list[Tensor]:
        """The columns of what nonzero returned, as tensors of the trace."""
        with _plainly():
            columns = places.unbind(1)
        return [self._constant(column) for column in columns]

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function in _BY_SHAPE:
            with _plainly():
                args = (torch.zeros(args[0].shape, dtype=args[0].dtype), *args[1:])
        else:
            args, kwargs = tree_map_only(Tensor, self._twins.__getitem__, (args, kwargs))
        with _plainly(), _Constant(), torch.no_grad():
            return function(*args, **kwargs)

    def _has_twin(self, tensor: Tensor) -> bool:
        """Whether a tensor has a twin, with its present values."""
        if tensor in self._twins:
            return bool(self._memory[_memory_of(tensor)].version == tensor._version)
        if not _is_constant(tensor):
            return False
        with _plainly():
            twin = tensor.detach().clone()
        self._keep(tensor, twin, frozenset())
        return True

    def _keep(self, tensor: Tensor, twin: Tensor, buffers: frozenset[str]) -> None:
        self._twins[tensor] = twin
        self._memory[_memory_of(tensor)] = _Memory(tensor._version, buffers)

    def _constant(self, values: Tensor) -> Tensor:
        """A tensor of the trace with known values."""
        with _plainly():
            numbers = values.tolist()
        made = torch.tensor(numbers, dtype=values.dtype).reshape(values.shape)
        self._keep(made, values, frozenset())
        return made


@contextmanager
def _plainly() -> Iterator[None]:
    """While open, functions of PyTorch run in eager, outside of the trace."""
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(_disable_current_modes())
        yield


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return [v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)]


def _memory_of(tensor: Tensor) -> int:
    storage: int = tensor.untyped_storage()._cdata
    return storage


def _may_have_twin(result: Tensor) -> bool:
    plain = isinstance(result, FakeTensor) and result.layout is torch.strided and result.device.type == "cpu"
    return plain and all(isinstance(size, int) for size in result.shape) and result.numel() <= LARGEST


def _has_values(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)


def _is_constant(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and not is_functorch_wrapped_tensor(tensor)
    return plain and _has_values(tensor) and tensor.is_leaf and not tensor.requires_grad


def _is_mask(index: object) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
