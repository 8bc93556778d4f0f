"""`LoadedModule`: a compiled module and its state on a device, which runs one call at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Container, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import iree.runtime as ireert
import numpy as np

from irongrad.runtime import forks
from irongrad.runtime.arguments import as_array, as_input
from irongrad.runtime.arrays import Array
from irongrad.runtime.calls import invoke
from irongrad.runtime.devices import driver_of, is_local
from irongrad.runtime.errors import ArtifactError, GuardError, UserError
from irongrad.runtime.manifest import BASE_SCOPE, SCOPE, EntryPoint, TensorSpec
from irongrad.runtime.memory import prefer_large_pages
from irongrad.runtime.ranks.exchange import Exchange
from irongrad.runtime.status import reason
from irongrad.runtime.transfer import to_device, to_host
from irongrad.runtime.vm_instance import open_device, vm_instance

# IREE tells the format of a parameter file by the end of its name; a checkpoint may have any name.
_IRPA, _SAFETENSORS = "irpa", "safetensors"


def refused_call(entry: EntryPoint, why: str) -> GuardError:
    """The error of a call that the module refuses, for the reason `why`."""
    return GuardError(f"{entry.symbol}: {why}{_conversion(entry, why)}; expected {entry.signature}", why)


def _conversion(entry: EntryPoint, why: str) -> str:
    """How to convert the input that is refused for its dtype; NumPy has no bfloat16 of its own."""
    name, mismatch, _ = why.partition(" element type mismatch")
    spec = next((s for s in entry.inputs if s.name == name), None)
    if not mismatch or spec is None or spec.dtype == "bfloat16":
        return ""
    return f"; convert it: {name}.astype({spec.dtype!r})"


class LoadedModule:
    """A module on a device, and the functions that it exports.

    Attributes:
        driver: the device's driver, such as `local-task`.
        is_local: whether the device is the CPU.
        lock: held during a call. An IREE context is "thread-compatible but not thread-safe" (iree-org/iree#12948): it
            must not run two calls at a time. Calls that belong together hold the lock for all of them.
        exchange: exchanges gradients with other ranks; None for a module that runs alone.
    """

    def __init__(
        self, name: Path, code: bytes, states: Sequence[Path], device: str, base: ireert.ParameterIndex, size: int
    ) -> None:
        """
        Args:
            name: the path of the module, for messages.
            code: the contents of that file.
            states: the parameter files or checkpoints to start from; a tensor is that of the first file which has it.
            device: an IREE device URI.
            base: the tensors that nothing changes.
            size: how many bytes the state and intermediate values take.

        Raises:
            ArtifactError: the device cannot be opened, or the module or the state does not load on it.
            UserError: the parent of this process opened the device's driver, and the child cannot.
        """
        self.lock = threading.RLock()
        self.exchange: Exchange | None = None
        self.driver = driver_of(device)
        self.is_local = is_local(device)
        self._uri = device
        self._unusable = ""
        self._functions: dict[str, Any] = {}
        forks.refuse_drivers_of_ancestors(device)
        self._base = base
        self._size = size
        self._states = {state: state.stat() for state in states}
        self._module = self._load(name, code, states)
        forks.register(self)

    def _load(self, name: Path, code: bytes, states: Sequence[Path]) -> Any:
        """Load the module and the state onto the device.

        If a Vulkan device is lost before it has computed anything, it is opened once more, without IREE's cache, which
        keeps the lost device. Mesa 22.3.6 loses the device in one of 20 to 60 processes on a busy machine
        (VK_ERROR_DEVICE_LOST, IREE's DATA_LOSS). The loss is reported to the first call that waits for the device.
        """
        try:
            return self._load_on(self._opened(), name, code, states)
        except ArtifactError as error:
            if "DATA_LOSS" not in str(error.__cause__):
                raise
        return self._load_on(self._opened(cache=False), name, code, states)

    def _opened(self, *, cache: bool = True) -> Any:
        try:
            return open_device(self._uri, cache=cache)
        except Exception as error:
            known = ", ".join(ireert.query_available_drivers())
            raise ArtifactError(
                f"the device {self._uri!r} cannot be opened: {reason(error)}. Drivers in this IREE: {known}"
            ) from error

    def _load_on(self, device: Any, name: Path, code: bytes, states: Sequence[Path]) -> Any:
        if self.is_local:
            prefer_large_pages(self._size)
        instance, index = vm_instance(), ireert.ParameterIndex()
        try:
            # Read the state: a mapped file would stay in memory as well.
            for state in states:
                index.load(str(state), format=_IRPA if state.suffix == ".irpa" else _SAFETENSORS, mode="file_async")
            providers = index.create_provider(scope=SCOPE), self._base.create_provider(scope=BASE_SCOPE)
            parameters = ireert.create_io_parameters_module(instance, *providers)
            # A copy: a mapped file that somebody truncates ends the process with SIGBUS.
            module = ireert.VmModule.copy_buffer(instance, code)
            hal = ireert.create_hal_module(instance, device)
            self._device, self._needed = device, (instance, hal, parameters)
            self._context = ireert.VmContext(instance, modules=[hal, parameters, module])
            if not self.is_local:
                to_device(device, np.zeros(1, np.float32))  # waits for the device; loading only queues work
        except Exception as error:
            raise ArtifactError(
                f"{name} does not load on {self._uri}: {reason(error)}. Is the artifact made for this target, and by "
                "the IREE version in its manifest?"
            ) from error
        return module

    def attach(self, exchange: Exchange) -> None:
        """Let the module exchange gradients by `exchange`; it moves to a context that has the module `comm`.

        The state there is the one that the module was loaded with.
        """
        with self.lock:
            instance, hal, parameters = self._needed
            modules = [hal, parameters, exchange.module(self._device), self._module]
            self._context = None  # frees the old state before there is a new one
            self._context = ireert.VmContext(instance, modules=modules)
            self.exchange = exchange

    def refuse_overwritten_state(self) -> None:
        """Refuse a call that reads the initial state again, if its files were overwritten.

        A file that was replaced by another is fine: the one that is open stays as it was.

        Raises:
            ArtifactError: names the file.
        """
        for path, before in self._states.items():
            with suppress(OSError):
                now = path.stat()
                written = (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns)
                if written and (now.st_dev, now.st_ino) == (before.st_dev, before.st_ino):
                    raise ArtifactError(
                        f"{path} was written to since it was loaded, so the state that it held is lost. Load again; "
                        "replace such a file by renaming another"
                    )

    def close(self) -> None:
        """Free the module and its state; further calls are refused."""
        with self.lock:
            if self.exchange is not None:
                self.exchange.close()
            self.exchange = None
            self._functions.clear()
            self._module = self._context = self._device = None
            self._needed = (None, None, None)
            self._unusable = self._unusable or "this session is closed; load the artifact again"

    def held_objects(self) -> tuple[Any, ...]:
        """Return the objects of IREE that belong to the device."""
        return self._device, self._context

    def inherited(self) -> None:
        """Refuse further calls in a child process, unless the device survives a fork and no thread was in a call."""
        idle = self.lock.acquire(blocking=False)
        self.lock = threading.RLock()
        if not idle or not forks.survives(self.driver):
            self._unusable = (
                f"this session belongs to process {os.getppid()}, and process {os.getpid()} is a fork of it: the "
                f"threads of its device are there and not here. {forks.way_out()}"
            )

    def run(self, entry: EntryPoint, values: Sequence[Any]) -> list[Any]:
        """Run an entry point; return its outputs in order, as buffers on the device.

        Args:
            entry: the entry point.
            values: arrays, device arrays or buffers, then the hyperparameters.

        Raises:
            GuardError: the module refuses a value.
            UserError: the module is closed, or belongs to the parent process.
        """
        with self.lock:
            return self._run(entry, values)

    def call(
        self, entry: EntryPoint, values: Sequence[Any], wanted: Container[str] | None = None, *, copies: bool = True
    ) -> list[Array]:
        """As `run`, with the outputs as arrays of the host.

        Args:
            entry: the entry point.
            values: as for `run`.
            wanted: the names of the outputs to return; None for all.
            copies: whether each array has memory of its own. An output may be an input, so only what `export_state`
                returns can do without.
        """
        with self.lock:
            outputs = zip(self._run(entry, values), entry.outputs, strict=True)
            named = [(view, spec) for view, spec in outputs if wanted is None or spec.name in wanted]
            return [self.to_host(view, spec, copies=copies) for view, spec in named]

    def on_device(self, array: Any) -> ireert.DeviceArray:
        """Copy an array to the device.

        Raises:
            GuardError: it is no array of numbers.
            UserError: as `run`.
        """
        with self.lock:
            self._refuse_unusable()
            return ireert.DeviceArray(self._device, self._buffer_view(array), implicit_host_transfer=True)

    def _run(self, entry: EntryPoint, values: Sequence[Any]) -> list[Any]:
        self._refuse_unusable()
        arguments = ireert.VmVariantList(len(values))
        inputs = [as_input(entry, spec, value) for spec, value in zip(entry.inputs, values, strict=False)]
        names = (*(spec.name for spec in entry.inputs), *entry.hypers)
        for name, value in zip(names, (*inputs, *values[len(inputs) :]), strict=False):
            if isinstance(value, float):
                arguments.push_float(value)
            elif isinstance(value, ireert.DeviceArray):
                arguments.push_ref(value._buffer_view)
            elif isinstance(value, ireert.HalBufferView):
                arguments.push_ref(value)
            else:
                arguments.push_ref(self._buffer_view(value, f"{entry.symbol}: {name}: "))
        results = ireert.VmVariantList(len(entry.outputs))
        try:
            invoke(self._context, self.driver, self._function(entry.symbol), arguments, results)
        except Exception as error:
            raise refused_call(entry, reason(error)) from error
        return [results.get_as_object(i, ireert.HalBufferView) for i in range(len(entry.outputs))]

    def _refuse_unusable(self) -> None:
        if self._unusable:
            raise UserError(self._unusable)

    def _function(self, name: str) -> Any:
        if name not in self._functions:
            self._functions[name] = self._module.lookup_function(name)
        return self._functions[name]

    def _buffer_view(self, array: Any, place: str = "") -> Any:
        """The array on the device; `place` begins the message of its refusal."""
        host = as_array(array)
        try:
            return to_device(self._device, host)
        except TypeError:
            raise GuardError(
                f"{place}{str(array)[:60]!r} is no array of numbers (its dtype is {host.dtype.str}), so it cannot be "
                "an input"
            ) from None

    def to_host(self, view: Any, spec: TensorSpec, *, copies: bool = True) -> Array:
        """Copy a buffer that `run` returned to the host; without `copies`, only if the host cannot read it in place.

        What is read in place cannot be written.
        """
        host = to_host(self._device, view)
        dtype = np.dtype(spec.dtype) if spec.dtype != "bfloat16" else host.dtype
        if copies or host.dtype != dtype:
            return np.array(host, dtype=dtype)
        host.flags.writeable = False
        return host
