"""A callback that records a training run with trackio (the extra `trackio`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from irongrad.runtime.errors import UserError
from irongrad.training.events import Started
from irongrad.training.tracker import Tracker


class Trackio(Tracker):
    """A callback that records metrics in a run of trackio, in a database on this machine (`TRACKIO_DIR`)."""

    def __init__(self, project: str, *, run: str | None = None) -> None:
        """
        Args:
            project: the name of the project.
            run: the name of the run, which goes on if it is there; by default a new one.

        Raises:
            UserError: the package trackio is missing.
        """
        try:
            import trackio
        except ModuleNotFoundError:
            raise UserError("trackio is not installed: pip install 'irongrad[trackio]'") from None
        self._trackio, self._project, self._name = trackio, project, run
        self._run: Any = None

    def _begin(self, started: Started) -> None:
        with redirect_stdout(sys.stderr):  # where it says what it does; our output may be JSON
            self._run = self._trackio.init(
                self._project, self._name, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
            )

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def _flush(self) -> None:
        """Its own thread writes."""

    def close(self) -> None:
        """Wait until everything is written, and end the run."""
        if self._run is not None:
            with redirect_stdout(sys.stderr):
                self._trackio.finish()
            self._run = None
