"""`PlacedModule`: the modules of the parts of a step, each on its device, which run the entry points together."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import iree.runtime as ireert
import numpy as np

from irongrad.runtime.arguments import as_array, as_input
from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import GuardError, UserError
from irongrad.runtime.loaded_module import LoadedModule, refused_call
from irongrad.runtime.manifest import (
    COUNT,
    OF_GRADIENTS,
    OF_STATE,
    Call,
    EntryPoint,
    Manifest,
    PartSpec,
    PlacementSpec,
    TensorSpec,
)
from irongrad.runtime.ranks.exchange import Exchange
from irongrad.runtime.safetensors_file import numpy_dtype


@dataclass(frozen=True)
class Held:
    """A value on the device of a part.

    Attributes:
        view: the buffer.
        module: the part's module.
        spec: the shape and dtype.
    """

    view: Any
    module: LoadedModule
    spec: TensorSpec

    def on(self, module: LoadedModule) -> Any:
        """The value as an argument of `module`: the buffer itself on its own device, else an array of the host."""
        return self.view if module is self.module else self.on_host()

    def on_host(self) -> Array:
        """Copy the value to the host."""
        return self.module.to_host(self.view, self.spec)


class PlacedModule:
    """The modules of the parts of a step; its methods are those of `LoadedModule`.

    A call runs the segments of its entry point one after the other. What a segment gives stays on its device, and is
    copied through the host if another device reads it.

    Attributes:
        driver: the driver of the first part's device.
        is_local: whether all devices are the CPU.
        lock: held during a call.
        exchange: None: the ranks of a placed step exchange nothing.
    """

    def __init__(self, manifest: Manifest, placement: PlacementSpec, modules: Sequence[LoadedModule]) -> None:
        self.lock = threading.RLock()
        self.exchange: Exchange | None = None
        self.driver = modules[0].driver
        self.is_local = all(module.is_local for module in modules)
        self._manifest, self._placement = manifest, placement
        self._modules = {part.name: module for part, module in zip(placement.parts, modules, strict=True)}
        self._accumulated = 0

    def attach(self, exchange: Exchange) -> None:
        """Refuse ranks.

        Raises:
            UserError: always.
        """
        raise UserError("the parts of a placed step exchange nothing with other ranks")

    def refuse_overwritten_state(self) -> None:
        """See `LoadedModule`."""
        for module in self._modules.values():
            module.refuse_overwritten_state()

    def close(self) -> None:
        """See `LoadedModule`."""
        for module in self._modules.values():
            module.close()

    def run(self, entry: EntryPoint, values: Sequence[Any]) -> list[Any]:
        """As `LoadedModule.run`, with the outputs as arrays of the host."""
        return self.call(entry, values)

    def call(
        self, entry: EntryPoint, values: Sequence[Any], wanted: Container[str] | None = None, *, copies: bool = True
    ) -> list[Array]:
        """See `LoadedModule`."""
        with self.lock:
            if entry.name in self._placement.programs:
                found = self._run(entry, values)
            else:
                found = self._of_state(entry, values, wanted, copies)
            specs = [s for s in entry.outputs if wanted is None or s.name in wanted]
            return [v.on_host() if isinstance(v := found[s.name], Held) else v for s in specs]

    def on_device(self, array: Any) -> ireert.DeviceArray:
        """Copy an array to the device of the first part."""
        return self._modules[self._placement.parts[0].name].on_device(array)

    def _run(self, entry: EntryPoint, values: Sequence[Any]) -> dict[str, Any]:
        """Run the calls of an entry point; return its outputs by name."""
        names = [*(s.name for s in entry.inputs), *entry.hypers]
        known = dict(zip(names, (_on_host(v) for v in values), strict=True))
        for spec in entry.inputs:
            known[spec.name] = checked_input(entry, spec, known[spec.name])
        if entry.name == "apply_step" and not self._accumulated:
            raise GuardError("apply_step: no gradients are accumulated; call grad_step first")
        known[COUNT] = float(self._accumulated)
        for call in self._placement.programs[entry.name]:
            known |= called(self._modules[call.part], entry, call, known)
        if entry.name == "grad_step":
            self._accumulated += 1
        if entry.name == "apply_step":
            self._accumulated = 0
            for part in self._placement.parts:
                clear_gradients(self._modules[part.name], self._manifest, part)
        return known

    def _of_state(
        self, entry: EntryPoint, values: Sequence[Any], wanted: Container[str] | None, copies: bool
    ) -> dict[str, Any]:
        """Call an entry point of the state on every part; return its outputs by name."""
        given = {s.name: v for s, v in zip(entry.inputs, values, strict=True)}
        found: dict[str, Any] = {}
        for part, own in self._own(entry):
            needed = [_on_host(given[s.name]) for s in own.inputs]
            arrays = self._modules[part].call(own, needed, wanted, copies=copies)
            names = (s.name for s in own.outputs if wanted is None or s.name in wanted)
            found = dict(zip(names, arrays, strict=True)) | found  # a counter is the same on all parts
        if entry.name == OF_GRADIENTS[1]:
            self._accumulated = int(given["count"])
        if entry.name in OF_GRADIENTS:
            found["count"] = np.array(self._accumulated, np.int64)
        if entry.name == "reset":
            self._accumulated = 0
        return found

    def _own(self, entry: EntryPoint) -> Iterator[tuple[str, EntryPoint]]:
        """The entry point of each part, with those of the inputs and outputs that the part holds."""
        for part in self._placement.parts:
            yield part.name, _of_part(entry, part)


def _of_part(entry: EntryPoint, part: PartSpec) -> EntryPoint:
    """An entry point of the state, with those of its inputs and outputs that a part holds."""
    held = {*(part.state if entry.name in OF_STATE else part.gradients), "count", "steps"}
    inputs = tuple(s for s in entry.inputs if s.name in held)
    outputs = tuple(s for s in entry.outputs if s.name in held)
    return EntryPoint(entry.name, inputs, (), outputs, entry.summary)


def clear_gradients(module: LoadedModule, manifest: Manifest, part: PartSpec) -> None:
    """Reset the accumulated gradients of a part to zero."""
    specs = {s.name: TensorSpec(s.name, s.dtype, s.shape) for s in manifest.state}
    count = TensorSpec("count", "int64", ())
    inputs = (*(specs[name] for name in part.gradients), count)
    zeros = [np.zeros(tuple(map(int, s.shape)), numpy_dtype(s.dtype)) for s in inputs]
    module.call(EntryPoint(OF_GRADIENTS[1], inputs, (), (count,), ""), zeros)


def called(module: LoadedModule, entry: EntryPoint, call: Call, known: Mapping[str, Any]) -> dict[str, Held]:
    """Run a call of the entry point `entry` on the values in `known`; return its outputs by name.

    Raises:
        GuardError: the module refuses a value.
    """
    given = [known[name] for name in (*(s.name for s in call.entry.inputs), *call.entry.hypers)]
    try:
        views = module.run(call.entry, [v.on(module) if isinstance(v, Held) else v for v in given])
    except GuardError as error:
        raise refused_call(entry, error.reason) from error
    return {s.name: Held(view, module, s) for s, view in zip(call.entry.outputs, views, strict=True)}


def _on_host(value: Any) -> Any:
    return value.to_host() if isinstance(value, ireert.DeviceArray) else value


def checked_input(entry: EntryPoint, spec: TensorSpec, value: Any) -> Array:
    """An input as an array; no segment runs before all inputs have the right shapes and dtypes.

    Raises:
        GuardError: names the input.
    """
    array = as_array(as_input(entry, spec, value))
    if tuple(array.shape) != spec.shape or str(array.dtype) != spec.dtype:
        found = f"{array.dtype}[{', '.join(map(str, array.shape))}]"
        raise GuardError(f"{entry.symbol}: {spec.name} is {found}; expected {entry.signature}")
    return array
