"""`Pipeline`: the parts of a model on ranks of their own, which work on several micro-batches at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from irongrad.distributed.group import Group
from irongrad.distributed.one_forward_one_backward import one_forward_one_backward
from irongrad.runtime import checkpoint as checkpoints
from irongrad.runtime.arguments import as_number, infinite_hypers, refuse_leftovers, take
from irongrad.runtime.arrays import Array
from irongrad.runtime.chunks import leaves_range
from irongrad.runtime.errors import ArtifactError, GuardError, UserError
from irongrad.runtime.loaded_module import LoadedModule
from irongrad.runtime.manifest import COUNT, EARLY, Call, EntryPoint, Manifest, PartSpec, TensorSpec
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.nonfinite import nonfinite_names
from irongrad.runtime.opened_artifact import Asked, opened_artifact
from irongrad.runtime.placed_module import Held, called, checked_input, clear_gradients
from irongrad.runtime.ranks.mpi import MpiCommunicator, MpiRequest
from irongrad.runtime.refusals import range_of
from irongrad.runtime.safetensors_file import numpy_dtype

_NEEDED = ("grad_step", "apply_step", "export_state")


class Pipeline:
    """One stage of a model whose parts are on ranks of their own; every rank opens one and calls its methods alike.

    The stage of a rank is the part that computes at this place of the forward. Only this part is loaded.

    Attributes:
        manifest: the artifact's manifest.
        stage: the number of this rank's stage.
        stages: the names of the parts, in the order of the forward.
        most_in_flight: the most micro-batches whose values this stage has kept at a time.
    """

    def __init__(
        self, directory: str | os.PathLike[str], ranks: Any, *, checkpoint: str | os.PathLike[str] | None = None
    ) -> None:
        """
        Args:
            directory: an artifact that was compiled with `place`.
            ranks: a communicator of mpi4py with one rank for each part, such as `MPI.COMM_WORLD`.
            checkpoint: a checkpoint to start from; by default the artifact's initial state.

        Raises:
            ArtifactError: the artifact has no parts, its parts do not follow one another as stages do, or it is
                missing, damaged, or cannot run here.
            UserError: there are more or fewer ranks than parts, or they have different artifacts.
        """
        self._ranks = MpiCommunicator(ranks)
        self._group = Group(self._ranks)
        self.manifest = read_manifest(Path(directory))
        self.stages = stages_of(self.manifest)
        self.stage = self._ranks.rank
        if self._ranks.size != len(self.stages):
            raise UserError(f"{directory} has {len(self.stages)} parts, and there are {self._ranks.size} ranks")
        digests = self._ranks.gather(np.frombuffer(self.manifest.digest.encode(), np.uint8).copy())
        if (digests != digests[0]).any():
            raise UserError("the ranks have different artifacts")
        own = self.stages[self.stage]
        start = None if checkpoint is None else Path(checkpoint)
        asked = Asked(None, None, start, None, None, verifying=False, part=own)
        module = opened_artifact(Path(directory), asked).module
        assert isinstance(module, LoadedModule)
        self._module = module
        self._sent: list[tuple[MpiRequest, Array]] = []
        self._infinite = infinite_hypers(self.manifest)
        self.most_in_flight = 0

    def train_step(self, micro_batches: Sequence[Mapping[str, Any]], **hypers: Any) -> Any:
        """Train one step on several micro-batches, and return the mean of their losses on every rank.

        The update takes the mean of their gradients, as `Session.grad_step` for each and then `apply_step`.

        Args:
            micro_batches: the inputs of each micro-batch, by name. Every rank gives all of them.
            hypers: hyperparameters by name.

        Raises:
            GuardError: a rank refuses an input; then no rank has changed anything.
        """
        grad, apply = self._entry("grad_step"), self._entry("apply_step")
        given: list[dict[str, Any]] = []
        numbers: dict[str, float] = {}
        reason = None
        try:
            given = [self._inputs(grad, batch) for batch in micro_batches]
            numbers = self._hypers(apply, hypers)
            if not given:
                raise GuardError("train_step: there are no micro-batches")
        except GuardError as error:
            reason = error
        self._agree(reason, [float(len(given)), *numbers.values()])
        try:
            outputs = self._accumulated(grad, given)
            self._run(apply, {**numbers, COUNT: float(len(given))})
        finally:
            clear_gradients(self._module, self.manifest, self._part)
        return _reported(grad, [np.asarray(v) for v in np.mean(outputs, axis=0)])

    def eval_step(self, **inputs: Any) -> Any:
        """Return the loss in evaluation mode on every rank, as `Session.eval_step` does.

        Raises:
            GuardError: a rank refuses an input.
        """
        entry = self._entry("eval_step")
        given: dict[str, Any] = {}
        reason = None
        try:
            given = self._inputs(entry, inputs)
        except GuardError as error:
            reason = error
        self._agree(reason, [])
        known = self._run(entry, given)
        return _reported(entry, self._shared(entry, [known])[0])

    def state(self) -> dict[str, Array]:
        """Return the whole state on every rank, as `Session.state` does."""
        whole = dict(self._collected())
        return checkpoints.under_all_names([whole[s.name] for s in self.manifest.state], self.manifest)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole state to a checkpoint, which any artifact of the step takes; the first rank writes it."""
        state = self.state()
        if self.stage == 0:
            finite = not nonfinite_names({s.name: state[s.name] for s in self.manifest.state})
            checkpoints.write(Path(path), state, self.manifest, finite=finite)

    def close(self) -> None:
        """Free the part."""
        self._module.close()

    def _entry(self, name: str) -> EntryPoint:
        entry = self.manifest.entry_point(name)
        if entry is None:
            raise UserError(f"the artifact has no {name}; compile it with all entry points")
        return entry

    def _inputs(self, entry: EntryPoint, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of a micro-batch, checked: no rank computes before all ranks know that none refuses."""
        remaining = dict(batch)
        given = {s.name: checked_input(entry, s, take(remaining, s.name, entry)) for s in entry.inputs}
        refuse_leftovers(remaining, entry, self.manifest)
        for spec in entry.inputs:
            if leaves_range(spec, given[spec.name]):
                raise GuardError(f"{entry.symbol}: {range_of(spec)}")
        return given

    def _hypers(self, entry: EntryPoint, given: Mapping[str, Any]) -> dict[str, float]:
        refuse_leftovers(given, entry, self.manifest)
        defaults = {h.name: h.default for h in self.manifest.hypers}
        return {n: as_number(entry, n, given.get(n, defaults[n]), self._infinite) for n in entry.hypers}

    def _agree(self, refused: GuardError | None, numbers: Sequence[float]) -> None:
        """Refuse a call on all ranks if one refuses it, or if the ranks call it with other numbers."""
        said = self._group.agreed(str(refused) if refused is not None else None)
        if refused is not None:
            raise refused
        if said is not None:
            raise GuardError(f"another rank refuses the step: {said}")
        rows = self._ranks.gather(np.array(numbers, np.float64)) if numbers else np.zeros((1, 0))
        if not (rows == rows[0]).all():
            raise GuardError("the ranks take a step with different hyperparameters, or numbers of micro-batches")

    def _accumulated(self, entry: EntryPoint, batches: Sequence[Mapping[str, Any]]) -> list[list[Array]]:
        """Run forward and backward of all micro-batches; return the outputs of each."""
        program = self._program(entry)
        own = [number for number, call in enumerate(program) if call.part == self.stages[self.stage]]
        known: dict[int, dict[str, Any]] = {}
        done: list[dict[str, Any]] = [{} for _ in batches]
        for kind, number in one_forward_one_backward(self.stage, len(self.stages), len(batches)):
            values = known.setdefault(number, dict(batches[number]))
            self.most_in_flight = max(self.most_in_flight, len(known))
            self._call(entry, program, own[kind], values)
            if own[kind] == own[-1]:
                done[number] = {s.name: values[s.name] for s in entry.outputs if s.name in values}
                del known[number]
        self._wait_for_sent()
        return self._shared(entry, done)

    def _run(self, entry: EntryPoint, given: Mapping[str, Any]) -> dict[str, Any]:
        """Run an entry point once, one segment after the other."""
        program, values = self._program(entry), dict(given)
        for number, call in enumerate(program):
            if call.part == self.stages[self.stage]:
                self._call(entry, program, number, values)
        self._wait_for_sent()
        return values

    @property
    def _part(self) -> PartSpec:
        assert self.manifest.placement is not None
        return next(p for p in self.manifest.placement.parts if p.name == self.stages[self.stage])

    def _program(self, entry: EntryPoint) -> tuple[Call, ...]:
        assert self.manifest.placement is not None
        return self.manifest.placement.programs[entry.name]

    def _call(self, entry: EntryPoint, program: Sequence[Call], number: int, values: dict[str, Any]) -> None:
        """Receive what a call needs from other ranks, run it, and send what they need of it."""
        call = program[number]
        for spec in call.entry.inputs:
            if spec.name not in values:
                values[spec.name] = self._received(program, spec)
        made = called(self._module, entry, call, values)
        values |= made
        for spec in call.entry.outputs:
            for rank in self._readers(program, number, spec.name):
                self._send(np.ascontiguousarray(made[spec.name].on_host()), rank, _tag(program, spec.name))

    def _received(self, program: Sequence[Call], spec: TensorSpec) -> Array:
        maker = next(call for call in program if any(s.name == spec.name for s in call.entry.outputs))
        array = np.empty(tuple(map(int, spec.shape)), numpy_dtype(spec.dtype))
        self._ranks.receive(array, self.stages.index(maker.part), _tag(program, spec.name))
        return array

    def _readers(self, program: Sequence[Call], number: int, name: str) -> list[int]:
        """The ranks whose later calls read the value `name`."""
        own = self.stages[self.stage]
        parts = {c.part for c in program[number + 1 :] if c.part != own and any(s.name == name for s in c.entry.inputs)}
        return sorted(self.stages.index(part) for part in parts)

    def _send(self, array: Array, rank: int, tag: int) -> None:
        self._sent = [(request, held) for request, held in self._sent if not request.test()]
        self._sent.append((self._ranks.start_send(array, rank, tag), array))

    def _wait_for_sent(self) -> None:
        for request, _ in self._sent:
            self._ranks.wait(request)
        self._sent.clear()

    def _shared(self, entry: EntryPoint, found: Sequence[Mapping[str, Any]]) -> list[list[Array]]:
        """The outputs of an entry point for each of several calls, on all ranks; each is on one of them before."""
        program = self._program(entry)
        rows: list[list[Array]] = []
        for values in found:
            row: list[Array] = []
            for spec in entry.outputs:
                maker = next(c for c in program if any(s.name == spec.name for s in c.entry.outputs))
                root = self.stages.index(maker.part)
                mine = values[spec.name] if self.stage == root else None
                array = mine.on_host() if isinstance(mine, Held) else _empty(spec)
                row.append(self._broadcast(array, root))
            rows.append(row)
        return rows

    def _collected(self) -> Iterator[tuple[str, Array]]:
        """Every tensor of the state, with its name, from a rank that holds it."""
        assert self.manifest.placement is not None
        parts = {part.name: part.state for part in self.manifest.placement.parts}
        held = self._part.state
        specs = [TensorSpec(s.name, s.dtype, s.shape) for s in self.manifest.state]
        own = tuple(spec for spec in specs if spec.name in held)
        arrays = self._module.call(EntryPoint("export_state", (), (), own, ""), [])
        mine = dict(zip((s.name for s in own), arrays, strict=True))
        for spec in specs:
            root = next(number for number, part in enumerate(self.stages) if spec.name in parts[part])
            yield spec.name, self._broadcast(mine[spec.name] if self.stage == root else _empty(spec), root)

    def _broadcast(self, array: Array, root: int) -> Array:
        own = np.array(array, order="C")
        self._ranks.broadcast(own.reshape(-1).view(np.uint8), root)
        return own


def stages_of(manifest: Manifest) -> tuple[str, ...]:
    """The parts of a placed step in the order of its forward.

    Raises:
        ArtifactError: there are none, or a step does not go once through all of them and back.
    """
    if manifest.placement is None:
        raise ArtifactError("the artifact has no parts; compile it with place, one part for each rank")
    if missing := [name for name in _NEEDED if manifest.entry_point(name) is None]:
        raise ArtifactError(f"a pipeline needs {', '.join(missing)}; compile the artifact with all entry points")
    calls = manifest.placement.programs["grad_step"]
    order = [call.part for call in calls]
    stages = tuple(dict.fromkeys(order))
    if order != [*stages, *stages[-2::-1]] or len(stages) != len(manifest.placement.parts):
        raise ArtifactError(
            f"the parts are no stages of a pipeline: a step runs {' → '.join(order)}, and must go once through all "
            "parts and back. Name parts that follow one another in the forward"
        )
    for call in calls[len(stages) :]:
        if call.stores:
            raise ArtifactError(
                f"the backward of {call.part} changes {call.stores[0]!r}, which the forward of the next micro-batch "
                "has read before: this step cannot be a pipeline"
            )
    if any(index.how == EARLY for index in manifest.indices):
        raise ArtifactError("this step computes indices from its inputs, so a stage may refuse a step that others run")
    return stages


def _tag(program: Sequence[Call], name: str) -> int:
    """A number for the messages with the value `name`."""
    names = [spec.name for call in program for spec in call.entry.outputs]
    return names.index(name)


def _empty(spec: TensorSpec) -> Array:
    return np.empty(tuple(map(int, spec.shape)), numpy_dtype(spec.dtype))


def _reported(entry: EntryPoint, values: Sequence[Array]) -> Any:
    """The loss, and the values beside it by name if there are any."""
    loss, *others = (value.item() for value in values)
    return (loss, dict(zip([s.name for s in entry.outputs[1:]], others, strict=True))) if others else loss
