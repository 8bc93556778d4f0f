"""`server`: a ServerApp that trains an artifact's parameters with a strategy of Flower."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, cast

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy

from irongrad.distributed.averaging import averaged, check_momentum
from irongrad.distributed.group import refuse_momentum
from irongrad.integrations.flower.checked_grid import CheckedGrid
from irongrad.integrations.flower.diloco import DiLoCo
from irongrad.integrations.flower.records import record_of, training_entry
from irongrad.runtime import checkpoint as checkpoints
from irongrad.runtime.arguments import as_number, as_path, check_whole, infinite_hypers, refuse_leftovers
from irongrad.runtime.arrays import Array
from irongrad.runtime.checkpoint import OUTER
from irongrad.runtime.initial_state import state_of
from irongrad.runtime.manifest import Manifest
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.safetensors_file import opened

Item = TypeVar("Item")
# The run's configuration: that of the app's pyproject.toml, with the changes of `flwr run --run-config`.
RunConfig: TypeAlias = Mapping[str, Any]
PathOf: TypeAlias = str | os.PathLike[str] | Callable[[RunConfig], str | os.PathLike[str]]


def server(
    artifact: PathOf,
    strategy: Strategy | Callable[[RunConfig], Strategy],
    *,
    rounds: int = 3,
    hypers: Mapping[str, float] = MappingProxyType({}),
    start: PathOf | None = None,
    checkpoint: PathOf | None = None,
    timeout: float = 3600.0,
) -> ServerApp:
    """Return a ServerApp that trains the parameters of an artifact over clients of `irongrad.integrations.flower`.

    Clients may join and leave between rounds. A client that fails, or whose parameters are those of another model or
    not finite, is left out of the round, with the reason in the log.

    Args:
        artifact: the directory of the artifact. This, the strategy and the checkpoints may be functions of the run's
            configuration.
        strategy: a strategy of Flower, such as FedAvg or FedProx, or `DiLoCo`.
        rounds: the number of rounds; `num-server-rounds` in the run's configuration comes before it.
        hypers: hyperparameters of the clients' steps that differ from the compiled defaults.
        start: a checkpoint to begin with in place of the artifact's initial state.
        checkpoint: a file to which the parameters go after each round. `irongrad.runtime.load`, `irongrad export` and
            `start` take it. The state that stays with the clients is in it as the artifact has it at the beginning.
        timeout: the number of seconds to wait for the clients in a round.

    Raises:
        UserError: an argument is not what it should be. All other errors end the run: the artifact cannot be trained or
            its parameters cannot be averaged, or no client could train in a round.
    """
    run = _Server(artifact, strategy, check_whole("rounds", rounds, 1), hypers, start, checkpoint, timeout)
    app = ServerApp()
    app.main()(run.run)
    return app


@dataclass(frozen=True)
class _Server:
    """A run of a federation; see `server`."""

    artifact: PathOf
    strategy: Strategy | Callable[[RunConfig], Strategy]
    rounds: int
    hypers: Mapping[str, float]
    start: PathOf | None
    checkpoint: PathOf | None
    timeout: float

    def run(self, grid: Grid, context: Context) -> None:
        """Run the rounds."""
        config = context.run_config
        directory = as_path(_for_run(self.artifact, config), "the directory of an artifact")
        start, checkpoint = (_for_run(given, config) for given in (self.start, self.checkpoint))
        manifest, strategy = read_manifest(directory), _for_run(self.strategy, config)
        hypers = _checked_hypers(self.hypers, manifest)
        state = state_of(manifest, directory)
        if start is not None:
            state |= _restored(as_path(start, "start"), manifest, strategy)
        save = None if checkpoint is None else _Saver(as_path(checkpoint, "checkpoint"), state, manifest, strategy)
        strategy.start(
            cast(Grid, CheckedGrid(grid, manifest)),
            record_of(state, averaged(manifest)),
            check_whole("num-server-rounds", config.get("num-server-rounds", self.rounds), 1),
            self.timeout,
            train_config=ConfigRecord(hypers),
            evaluate_fn=save,
        )


def _checked_hypers(hypers: Mapping[str, float], manifest: Manifest) -> dict[str, float]:
    """The hyperparameters as numbers that a client's step takes.

    Raises:
        GuardError: the artifact has no such training step, or one is unknown, or no number.
    """
    entry = training_entry(manifest)
    refuse_leftovers(hypers, entry, manifest)
    return {n: as_number(entry, n, value, infinite_hypers(manifest)) for n, value in hypers.items()}


def _restored(path: Path, manifest: Manifest, strategy: Strategy) -> dict[str, Array]:
    """The state in a checkpoint; a strategy with an outer optimizer takes the momentum in it.

    Raises:
        ArtifactError: the checkpoint is missing or damaged, or of another model.
        UserError: it has a momentum for which the strategy has no use.
    """
    with opened(path) as file:
        momentum = {n.removeprefix(OUTER): file.array(n) for n in file.header.tensors if n.startswith(OUTER)}
    if not isinstance(strategy, DiLoCo):
        refuse_momentum(momentum)
    elif momentum:
        check_momentum(momentum, averaged(manifest))
        strategy.momentum = momentum
    return checkpoints.read(path, manifest)


@dataclass(frozen=True)
class _Saver:
    """Writes a checkpoint; Flower calls it with the parameters at the beginning and after each round.

    Attributes:
        state: the state of which the parameters are a part.
    """

    path: Path
    state: Mapping[str, Array]
    manifest: Manifest
    strategy: Strategy

    def __call__(self, _: int, record: ArrayRecord) -> None:
        """Write the parameters, and the momentum of an outer optimizer."""
        arrays = {name: array.numpy() for name, array in record.items()}
        momentum = self.strategy.momentum if isinstance(self.strategy, DiLoCo) else {}
        beside = {f"{OUTER}{name}": array for name, array in momentum.items()}
        part = self.manifest.is_mostly_frozen
        checkpoints.write(
            self.path, {**self.state, **arrays}, self.manifest, finite=True, trainable=part, beside=beside
        )


def _for_run(given: Item | Callable[[RunConfig], Item], config: RunConfig) -> Item:
    """What is given, or what a function makes of the run's configuration."""
    return given(config) if callable(given) else given
