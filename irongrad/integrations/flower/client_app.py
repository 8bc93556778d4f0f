"""`client`: a ClientApp that trains an artifact on a node's own data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from irongrad.distributed.averaging import averaged
from irongrad.integrations.flower.proximal import proximal
from irongrad.integrations.flower.records import arrays_of, config_in, parameters_in, record_of, training_entry
from irongrad.runtime.arguments import as_path, check_whole, is_hyper
from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import NonFiniteError, UserError
from irongrad.runtime.manifest import Manifest, StateSpec
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.nonfinite import nonfinite_names
from irongrad.runtime.session import Session, load
from irongrad.training.evaluation import evaluate
from irongrad.training.events import Event, Stepped
from irongrad.training.loop import COMPLETE, train
from irongrad.training.means import Batch, mean_of, samples_in
from irongrad.training.position import position_of
from irongrad.training.sources import Source, source_of

Item = TypeVar("Item")
# The node's configuration: what `flower-supernode --node-config` says.
NodeConfig: TypeAlias = Mapping[str, Any]
Data: TypeAlias = Source | Iterable[Batch]
# The name of the record in Flower's context that keeps a client's own state from round to round.
KEPT = "irongrad"


def client(
    artifact: str | os.PathLike[str] | Callable[[NodeConfig], str | os.PathLike[str]],
    data: Data | Callable[[NodeConfig], Data],
    *,
    held_out: Iterable[Batch] | Callable[[NodeConfig], Iterable[Batch]] | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    hypers: Mapping[str, float] = MappingProxyType({}),
    device: str | None = None,
    mods: Sequence[Any] = (),
) -> ClientApp:
    """Return a ClientApp that trains an artifact on a node's own data.

    In each round it takes the server's parameters, trains, and sends its own parameters back under PyTorch's names:
    those that training changes, and the buffers of floats. The optimizer's state, counters, the state of random numbers
    and all other buffers stay with the node. Flower keeps them from round to round, until the run or the supernode
    ends; after that they begin anew.

    The server's configuration may have hyperparameters by name, such as `lr`, and `proximal-mu` of FedProx. Its other
    keys have no meaning here.

    Args:
        artifact: the directory of the artifact, or a function of the node's configuration that returns it.
        data: the training data, as `irongrad.training.train` takes it, or a function of the node's configuration that
            returns it. Each round goes on in the order where the round before ended.
        held_out: batches to evaluate the server's parameters on, or a function of the node's configuration.
        epochs: the number of epochs in a round; 1 if neither `epochs` nor `steps` is given.
        steps: the number of steps in a round.
        hypers: hyperparameters that differ from the compiled defaults; the server's come before these.
        device: the IREE device; see `irongrad.runtime.load`.
        mods: Flower's mods.

    Raises:
        UserError: a number is out of its range. All other errors are those of a round, which the server reports: the
            artifact cannot be trained, or the server's parameters are those of another model, or NaN.
    """
    if epochs is not None and steps is not None:
        raise UserError("a round has a number of epochs or a number of steps: give one of them")
    length = (
        check_whole("steps", steps, 1)
        if steps is not None
        else check_whole("epochs", 1 if epochs is None else epochs, 1)
    )
    node = _Client(artifact, data, held_out, length, steps is None, hypers, device)
    app = ClientApp(mods=list(mods))
    app.train()(node.train)
    app.evaluate()(node.evaluate)
    return app


@dataclass(frozen=True)
class _Client:
    """A node's part in a federation; see `client`.

    Attributes:
        length: the number of epochs, or of steps, in a round.
        by_epochs: whether `length` counts epochs.
    """

    artifact: str | os.PathLike[str] | Callable[[NodeConfig], str | os.PathLike[str]]
    data: Data | Callable[[NodeConfig], Data]
    held_out: Iterable[Batch] | Callable[[NodeConfig], Iterable[Batch]] | None
    length: int
    by_epochs: bool
    hypers: Mapping[str, float]
    device: str | None

    def train(self, message: Message, context: Context) -> Message:
        """Train for a round, and reply with the parameters, the mean loss and the number of samples."""
        with self._session(context) as session:
            manifest, config = session.manifest, config_in(message.content)
            key, arrays = parameters_in(message.content, manifest, "the server")
            _load(session, arrays, context)
            made: list[Stepped] = []
            result = train(
                session,
                source := source_of(_for_node(self.data, context)),
                epochs=self.length if self.by_epochs else None,
                steps=None if self.by_epochs else _last_step(session, source, self.length),
                hypers={**self.hypers, **_hypers_in(config, manifest)},
                before_update=proximal(config.get("proximal-mu", 0.0), arrays, session),
                callbacks=[_recorder(made)],
            )
            state = session.state()
        if result.reason != COMPLETE:
            raise UserError(f"the client was told to stop in the middle of a round ({result.reason})")
        if bad := nonfinite_names({s.name: state[s.name] for s in averaged(manifest)}):
            raise NonFiniteError(f"training made {', '.join(bad[:4])} NaN or infinite; lower the learning rate")
        context.state[KEPT] = record_of(state, _kept(manifest))
        samples = [step.samples for step in made]
        means = mean_of([{"loss": step.loss, **step.values} for step in made], samples)
        content = {key: record_of(state, averaged(manifest)), "metrics": _metrics(means, sum(samples))}
        return Message(RecordDict(content), reply_to=message)

    def evaluate(self, message: Message, context: Context) -> Message:
        """Evaluate the server's parameters, and reply with the mean loss and the number of samples."""
        if self.held_out is None:
            raise UserError(
                "this client has no held-out data: give held_out to irongrad's client, or fraction_evaluate=0.0 to the "
                "server's strategy"
            )
        with self._session(context) as session:
            _load(session, parameters_in(message.content, session.manifest, "the server")[1], context)
            sizes: list[int] = []
            means = evaluate(session, _counted(_for_node(self.held_out, context), sizes))
        if not sizes:
            raise UserError("this client's held-out data has no batch")
        return Message(RecordDict({"metrics": _metrics(means, sum(sizes))}), reply_to=message)

    def _session(self, context: Context) -> Session:
        directory = as_path(_for_node(self.artifact, context), "the directory of an artifact")
        training_entry(read_manifest(directory))
        return load(directory, device=self.device, on_nonfinite="stop")


