"""The progress line of `irongrad train`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.progress import Progress, ProgressColumn, Task, TaskID
from rich.text import Text

from irongrad.cli.common import console
from irongrad.training.events import EpochEnded, Evaluated, Event, Started, Stepped

_SHORTEST_BAR, _LONGEST_BAR = 5, 40
# The texts behind the bar, by the names of the task's fields.
_TEXTS = ("means", "evaluated", "pace", "left")


class Display:
    """A callback that shows the progress of each epoch: the loss, samples a second, and the time to the end."""

    def __init__(self, epochs: int | None, *, quiet: bool) -> None:
        """
        Args:
            epochs: the number of epochs that are still to end, if training ends with one.
            quiet: whether to show nothing.
        """
        self._epochs, self._quiet = epochs, quiet
        self._progress = Progress(_Line(), console=console, disable=quiet)
        self._task: TaskID | None = None

    def __enter__(self) -> Display:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)

    def __call__(self, event: Event, /) -> None:
        """Show the event."""
        if self._quiet:
            return
        if isinstance(event, Started):
            self._started, self._begun, self._samples = event, time.monotonic(), 0
            self._batch = event.batch
        elif isinstance(event, Stepped):
            self._stepped(event)
        elif isinstance(event, Evaluated) and self._task is not None:
            self._progress.update(self._task, evaluated=f"validation {_shown({'loss': event.loss, **event.values})}")
        elif isinstance(event, EpochEnded):
            self._task, self._batch = None, 0

    def _stepped(self, step: Stepped) -> None:
        if self._task is None:
            self._task = self._added_task(step.epoch)
            self._sums: dict[str, float] = {}
            self._count = 0
        for name, value in {"loss": step.loss, **step.values}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._count += 1
        self._samples += step.samples
        seconds = max(time.monotonic() - self._begun, 1e-9)
        rest = (self._started.last or step.step) - step.step
        left = f"{_duration(rest * seconds / (step.step - self._started.step))} left" if rest else ""
        means = _shown({name: value / self._count for name, value in self._sums.items()})
        pace = f"{self._samples / seconds:,.0f} samples/s"
        self._progress.update(self._task, advance=1, means=means, pace=pace, left=left)

    def _added_task(self, epoch: int) -> TaskID:
        total = "" if self._epochs is None else f"/{self._started.epoch + self._epochs}"
        texts: dict[str, Any] = dict.fromkeys(_TEXTS, "")
        return self._progress.add_task(
            f"epoch {epoch + 1}{total}", total=self._started.per_epoch, completed=self._batch, **texts
        )


class _Line(ProgressColumn):
    """A task in one line of the terminal's width: what matters least is left out where there is no room."""

    def render(self, task: Task) -> Text:
        """Write the line."""
        count = f"{int(task.completed)}" + ("" if task.total is None else f"/{int(task.total)}")
        means, evaluated, pace, left = (task.fields[n] for n in _TEXTS)
        for shown in ([means, evaluated, pace, left], [means, evaluated, left], [means, evaluated]):
            after = "  ".join([count, *filter(None, shown)])
            room = console.width - len(task.description) - len(after) - 1
            if room >= 0:
                break
        line = Text(task.description, no_wrap=True, overflow="ellipsis")
        length = min(room - 1, _LONGEST_BAR)
        if length >= _SHORTEST_BAR and task.total is not None:
            done = round(length * min(task.completed / max(task.total, 1), 1.0))
            line.append(" ").append("━" * done, "bar.complete").append("━" * (length - done), "bar.back")
        return line.append(f" {after}")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _shown(means: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in means.items())
