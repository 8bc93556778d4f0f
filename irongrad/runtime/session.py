"""`Session`: a loaded artifact, its state on a device, and its entry points as methods.

Needs numpy and the IREE runtime only. The compiled module itself checks shapes, dtypes and index ranges. Python adds
names and readable errors, and repeats none of these checks.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from copy import copy
from pathlib import Path
from types import MappingProxyType
from typing import Any, overload

import iree.runtime as ireert
import numpy as np

from irongrad.runtime import checkpoint as checkpoints
from irongrad.runtime.adapters import read_adapter
from irongrad.runtime.arguments import (
    as_count,
    as_number,
    as_path,
    as_seed,
    as_steps,
    check_finite,
    infinite_hypers,
    per_step,
    refuse_leftovers,
    refuse_no_mapping,
    take,
)
from irongrad.runtime.arrays import Array
from irongrad.runtime.base_file import refuse_other_values
from irongrad.runtime.chunks import Pace, train_steps
from irongrad.runtime.collected_state import collected
from irongrad.runtime.errors import ArtifactError, GuardError, RankLostError, UserError
from irongrad.runtime.initial_state import state_of
from irongrad.runtime.manifest import (
    DRAWS,
    EXCHANGED,
    INITIAL_STATE,
    SCALE,
    SEED,
    TICKET,
    TRAIN_AND_EXPORT,
    EntryPoint,
    Role,
)
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.nonfinite import NonFiniteCheck, OnNonFinite, is_finite, nonfinite_names
from irongrad.runtime.opened_artifact import Asked, opened_artifact
from irongrad.runtime.partial_state import Absent, completed
from irongrad.runtime.ranks.communicator import Communicator
from irongrad.runtime.ranks.exchange import Exchange, Traffic
from irongrad.runtime.ranks.mpi import MpiCommunicator, is_mpi
from irongrad.runtime.ranks.owners import shard_sizes
from irongrad.runtime.safetensors_file import read_arrays
from irongrad.runtime.signatures import Trusted


def load(
    directory: str | os.PathLike[str],
    *,
    target: str | None = None,
    device: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    base: str | os.PathLike[str] | None = None,
    strict: bool = False,
    on_nonfinite: OnNonFinite = "warn",
    trusted: Trusted | None = None,
) -> Session:
    """Load the artifact in `directory`.

    Args:
        directory: the directory that `irongrad compile -o` wrote.
        target: the name of one of its targets; by default the first for `device`, or the first that can run here.
        device: an IREE device URI, such as `local-task`, `local-sync`, `cuda` or `vulkan`; the target's own by default.
        checkpoint: a checkpoint to start from instead of the initial state.
        base: the base file of an artifact that was compiled with one; by default where it was then, seen from
            `directory`. A CPU uses it where it is mapped, so processes share its memory. Replace it by renaming
            another: a process ends if it reads a mapped file that became shorter.
        strict: whether to refuse inputs that are not finite.
        on_nonfinite: what to do when a loss, or the state in a checkpoint, becomes NaN or infinite: `warn` with a
            NonFiniteWarning, `stop` with a NonFiniteError, or `ignore` it. The loss of a step with a loss scale is not
            looked at, because such a step skips its update.
        trusted: the path of a public key (PEM, Ed25519), or several; one of them must have signed the artifact.

    Raises:
        ArtifactError: the artifact or checkpoint is missing, damaged, foreign or not signed by a trusted key, or its
            target cannot run here.
        NonFiniteError: the checkpoint holds a NaN or infinite value, and `on_nonfinite` is `stop`.
        UserError: the parent of this process opened the device, and this process is a fork of it.
    """
    return Session(
        directory,
        target=target,
        device=device,
        checkpoint=checkpoint,
        base=base,
        strict=strict,
        on_nonfinite=on_nonfinite,
        trusted=trusted,
    )


class Session:
    """A loaded artifact; each method runs an entry point of the compiled module over one shared state.

    Inputs are numpy arrays, objects with `__dlpack__` on the CPU (such as torch tensors), or device arrays from
    `to_device`. Their shapes and dtypes are those of `manifest`. An input of rank 0 may be a Python number instead. No
    call writes into an input. A refused call (a GuardError) leaves the state unchanged.

    Threads may share a session: it runs one call at a time. A session is a context manager, and `close` frees it. It
    belongs to the process that opened it; a forked child opens its own.

    Attributes:
        manifest: the artifact's manifest.
        directory: the artifact's directory.
        target: the target that was loaded.
        device: the URI of the device that runs it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        target: str | None = None,
        device: str | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        base: str | os.PathLike[str] | None = None,
        strict: bool = False,
        on_nonfinite: OnNonFinite = "warn",
        trusted: Trusted | None = None,
        verifying: bool = False,
    ) -> None:
        self._check = NonFiniteCheck(on_nonfinite)
        self._strict = strict
        self.directory = directory = as_path(directory, "the directory of an artifact").absolute()
        if not isinstance(device, str | None):
            raise UserError(f"device must be the URI of a device, such as 'local-task', not {device!r:.60}")
        start = None if checkpoint is None else as_path(checkpoint, "checkpoint")
        self._base_path = None if base is None else as_path(base, "base").absolute()
        opened = opened_artifact(directory, Asked(target, device, start, self._base_path, trusted, verifying))
        self._base = opened.base
        self.manifest, self.target, self.device = opened.manifest, opened.target, opened.device
        self._module = opened.module
        self.step_name = ""
        self._views: dict[str, Session] = {}
        self._take_names()
        self._check.state(self._became_nonfinite(opened.nonfinite), f"that is how it is in {checkpoint}")

    def _take_names(self) -> None:
        """Take the names of entry points and hyperparameters from the manifest."""
        self._entries = {e.name: e for e in self.manifest.entry_points}
        self._defaults = {h.name: h.default for h in self.manifest.hypers}
        self._infinite = infinite_hypers(self.manifest)
        scale = f"{SCALE}/{self.step_name}" if self.step_name else SCALE
        self._scaled = any(s.name == scale for s in self.manifest.state)
        self._pace = Pace()

    def step(self, name: str) -> Session:
        """Return a view of one of several steps (`irongrad.Steps`): a session whose entry points are that step's.

        The view shares the state and the module. `train_step(step=name, ...)` of this session calls it.

        Raises:
            UserError: there is no such step.
        """
        if not isinstance(name, str) or name not in self.manifest.steps:
            if self.step_name:
                raise UserError(f"this is a view of the step {self.step_name!r}, which has no steps; ask the session")
            has = (
                f"it has {', '.join(self.manifest.steps)}" if self.manifest.steps else "it has one step, without a name"
            )
            raise UserError(f"this artifact has no step {name!r}; {has}")
        if name not in self._views:
            view = copy(self)
            view.manifest, view.step_name = self.manifest.of_step(name), name
            view._take_names()
            self._views[name] = view
        return self._views[name]

    def _chosen(self, arguments: dict[str, Any]) -> Session:
        """The view that the argument `step` names, which is taken out; this session if it has one step."""
        if not self.manifest.steps:
            return self
        if "step" not in arguments:
            raise UserError(f"this artifact has several steps: give step=, one of {', '.join(self.manifest.steps)}")
        return self.step(arguments.pop("step"))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the state and the module; every further call raises a UserError. A second close does nothing."""
        self._module.close()

    # --- entry points ---------------------------------------------------------------------------------------------

    def train_step(self, **arguments: Any) -> Any:
        """Train one step on inputs and hyperparameters by name; return the loss before the update.

        If the loss function returns values beside the loss, return the loss and a dictionary of these numbers.
        """
        return self._chosen(arguments)._loss("train_step", arguments)

    def train_steps(self, **arguments: Any) -> Any:
        """Train K steps inside the module and return the K losses; with values beside the loss, K of each by name.

        Each input is stacked along a new first dimension of size K. A hyperparameter is a number, or an array of K
        numbers. A long call runs in chunks of about a quarter of a second. After an interrupt (KeyboardInterrupt) the
        state is that after the last whole chunk.
        """
        view = self._chosen(arguments)
        losses, *values = view._call("train_steps", arguments)
        return (losses, view._named("train_steps", values)) if values else losses

    def grad_step(self, **inputs: Any) -> Any:
        """Add the gradients of one batch to the accumulators, and return the batch's loss, as `train_step` does."""
        return self._chosen(inputs)._loss("grad_step", inputs)

    def apply_step(self, **hypers: Any) -> int:
        """Update with the mean of the accumulated gradients, clear them, and return the step count."""
        return int(self._chosen(hypers)._call("apply_step", hypers)[0])

    def eval_step(self, **inputs: Any) -> Any:
        """Return the loss in evaluation mode, as `train_step` does."""
        return self._chosen(inputs)._loss("eval_step", inputs, trains=False)

    def forward(self, **inputs: Any) -> tuple[dict[str, Array], int]:
        """Begin a training step in pieces; return the model's outputs by name, and a ticket for `finish_step`.

        The state does not change. A new forward replaces an earlier one that was not finished.
        """
        *outputs, ticket = self._call("forward", inputs)
        names = [s.name for s in self.entry("forward").outputs]
        return dict(zip(names, outputs, strict=False)), int(ticket)

    def finish_step(self, ticket: int, **arguments: Any) -> float:
        """Finish the training step whose `forward` returned the ticket; return the loss before the update.

        Raises:
            GuardError: another forward ran since then, or the state was replaced.
        """
        return float(self._loss("finish_step", {**arguments, TICKET: np.array(ticket, np.int64)}))

    def run_pieces(self, between: Callable[..., Mapping[str, Any]], **arguments: Any) -> float:
        """Train one step in pieces on inputs and hyperparameters by name; return the loss before the update.

        Args:
            between: a function that computes the missing inputs of `finish_step`, and returns them by name. Its
                arguments are the model's outputs, and those of `arguments` that `finish_step` takes, by name.
            arguments: all other inputs, and hyperparameters.
        """
        early = {s.name for s in self.entry("forward").inputs}
        late = {s.name for s in self.entry("finish_step").inputs}
        with self._module.lock:
            outputs, ticket = self.forward(**{n: a for n, a in arguments.items() if n in early})
            computed = between(outputs, **{n: a for n, a in arguments.items() if n in late})
            rest = {n: a for n, a in arguments.items() if n not in early}
            return self.finish_step(ticket, **{**rest, **computed})

    def predict(self, **inputs: Any) -> Array | dict[str, Array]:
        """Return the model's output in evaluation mode: an array, or a dictionary if there are several outputs."""
        return self._chosen(inputs)._outputs("predict", inputs)

    def reset(self) -> None:
        """Restore the state that `load` left, and clear accumulated gradients; reads its file again.

        Raises:
            ArtifactError: the file was written to since then, not replaced by another.
        """
        self._module.refuse_overwritten_state()
        self._call("reset", {})

    def reset_carry(self) -> None:
        """Put carried values, such as a hidden state, back to the beginning.

        Raises:
            UserError: nothing is carried.
            ArtifactError: as `reset`.
        """
        if not any(s.role is Role.CARRIED for s in self.manifest.state):
            raise UserError(
                "this step carries nothing from call to call (TrainStep.carry), so there is nothing to reset"
            )
        self._module.refuse_overwritten_state()
        self._call("reset_carry", {})

    def seed(self, value: int) -> None:
        """Restart the step's random numbers from the seed `value`.

        They depend on the seed and on the number of calls that drew under it. Both are state, and part of a checkpoint.

        Raises:
            UserError: the step draws no random numbers.
            GuardError: `value` is not an integer from 0 to 2**63 - 1.
        """
        if self.manifest.seed is None:
            raise UserError("this step draws no random numbers, so it has no seed")
        self.update_state({SEED: as_seed(value), DRAWS: np.array(0, np.int64)})

    # --- state ----------------------------------------------------------------------------------------------------

    def state(self, names: Container[str] | None = None, *, writable: bool = True) -> dict[str, Array]:
        """Return a copy of every state tensor by name; tied tensors are one array under each of their names.

        Tensors of a base file are views of it, which cannot be written.

        Args:
            names: the names of the tensors to copy, those of the manifest; all by default, under all their names.
            writable: whether the arrays can be written. If not, the host reads what the device has copied for it, so
                there is one copy less. The arrays keep their values in either case.
        """
        entry = self.entry("export_state")
        if names is None:
            own = [s.name for s in entry.outputs]
            whole = dict(zip(own, self._collected(copies=writable), strict=True)) | self._base
            return checkpoints.under_all_names([whole[s.name] for s in self.manifest.state], self.manifest)
        kept = [spec.name for spec in entry.outputs if spec.name in names]
        copied = dict(zip(kept, self._collected(names, copies=writable), strict=True))
        return copied | {name: array for name, array in self._base.items() if name in names}

    def _collected(self, names: Container[str] | None = None, *, copies: bool = True) -> list[Array]:
        """The outputs of `export_state`, or those of the names; `copies` as for `LoadedModule.call`."""
        entry = self.entry("export_state")
        if not self.is_sharded:
            return self._module.call(entry, [], names, copies=copies)
        divided = (name for shard in self.manifest.shards for name in shard)
        shards = names is None or any(name in names for name in divided)
        found = dict(collected(self._module, self.manifest, shards=shards))
        return [found[s.name] for s in entry.outputs if names is None or s.name in names]

    def initial_state(self) -> dict[str, Array]:
        """Return the state that the artifact was compiled with, whatever state this session started from.

        Raises:
            ArtifactError: the artifact was removed or replaced since it was loaded.
        """
        here = read_manifest(self.directory)
        if (here.state, here.files.get(INITIAL_STATE)) != (self.manifest.state, self.manifest.files.get(INITIAL_STATE)):
            raise ArtifactError(
                f"{self.directory} was replaced by another artifact since it was loaded; load it again to start from "
                "its initial state"
            )
        return state_of(here, self.directory, self._base_path)

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
        refuse_no_mapping(state, "a state")
        self._replace(state, checkpoints.GIVEN, absent)

    def update_state(self, arrays: Mapping[str, Array]) -> None:
        """Replace the tensors that are given, whichever they are, and keep all others.

        Args:
            arrays: arrays by the names of the manifest; a tied tensor has one.

        Raises:
            ArtifactError: a tensor is unknown, or has another shape or dtype. The state is unchanged.
        """
        with self._module.lock:
            self.load_state({**self.state({s.name for s in self.manifest.state}), **arrays})

    def _replace(self, state: Mapping[str, Array], source: str, absent: Absent) -> None:
        if absent not in ("keep", "reset"):
            raise UserError(f"absent is {absent!r}; it must be 'keep' or 'reset'")
        rest = self.state if absent == "keep" else self.initial_state
        with self._module.lock:
            whole = completed(state, self.manifest, source, rest)
            refuse_other_values(whole, self._base, source)
            self._invoke("import_state", [whole[s.name] for s in self.entry("import_state").inputs])

    def gradients(self) -> tuple[dict[str, Array], int]:
        """Return the accumulated sums of gradients by parameter, and the number of gradients in each sum."""
        *sums, count = self._call("export_gradients", {})
        return dict(zip(self.manifest.gradients, sums, strict=True)), int(count)

    def load_gradients(self, sums: Mapping[str, Array], count: int) -> None:
        """Replace the accumulated gradients, for instance by sums over several devices.

        Args:
            sums: the sum of the gradients of every trained parameter, by name.
            count: the number of gradients in each sum.

        Raises:
            GuardError: a parameter's sum is missing, unknown, or has another shape or dtype; or the count is no count.
        """
        refuse_no_mapping(sums, "the sums of gradients")
        number = as_count(count)
        if unknown := [n for n in sums if n not in self.manifest.gradients]:
            raise GuardError(f"import_gradients: {', '.join(unknown[:4])} are no trained parameters of this step")
        if missing := [n for n in self.manifest.gradients if n not in sums]:
            raise GuardError(
                f"import_gradients: every trained parameter needs a sum, and {', '.join(missing[:4])} have none"
            )
        arrays = [sums[n] for n in self.manifest.gradients]
        self._invoke("import_gradients", [*arrays, number])

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        trainable: bool | None = None,
        about: Mapping[str, Any] = MappingProxyType({}),
        beside: Mapping[str, Array] = MappingProxyType({}),
    ) -> None:
        """Write the state to a safetensors checkpoint, atomically.

        Parameters and buffers have their PyTorch names. Accumulated gradients are not part of the checkpoint. The file
        carries a checksum. If the state became NaN or infinite, a finite checkpoint that `path` replaces is kept as
        `PATH.finite`.

        If each rank holds a part of the optimizer's state, all ranks call this. The first writes the file, which has
        the whole state.

        Args:
            path: the file.
            trainable: whether to leave out what no step changes, such as the frozen base of an adapter. `load` and
                `restore` take such a file with an artifact of the same base. By default, if over half of the model's
                parameters are frozen.
            about: what the file says about itself beside that, in the types of JSON: `irongrad.training` records the
                place in a training run.
            beside: tensors that are no state, under names that begin with `ema/`; `load` and `restore` pass over them.
                `irongrad.training` keeps moving averages there.

        Raises:
            NonFiniteError: the state became NaN or infinite, and `on_nonfinite` is `stop`; nothing is written.
            OSError: the file cannot be written; an old one is unchanged.
        """
        path = as_path(path, "a checkpoint")
        if self.is_sharded and self._exchange.communicator.rank > 0:
            deque(collected(self._module, self.manifest), maxlen=0)
            return
        state = self.state(writable=False)
        spoilt = self._became_nonfinite(nonfinite_names({s.name: state[s.name] for s in self.manifest.state}))
        if spoilt:
            self._check.state(spoilt, self._kept(path))
        part = self.manifest.is_mostly_frozen if trainable is None else trainable
        finite = not spoilt
        checkpoints.write(path, state, self.manifest, finite=finite, trainable=part, about=about, beside=beside)

    def _kept(self, path: Path) -> str:
        """Keep the last checkpoint with a finite state, before `path` is written; say what was kept."""
        if self._check.policy == "stop":
            return f"{path} is not written"
        kept = checkpoints.keep_finite(path) if self._check.policy == "warn" else None
        return f"the last finite checkpoint is {kept}" if kept else f"{path} holds it"

    def restore(self, path: str | os.PathLike[str], *, absent: Absent = "keep") -> None:
        """Replace the state by a checkpoint's, or by that of a safetensors file of the model's tensors alone.

        Args:
            path: the file.
            absent: what becomes of tensors that the file does not hold; see `load_state`.

        Raises:
            ArtifactError: the file is missing, damaged, or of another model or optimizer; the state is unchanged.
        """
        path = as_path(path, "a checkpoint")
        arrays, header = read_arrays(path)
        checkpoints.check_base(header, self.manifest, str(path))
        self._check.state(self._became_nonfinite(nonfinite_names(arrays)), f"that is how it is in {path}")
        self._replace(arrays, str(path), absent)

    def load_adapter(
        self, folder: str | os.PathLike[str], *, absent: Absent = "keep", another_base: bool = False
    ) -> None:
        """Put an adapter of PEFT into the model, without compiling anything; the frozen base stays on the device.

        Args:
            folder: has `adapter_config.json` and `adapter_model.safetensors`, as `irongrad export --to peft` and
                PEFT's `save_pretrained` write them.
            absent: what becomes of the rest, such as the optimizer's moments; see `load_state`.
            another_base: whether to accept an adapter whose files name another base model.

        Raises:
            ArtifactError: the artifact has no adapter, or the files are missing or damaged, of another base, or of an
                adapter with other tensors, shapes or settings. The state is unchanged.
        """
        folder = as_path(folder, "an adapter")
        arrays = read_adapter(folder, self.manifest, another_base=another_base)
        self._check.state(self._became_nonfinite(nonfinite_names(arrays)), f"that is how it is in {folder}")
        with self._module.lock:
            if absent != "keep":
                self._replace(self.initial_state() | arrays, str(folder), absent)
                return
            entry = self.entry("export_state")
            # Buffers of the device, if it has the whole state.
            present = self._collected() if self.is_sharded else self._module.run(entry, [])
            values = [arrays.get(s.name, view) for s, view in zip(entry.outputs, present, strict=True)]
            self._invoke("import_state", values)

    def to_device(self, array: Any) -> ireert.DeviceArray:
        """Copy an array to the device, for an input of many calls."""
        return self._module.on_device(array)

    # --- ranks ----------------------------------------------------------------------------------------------------

    def attach(self, ranks: Any) -> None:
        """Train one state with other ranks, each on its own batches; every rank calls this.

        From then on `train_step`, `train_steps` and `apply_step` are collective: all ranks call them with the same
        hyperparameters. Gradients, the loss, the values beside it and the buffers of the model become their means over
        the ranks, weighted by the sizes of the batches, before gradients are unscaled, clipped and used. If one rank
        refuses its inputs, all refuse the step. The state becomes that of rank 0.

        If the artifact was compiled with `shard`, each rank keeps only its part of the optimizer's state. Then `state`,
        `save`, `load_state`, `restore`, `seed` and `share_state` are collective, too: they collect that state.

        Args:
            ranks: a communicator of mpi4py, such as `MPI.COMM_WORLD`, or any other
                `irongrad.runtime.ranks.communicator.Communicator`.

        Raises:
            UserError: the artifact was compiled without `communicate`, or other ranks are attached, or the ranks have
                different artifacts.
            RankLostError: a rank is gone.
        """
        if not self.manifest.exchange:
            raise UserError("this artifact exchanges nothing between ranks; compile it with --communicate")
        if self._module.exchange is not None:
            raise UserError("this session is attached to ranks already")
        communicator = MpiCommunicator(ranks) if is_mpi(ranks) else ranks
        if communicator.size == 1:
            return
        exchange = Exchange(communicator, self.manifest.digest, shard_sizes(self.manifest))
        with self._module.lock:
            arrays = self._invoke("export_state", [])
            for array in arrays:
                communicator.broadcast(array, 0)
            self._module.attach(exchange)
            self._invoke("import_state", arrays)

    def recover(self) -> Communicator:
        """Go on with the ranks that are left after a RankLostError, and return them; every one of them calls this.

        The state becomes that of the rank that made the most steps: some may have finished the step in which others
        noticed the loss.

        Raises:
            RankLostError: the engine cannot go on without a rank: start Open MPI with `mpirun --with-ft ulfm`. Or the
                lost rank held a part of the optimizer's state.
        """
        exchange = self._exchange
        if self.is_sharded:
            raise RankLostError(
                "a rank is gone, and with it its part of the optimizer's state: begin again from the last checkpoint, "
                "with any number of ranks"
            )
        exchange.recover()
        counters = [s.name for s in self.manifest.state if s.role is Role.COUNTER]
        state = self.state()
        made = np.array([sum(int(state[name]) for name in counters)], np.int64)
        self.share_state(int(np.argmax(exchange.communicator.gather(made))))
        return exchange.communicator

    def share_state(self, root: int = 0, *, ranks: Communicator | None = None) -> None:
        """Give all ranks the state of the rank `root`; every rank calls this.

        Args:
            root: the number of the rank.
            ranks: the ranks; by default those that are attached.
        """
        group = self._exchange.communicator if ranks is None else ranks
        with self._module.lock:
            arrays = self._collected()
            for array in arrays:
                group.broadcast(array, root)
            self._invoke("import_state", arrays)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the optimizer's state, so that methods which read it are collective."""
        return bool(self.manifest.shards) and self._module.exchange is not None

    @property
    def traffic(self) -> Traffic:
        """What this rank has exchanged since it was attached."""
        return self._exchange.traffic

    @property
    def _exchange(self) -> Exchange:
        if self._module.exchange is None:
            raise UserError("no ranks are attached; call attach first")
        return self._module.exchange

    # --- calls ----------------------------------------------------------------------------------------------------

    @overload
    def call(self, name: str, arguments: Mapping[str, Any], /) -> list[Array]: ...

    @overload
    def call(self, name: str, /, **arguments: Any) -> Array | dict[str, Array]: ...

    def call(
        self, name: str, given: Mapping[str, Any] | None = None, /, **arguments: Any
    ) -> list[Array] | Array | dict[str, Array]:
        """Call an entry point with inputs and hyperparameters by name, such as `session.call("act", obs=obs)`.

        Args:
            name: the entry point: one of the user's own (`TrainStep.entries`), or any other.
            given: the arguments in one mapping, in place of `arguments`.
            arguments: the arguments.

        Returns:
            The output: an array, or a dictionary if there are several. If the arguments are a mapping, a list of all
            outputs in order.

        Raises:
            GuardError: an argument is missing, unknown, or not what the step was compiled for.
            UserError: there is no such entry point.
        """
        return self._outputs(name, arguments) if given is None else self._call(name, {**given, **arguments})

    def _outputs(self, name: str, arguments: Mapping[str, Any]) -> Array | dict[str, Array]:
        outputs = self._call(name, arguments)
        names = [s.name for s in self.entry(name).outputs]
        return outputs[0] if len(outputs) == 1 else dict(zip(names, outputs, strict=True))

    def _call(self, name: str, arguments: Mapping[str, Any]) -> list[Array]:
        entry = self.entry(name)
        if entry.step != self.step_name and entry.step:
            return self.step(entry.step)._call(entry.name, arguments)
        if self.is_sharded and name in ("export_state", TRAIN_AND_EXPORT):
            raise UserError(f"{name} returns state of which other ranks hold a part; Session.state() collects it")
        exchange = self._module.exchange if self._is_collective(name) else None
        if exchange is None:
            return self._run(entry, arguments)
        with self._module.lock, exchange.call():
            return self._run(entry, arguments, exchange)

    def _is_collective(self, name: str) -> bool:
        return name in EXCHANGED or (name == "grad_step" and self.step_name in self.manifest.statistics)

    def _run(self, entry: EntryPoint, arguments: Mapping[str, Any], exchange: Exchange | None = None) -> list[Array]:
        remaining = dict(arguments)
        inputs = [take(remaining, spec.name, entry) for spec in entry.inputs]
        hypers = [self._hyper(remaining, h) for h in entry.hypers]
        refuse_leftovers(remaining, entry, self.manifest)
        if self._strict:
            check_finite(entry, inputs)
        if entry.is_stacked:
            numbers: Sequence[Any] = per_step(entry, inputs, hypers, self._infinite)
            values = [*as_steps(entry, inputs), *numbers]
        else:
            numbers = [as_number(entry, n, v, self._infinite) for n, v in zip(entry.hypers, hypers, strict=True)]
            values = [*inputs, *numbers]
        if exchange is not None:
            exchange.expect(entry.symbol, [*numbers, np.shape(values[0])[0] if entry.is_stacked else 1])
        if entry.name == "train_steps" and exchange is None:
            return self._train_steps(values)
        return self._module.call(entry, values)

    def _train_steps(self, values: list[Any]) -> list[Array]:
        def report(losses: Array, first: int) -> None:
            self._report("train_steps", losses, first)

        with self._module.lock:
            return train_steps(self._module, self.manifest, values, self._pace, report)

    def _loss(self, name: str, arguments: Mapping[str, Any], *, trains: bool = True) -> Any:
        loss, *values = self._call(name, arguments)
        if trains:
            self._report(name, loss)
        if not values:
            return float(loss)
        return float(loss), {n: v.item() for n, v in self._named(name, values).items()}

    def _named(self, entry: str, values: Sequence[Array]) -> dict[str, Array]:
        """The values beside the loss, by name."""
        return dict(zip([s.name for s in self.entry(entry).outputs[1:]], values, strict=True))

    def _report(self, name: str, losses: Array, first: int = 0) -> None:
        if not self._scaled:  # a loss scale skips the update of a step that overflows, which is no accident
            self._check.losses(name, losses, first)

    def _became_nonfinite(self, names: Sequence[str]) -> list[str]:
        """Those of the names whose tensors were finite when the artifact was compiled; a mask may hold infinities."""
        try:
            initial = self.initial_state() if names else {}
        except ArtifactError:  # nothing tells which were finite
            return list(names)
        return [n for n in names if n not in initial or is_finite(initial[n])]

    def entry(self, name: str) -> EntryPoint:
        """Return the signature of an entry point.

        Raises:
            UserError: there is none of this name.
        """
        try:
            return self._entries[name]
        except KeyError:
            if (found := self.manifest.exported(name)) is not None:
                return found
            if having := [s for s in self.manifest.steps if self.manifest.exported(f"{s}.{name}")]:
                called = ", ".join(f"{s}.{name}" for s in having)
                raise UserError(
                    f"each step has {name} of its own: {called}; in Python, session.step({having[0]!r}) has it"
                ) from None
            raise UserError(
                f"this artifact has no entry point {name!r}; it has {', '.join(self._exported())}. Entry points are "
                "chosen at compile time"
            ) from None

    def _invoke(self, name: str, values: Sequence[Any]) -> list[Array]:
        return self._module.call(self.entry(name), values)

    def _exported(self) -> list[str]:
        return list(self._entries) if self.step_name else [e.symbol for e in self.manifest.all_entry_points]

    def _hyper(self, remaining: dict[str, Any], name: str) -> Any:
        if name in remaining:
            return remaining.pop(name)
        base, _, group = name.rpartition("_")
        if group.isdigit() and base in remaining:
            return remaining[base]  # a name without a group number means every group
        return self._defaults[name]
