"""An exponential moving average of the trained parameters, beside the state of a session."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.checkpoint import AVERAGE
from irongrad.runtime.errors import ArtifactError, UserError
from irongrad.runtime.manifest import Manifest, Role
from irongrad.runtime.safetensors_file import numpy_dtype

if TYPE_CHECKING:
    from irongrad.runtime.session import Session


class MovingAverage:
    """The exponential moving average of the trained parameters of a session.

    After each step it is `decay * average + (1 - decay) * parameter`, from the parameters after the first step on, as
    `torch.optim.swa_utils.AveragedModel` computes it with `get_ema_multi_avg_fn(decay)`. Averages of parameters in 16
    bits or fewer are kept in float32.
    """

    def __init__(self, session: Session, decay: float, start: Mapping[str, Array]) -> None:
        """
        Args:
            session: the session.
            decay: the weight of the average so far, in a step.
            start: the averages with which a run goes on, by the parameter's name; empty at the beginning of a run.

        Raises:
            ArtifactError: the averages are those of other parameters.
            UserError: the decay is no number from 0 to 1, or the artifact has no `export_state` or `import_state`.
        """
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise UserError(f"ema is {decay!r:.60}: it must be a number from 0 to below 1, such as 0.999")
        for name in ("export_state", "import_state"):
            session.entry(name)
        self._session, self._rate = session, 1 - decay
        self._wanted = _averaged(session.manifest)
        if start and {n: (a.shape, a.dtype) for n, a in start.items()} != self._wanted:
            raise ArtifactError("the averages in the checkpoint are those of other parameters; take only its state")
        self._averages = {name: array.copy() for name, array in start.items()}

    @property
    def tensors(self) -> dict[str, Array]:
        """The averages by the names that they have in a checkpoint."""
        return {f"{AVERAGE}{name}": array for name, array in self._averages.items()}

    def update(self) -> None:
        """Take the parameters after a step into account."""
        now = self._session.state(self._wanted)
        if not self._averages:
            self._averages = {name: now[name].astype(dtype) for name, (_, dtype) in self._wanted.items()}
            return
        for name, average in self._averages.items():
            average += average.dtype.type(self._rate) * (now[name].astype(average.dtype) - average)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averages in the parameters' place in the session, and the parameters back at the end."""
        own = self._session.state(self._wanted)
        self._put({name: array.astype(own[name].dtype) for name, array in self._averages.items()})
        try:
            yield
        finally:
            self._put(own)

    def _put(self, parameters: Mapping[str, Array]) -> None:
        self._session.update_state(parameters)


def _averaged(manifest: Manifest) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """The shapes and the dtypes of the averages, by the parameter's name; of several steps, those that this one trains.

    An artifact that accumulates no gradients does not list the parameters that have one.
    """
    trained = set(manifest.gradients) or {s.name for s in manifest.state if s.role is Role.PARAMETER and not s.frozen}
    of_state = [s for s in manifest.state if s.name in trained]
    return {s.name: (s.shape, np.promote_types(numpy_dtype(s.dtype), np.float32)) for s in of_state}
