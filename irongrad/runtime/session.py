"""`Session`: a loaded artifact, its state on a device, and its entry points as methods.

Needs numpy and the IREE runtime only. The compiled module itself checks shapes, dtypes and index ranges. Python adds
names and readable errors, and repeats none of these checks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import iree.runtime as ireert
import numpy as np

from irongrad.runtime import checkpoint as checkpoints
from irongrad.runtime.arguments import (
    as_array,
    as_input,
    as_number,
    as_seed,
    as_steps,
    check_finite,
    per_step,
    refuse_leftovers,
    take,
)
from irongrad.runtime.arrays import Array
from irongrad.runtime.devices import is_local
from irongrad.runtime.errors import ArtifactError, GuardError, UserError
from irongrad.runtime.integrity import check_files
from irongrad.runtime.manifest import (
    DRAWS,
    INITIAL_STATE,
    SCOPE,
    SEED,
    TICKET,
    EntryPoint,
    Manifest,
    TensorSpec,
    read_manifest,
)
from irongrad.runtime.memory import keep_freed_memory, prefer_large_pages
from irongrad.runtime.partial_state import Absent, completed
from irongrad.runtime.selection import check_device, choose_target
from irongrad.runtime.stacks import give_workers_stack
from irongrad.runtime.status import reason
from irongrad.runtime.transfer import to_device, to_host


def load(
    directory: str | os.PathLike[str],
    *,
    target: str | None = None,
    device: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    strict: bool = False,
) -> Session:
    """Load the artifact in `directory`.

    Args:
        directory: the directory that `irongrad compile -o` wrote.
        target: the name of one of its targets; by default the first for `device`, or the first that can run here.
        device: an IREE device URI, such as `local-task`, `local-sync`, `cuda` or `vulkan`; the target's own by default.
        checkpoint: a checkpoint to start from instead of the initial state.
        strict: whether to refuse inputs and hyperparameters that are not finite.

    Raises:
        ArtifactError: the artifact or checkpoint is missing, damaged or foreign, or its target cannot run here.
    """
    return Session(Path(directory), target=target, device=device, checkpoint=checkpoint, strict=strict)


def initial_state(directory: Path) -> dict[str, Array]:
    """Return the state that the artifact in `directory` was compiled with."""
    index = ireert.ParameterIndex()
    index.load(str(directory / INITIAL_STATE))
    return checkpoints.from_index(index, read_manifest(directory))


class Session:
    """A loaded artifact; each method runs an entry point of the compiled module over one shared state.

    Inputs are numpy arrays, objects with `__dlpack__` on the CPU (such as torch tensors), or device arrays from
    `to_device`. Their shapes and dtypes are those of `manifest`. An input of rank 0 may be a Python number instead. No
    call writes into an input. A refused call (a GuardError) leaves the state unchanged.

    Attributes:
        manifest: the artifact's manifest.
        directory: the artifact's directory.
        target: the target that was loaded.
        device: the URI of the device that runs it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        target: str | None = None,
        device: str | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        strict: bool = False,
        verifying: bool = False,
    ) -> None:
        self.directory = directory
        self.manifest: Manifest = read_manifest(directory)
        self.target = choose_target(self.manifest, directory, target, device)
        self._strict = strict
        self.device = device or self.target.device
        check_files(self.manifest, directory, (self.target.file, INITIAL_STATE))
        check_device(self.target, directory, self.device, verifying=verifying)
        state = Path(checkpoint) if checkpoint is not None else directory / INITIAL_STATE
        if checkpoint is not None:
            checkpoints.check(state, self.manifest)
        self._open(state)

    def _open(self, state: Path) -> None:
        if is_local(self.device):
            keep_freed_memory()
            # Twice the size: allocations in between fragment the memory, and too little is left in one piece.
            prefer_large_pages(2 * (state.stat().st_size + max(self.target.transients.values(), default=0)))
            give_workers_stack()
        path = self.directory / self.target.file
        module = self._load(path, state)
        self._functions = {e.name: (e, module.lookup_function(e.name)) for e in self.manifest.entry_points}
        self._defaults = {h.name: h.default for h in self.manifest.hypers}

    def _load(self, path: Path, state: Path) -> Any:
        """Load the module and the state onto the device.

        If a Vulkan device is lost before it has computed anything, it is opened once more, without IREE's cache, which
        keeps the lost device. Mesa 22.3.6 loses the device in one of 20 to 60 processes on a busy machine
        (VK_ERROR_DEVICE_LOST, IREE's DATA_LOSS). The loss is reported to the first call that waits for the device.
        """
        try:
            return self._load_on(self._opened(), path, state)
        except ArtifactError as error:
            if "DATA_LOSS" not in str(error.__cause__):
                raise
        return self._load_on(self._opened(cache=False), path, state)

    def _opened(self, *, cache: bool = True) -> Any:
        try:
            return ireert.get_device(self.device, cache=cache)
        except Exception as error:
            known = ", ".join(ireert.query_available_drivers())
            raise ArtifactError(
                f"the device {self.device!r} cannot be opened: {reason(error)}. Drivers in this IREE: {known}"
            ) from error

    def _load_on(self, device: Any, path: Path, state: Path) -> Any:
        instance = ireert.VmInstance()
        index = ireert.ParameterIndex()
        try:
            index.load(str(state), mode="file_async")  # read it: a mapped file would stay in memory as well
            parameters = ireert.create_io_parameters_module(instance, index.create_provider(scope=SCOPE))
            module = ireert.VmModule.mmap(instance, str(path))
            hal = ireert.create_hal_module(instance, device)
            self._device, self._context = device, ireert.VmContext(instance, modules=[hal, parameters, module])
            if not is_local(self.device):
                to_device(device, np.zeros(1, np.float32))  # waits for the device; loading only queues work
        except Exception as error:
            raise ArtifactError(
                f"{path} does not load on {self.device}: {reason(error)}. Is the artifact made for this target, and by "
                "the IREE version in its manifest?"
            ) from error
        return module

    # --- entry points ---------------------------------------------------------------------------------------------

    def train_step(self, **arguments: Any) -> float:
        """Train one step on inputs and hyperparameters by name; return the loss before the update."""
        return float(self.call("train_step", arguments)[0])

    def train_steps(self, **arguments: Any) -> Array:
        """Train K steps inside the module and return the K losses.

        Each input is stacked along a new first dimension of size K. A hyperparameter is a number, or an array of K
        numbers.
        """
        return self.call("train_steps", arguments)[0]

    def grad_step(self, **inputs: Any) -> float:
        """Add the gradients of one batch to the accumulators, and return the batch's loss."""
        return float(self.call("grad_step", inputs)[0])

    def apply_step(self, **hypers: float) -> int:
        """Update with the mean of the accumulated gradients, clear them, and return the step count."""
        return int(self.call("apply_step", hypers)[0])

    def eval_step(self, **inputs: Any) -> float:
        """Return the loss in evaluation mode."""
        return float(self.call("eval_step", inputs)[0])

    def forward(self, **inputs: Any) -> tuple[dict[str, Array], int]:
        """Begin a training step in pieces; return the model's outputs by name, and a ticket for `finish_step`.

        The state does not change. A new forward replaces an earlier one that was not finished.
        """
        *outputs, ticket = self.call("forward", inputs)
        names = [s.name for s in self._function("forward")[0].outputs]
        return dict(zip(names, outputs, strict=False)), int(ticket)

    def finish_step(self, ticket: int, **arguments: Any) -> float:
        """Finish the training step whose `forward` returned the ticket; return the loss before the update.

        Raises:
            GuardError: another forward ran since then, or the state was replaced.
        """
        return float(self.call("finish_step", {**arguments, TICKET: np.array(ticket, np.int64)})[0])

    def run_pieces(self, between: Callable[..., Mapping[str, Any]], **arguments: Any) -> float:
        """Train one step in pieces on inputs and hyperparameters by name; return the loss before the update.

        Args:
            between: a function that computes the missing inputs of `finish_step`, and returns them by name. Its
                arguments are the model's outputs, and those of `arguments` that `finish_step` takes, by name.
            arguments: all other inputs, and hyperparameters.
        """
        early = {s.name for s in self._function("forward")[0].inputs}
        late = {s.name for s in self._function("finish_step")[0].inputs}
        outputs, ticket = self.forward(**{n: a for n, a in arguments.items() if n in early})
        computed = between(outputs, **{n: a for n, a in arguments.items() if n in late})
        rest = {n: a for n, a in arguments.items() if n not in early}
        return self.finish_step(ticket, **{**rest, **computed})

    def predict(self, **inputs: Any) -> Array | dict[str, Array]:
        """Return the model's output in evaluation mode: an array, or a dictionary if there are several outputs."""
        outputs = self.call("predict", inputs)
        names = [s.name for s in self._function("predict")[0].outputs]
        return outputs[0] if len(outputs) == 1 else dict(zip(names, outputs, strict=True))

    def reset(self) -> None:
        """Restore the state that `load` left, and clear accumulated gradients."""
        self.call("reset", {})

    def seed(self, value: int) -> None:
        """Restart the step's random numbers from the seed `value`.

        They depend on the seed and on the number of calls that drew under it. Both are state, and part of a checkpoint.

        Raises:
            UserError: the step draws no random numbers.
            GuardError: `value` is not an integer from 0 to 2**63 - 1.
        """
        if self.manifest.seed is None:
            raise UserError("this step draws no random numbers, so it has no seed")
        self.load_state(self.state() | {SEED: as_seed(value), DRAWS: np.array(0, np.int64)})

    # --- state ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Array]:
        """Return a copy of every state tensor by name; tied tensors are one array under each of their names."""
        return checkpoints.under_all_names(self.call("export_state", {}), self.manifest)

    def initial_state(self) -> dict[str, Array]:
        """Return the state that the artifact was compiled with, whatever state this session started from."""
        return initial_state(self.directory)

    def load_state(self, state: Mapping[str, Array], *, absent: Absent = "keep") -> None:
        """Replace the state, or the part of it that is given.

        Args:
            state: arrays by name: the whole state, what `model.state_dict()` holds, the parameters alone, or the
                trained parameters alone.
            absent: what becomes of the rest, such as the optimizer's moments and the buffers: they `keep` their
                values, as PyTorch's `model.load_state_dict` leaves the optimizer alone; or `reset` to the values with
                which the artifact was compiled.

        Raises:
            ArtifactError: a tensor is unknown, has another shape or dtype, or is missing beside others of its kind. The
                state is unchanged.
        """
        self._replace(state, "the given state", absent)

    def _replace(self, state: Mapping[str, Array], source: str, absent: Absent) -> None:
        if absent not in ("keep", "reset"):
            raise UserError(f"absent is {absent!r}; it must be 'keep' or 'reset'")
        rest = self.state if absent == "keep" else self.initial_state
        whole = completed(state, self.manifest, source, rest)
        self._invoke("import_state", [whole[s.name] for s in self.manifest.state])

    def gradients(self) -> tuple[dict[str, Array], int]:
        """Return the accumulated sums of gradients by parameter, and the number of gradients in each sum."""
        *sums, count = self.call("export_gradients", {})
        return dict(zip(self.manifest.gradients, sums, strict=True)), int(count)

    def load_gradients(self, sums: Mapping[str, Array], count: int) -> None:
        """Replace the accumulated gradients, for instance by sums over several devices.

        Args:
            sums: the sum of the gradients of every trained parameter, by name.
            count: the number of gradients in each sum.

        Raises:
            GuardError: a parameter's sum is missing, or has another shape or dtype.
        """
        if missing := [n for n in self.manifest.gradients if n not in sums]:
            raise GuardError(
                f"import_gradients: every trained parameter needs a sum, and {', '.join(missing[:4])} have none"
            )
        arrays = [sums[n] for n in self.manifest.gradients]
        self._invoke("import_gradients", [*arrays, np.array(count, np.int64)])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a safetensors checkpoint, atomically.

        Parameters and buffers have their PyTorch names. Accumulated gradients are not part of the checkpoint.
        """
        checkpoints.write(Path(path), self.state(), self.manifest)

    def restore(self, path: str | os.PathLike[str], *, absent: Absent = "keep") -> None:
        """Replace the state by a checkpoint's, or by that of a safetensors file of the model's tensors alone.

        Args:
            path: the file.
            absent: what becomes of tensors that the file does not hold; see `load_state`.

        Raises:
            ArtifactError: the file is missing, damaged, or of another model or optimizer; the state is unchanged.
        """
        with checkpoints.readable(path):
            arrays = checkpoints.arrays_of(Path(path))
        self._replace(arrays, str(path), absent)

    def to_device(self, array: Any) -> ireert.DeviceArray:
        """Copy an array to the device, for an input of many calls."""
        return ireert.DeviceArray(self._device, self._buffer_view(np.asarray(array)), implicit_host_transfer=True)

    # --- calls ----------------------------------------------------------------------------------------------------

    def call(self, name: str, arguments: Mapping[str, Any]) -> list[Array]:
        """Call the entry point `name` with inputs and hyperparameters by name; return its outputs in order.

        Raises:
            GuardError: an argument is missing, unknown, or not what the step was compiled for.
            UserError: there is no such entry point.
        """
        entry, _ = self._function(name)
        remaining = dict(arguments)
        inputs = [take(remaining, spec.name, entry) for spec in entry.inputs]
        hypers = [self._hyper(remaining, h) for h in entry.hypers]
        refuse_leftovers(remaining, entry, self.manifest)
        if name != "train_steps":
            hypers = [as_number(entry, n, v) for n, v in zip(entry.hypers, hypers, strict=True)]
        if self._strict:
            check_finite(entry, inputs, hypers)
        if name == "train_steps":
            inputs, hypers = as_steps(entry, inputs), per_step(entry, inputs, hypers)
        return self._invoke(name, [*inputs, *hypers])

    def _function(self, name: str) -> tuple[EntryPoint, Any]:
        try:
            return self._functions[name]
        except KeyError:
            raise UserError(
                f"this artifact has no entry point {name!r}; it has {', '.join(self._functions)}. Entry points are "
                "chosen at compile time"
            ) from None

    def _hyper(self, remaining: dict[str, Any], name: str) -> Any:
        if name in remaining:
            return remaining.pop(name)
        base, _, group = name.rpartition("_")
        if group.isdigit() and base in remaining:
            return remaining[base]  # a name without a group number means every group
        return self._defaults[name]

    def _invoke(self, name: str, values: Sequence[Any]) -> list[Array]:
        entry, function = self._function(name)
        arguments = ireert.VmVariantList(len(values))
        inputs = [as_input(entry, spec, value) for spec, value in zip(entry.inputs, values, strict=False)]
        for value in (*inputs, *values[len(inputs) :]):
            if isinstance(value, float):
                arguments.push_float(value)
            elif isinstance(value, ireert.DeviceArray):
                arguments.push_ref(value._buffer_view)
            else:
                arguments.push_ref(self._buffer_view(value))
        results = ireert.VmVariantList(len(entry.outputs))
        try:
            self._context.invoke(function, arguments, results)
        except Exception as error:
            raise GuardError(f"{name}: {reason(error)}\n  expected {entry.signature}") from error
        return [self._to_host(results, i, spec) for i, spec in enumerate(entry.outputs)]

    def _buffer_view(self, array: Any) -> Any:
        host = array if isinstance(array, np.ndarray) else as_array(array)
        try:
            return to_device(self._device, host)
        except TypeError:
            raise GuardError(
                f"{str(array)[:60]!r} is no array of numbers (its dtype is {host.dtype.str}), so it cannot be an input"
            ) from None

    def _to_host(self, results: Any, index: int, spec: TensorSpec) -> Array:
        host = to_host(self._device, results.get_as_object(index, ireert.HalBufferView))
        return np.array(host, dtype=np.dtype(spec.dtype) if spec.dtype != "bfloat16" else host.dtype)
