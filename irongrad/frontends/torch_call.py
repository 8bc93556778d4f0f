"""Call a compiled function on PyTorch's tensors in the same process."""

from __future__ import annotations

import atexit
import functools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from iree import runtime as ireert

from irongrad.graph.dtypes import to_numpy
from irongrad.pipeline.assemble.assemble import AssembledModule
from irongrad.runtime.calls import invoke
from irongrad.runtime.errors import GuardError
from irongrad.runtime.manifest import SCOPE
from irongrad.runtime.memory import keep_freed_memory
from irongrad.runtime.stacks import give_workers_stack
from irongrad.runtime.status import reason
from irongrad.runtime.vm_instance import open_device, vm_instance

# In bytes. IREE 3.13.0 only imports host memory that begins at a multiple of this (runtime/src/iree/hal/buffer_heap.c).
ALIGNMENT = 64

_DEVICE = "local-task"


@dataclass(frozen=True)
class TensorLike:
    """The layout that a result must have.

    Attributes:
        shape: its sizes.
        stride: its strides, in elements.
        dtype: its dtype.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLike:
        """The layout of `tensor`, which may be a fake tensor."""
        return cls(tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), tensor.dtype)


class TorchCall:
    """The entry point `call` of a module, on a device that all calls of the process share.

    Arguments are read in place: the module copies an argument that it would overwrite. Results are copied, with the
    strides of eager's results, because two results may share a buffer, or lie in one that the module keeps. Threads may
    share a call; it runs one of them at a time, until its results are copied (`irongrad.runtime.loaded_module`).
    """

    def __init__(self, module: AssembledModule, vmfb: bytes, results: Sequence[TensorLike]) -> None:
        self._constants = [to_numpy(t.initial).reshape(-1).view(np.uint8) for t in module.graph.state]
        index = ireert.ParameterIndex()
        for tensor, constant in zip(module.graph.state, self._constants, strict=True):
            index.add_buffer(tensor.name, constant)
        instance, self._device = _runtime()
        parameters = ireert.create_io_parameters_module(instance, index.create_provider(scope=SCOPE))
        loaded = ireert.VmModule.copy_buffer(instance, vmfb)
        hal = ireert.create_hal_module(instance, self._device)
        self._context = ireert.VmContext(instance, modules=[hal, parameters, loaded])
        self._function = loaded.lookup_function("call")
        self._results = tuple(results)
        self._lock = threading.Lock()
        _LIVE.add(self)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the module on `tensors`, and return its results.

        Raises:
            GuardError: an index is out of range.
        """
        arguments = ireert.VmVariantList(len(tensors))
        aligned = [_importable(t) for t in tensors]
        for tensor in aligned:
            arguments.push_ref(self._device.from_dlpack_capsule(torch.utils.dlpack.to_dlpack(tensor)))
        results = ireert.VmVariantList(len(self._results))
        with self._lock:
            try:
                invoke(self._context, _DEVICE, self._function, arguments, results)
            except Exception as error:
                raise GuardError(f"torch.compile: {reason(error)}") from error
            return [self._copied(results, i, like) for i, like in enumerate(self._results)]

    def _copied(self, results: Any, index: int, like: TensorLike) -> torch.Tensor:
        view = results.get_as_object(index, ireert.HalBufferView)
        copy = torch.empty_strided(like.shape, like.stride, dtype=like.dtype)
        if not copy.numel():
            return copy
        size = view.get_buffer().byte_length()
        host = torch.frombuffer(view.map().asarray([size], np.dtype(np.uint8)), dtype=torch.uint8)
        return copy.copy_(host[: copy.numel() * copy.element_size()].view(like.dtype).reshape(like.shape))


def _importable(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy if IREE cannot read it in place."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain if plain.data_ptr() % ALIGNMENT == 0 else plain.clone()


_LIVE: weakref.WeakSet[TorchCall] = weakref.WeakSet()


@functools.cache
def _runtime() -> tuple[Any, Any]:
    """The instance and the device of this process."""
    keep_freed_memory()
    give_workers_stack()
    atexit.register(_release)
    return vm_instance(), open_device(_DEVICE)


def _release() -> None:
    """Release IREE before the interpreter exits.

    Dynamo keeps compiled functions alive, and nanobind would report them as leaks.
    """
    for call in _LIVE:
        vars(call).clear()
    _runtime.cache_clear()
