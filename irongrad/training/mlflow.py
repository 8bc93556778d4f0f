"""A callback that records a training run with MLflow (the extra `mlflow`, whose package is mlflow-skinny)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from irongrad.runtime.errors import UserError
from irongrad.training.events import Started
from irongrad.training.tracker import Tracker

# A request to a server takes longer than a small step, so numbers wait for so many others (a request of MLflow holds
# 1000), or for so many seconds.
_MOST, _SECONDS = 1000, 5.0


class MLflow(Tracker):
    """A callback that records metrics in a run of MLflow, on the server that `MLFLOW_TRACKING_URI` names."""

    def __init__(self, experiment: str, *, run_id: str | None = None) -> None:
        """
        Args:
            experiment: the name of the experiment, which is made if there is none.
            run_id: the run to go on with; by default that of `MLFLOW_RUN_ID`, or a new one.

        Raises:
            UserError: the package is missing, or MLflow refuses the experiment or the run.
        """
        try:
            from mlflow.entities import Metric
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ModuleNotFoundError:
            raise UserError("MLflow needs the package mlflow-skinny: pip install 'irongrad[mlflow]'") from None
        self._metric, self._given = Metric, run_id or os.environ.get("MLFLOW_RUN_ID")
        self._waiting: list[Any] = []
        self._run: str | None = None
        try:
            self._client = MlflowClient()
            found = self._client.get_experiment_by_name(experiment)
            self._experiment = self._client.create_experiment(experiment) if found is None else found.experiment_id
            if self._given is not None:
                self._client.get_run(self._given)
        except MlflowException as error:
            raise UserError(f"MLflow: {error.message}") from None

    def _begin(self, started: Started) -> None:
        self._run = self._given or self._client.create_run(self._experiment).info.run_id
        self._client.update_run(self._run, status="RUNNING")
        self._handed_over = time.monotonic()

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        now = round(1000 * time.time())
        self._waiting += [self._metric(name, value, now, step) for name, value in numbers.items()]
        if len(self._waiting) > _MOST // 2 or time.monotonic() - self._handed_over > _SECONDS:
            self._flush()

    def _flush(self) -> None:
        for first in range(0, len(self._waiting), _MOST):
            self._client.log_batch(self._run, metrics=self._waiting[first : first + _MOST])
        self._waiting, self._handed_over = [], time.monotonic()

    def close(self) -> None:
        """Record what is left, and end the run."""
        if self._run is not None:
            self._flush()
            self._client.set_terminated(self._run)
            self._run = None