def _for_node(given: Item | Callable[[NodeConfig], Item], context: Context) -> Item:
    """What is given, or what a function makes of the node's configuration."""
    return given(context.node_config) if callable(given) else given


def _kept(manifest: Manifest) -> list[StateSpec]:
    """The state that training changes and no server sees."""
    sent = {s.name for s in averaged(manifest)}
    return [s for s in manifest.state if not s.frozen and s.name not in sent]


def _load(session: Session, arrays: Mapping[str, Array], context: Context) -> None:
    """Put the server's parameters into a session, and beside them the state that the node kept."""
    record = context.state.array_records.get(KEPT)
    kept = {} if record is None else arrays_of(record, _kept(session.manifest))
    session.update_state({**kept, **arrays})


def _last_step(session: Session, source: Source, steps: int) -> int:
    """The number of the last step of a round.

    Raises:
        UserError: nothing says where in the data the next round goes on.
    """
    if source.steps is None:
        raise UserError(
            "the client's data has no length, so each round would begin at its first batches again: give epochs in "
            "place of steps, or data with a length"
        )
    return position_of(session).step + steps


def _hypers_in(config: ConfigRecord, manifest: Manifest) -> dict[str, Any]:
    """The hyperparameters in the server's configuration."""
    entry = training_entry(manifest)
    return {name: value for name, value in config.items() if is_hyper(name, entry) or name in manifest.fixed}


def _counted(batches: Iterable[Batch], sizes: list[int]) -> Iterator[Batch]:
    """The batches as they are; their sizes are appended to a list."""
    for batch in batches:
        sizes.append(samples_in(batch))
        yield batch


def _recorder(made: list[Stepped]) -> Callable[[Event], None]:
    """A callback that lists the steps of a round."""

    def record(event: Event) -> None:
        if isinstance(event, Stepped):
            made.append(event)

    return record


def _metrics(means: Mapping[str, float], samples: int) -> MetricRecord:
    return MetricRecord({**means, "num-examples": samples})
