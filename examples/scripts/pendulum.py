"""What a script on Pendulum-v1 needs: the pendulum in numpy, as in Gym, a replay buffer, and critics."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


class Pendulum:
    """A pendulum that a torque from -2 to 2 swings up. An episode has 200 steps.

    Attributes:
        returns: the sum of the rewards of every episode that has ended, in order.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self.returns: list[float] = []
        self._begin()

    @property
    def observation(self) -> np.ndarray:
        """float32 [1, 3]: cosine and sine of the angle, and the angular velocity."""
        return np.float32([[np.cos(self._angle), np.sin(self._angle), self._speed]])

    def step(self, torque: np.ndarray) -> tuple[np.ndarray, float]:
        """Apply a torque, float32 [1, 1]; return what is seen after it, and the reward."""
        force, angle = float(np.clip(torque, -2, 2).item()), (self._angle + np.pi) % (2 * np.pi) - np.pi
        reward = -(angle**2 + 0.1 * self._speed**2 + 0.001 * force**2)
        self._speed = float(np.clip(self._speed + (15 * np.sin(self._angle) + 3 * force) * 0.05, -8, 8))
        self._angle += self._speed * 0.05
        self._sum += reward
        self._steps += 1
        seen = self.observation
        if self._steps == 200:
            self.returns.append(self._sum)
            self._begin()
        return seen, reward

    def _begin(self) -> None:
        self._angle, self._speed = (float(v) for v in self._rng.uniform([-np.pi, -1], [np.pi, 1]))
        self._steps, self._sum = 0, 0.0


class Replay:
    """Rows of arrays, drawn at random."""

    def __init__(self, seed: int) -> None:
        self._rows: list[dict[str, np.ndarray]] = []
        self._rng = np.random.default_rng(seed)

    def add(self, **row: np.ndarray) -> None:
        """Keep a row: arrays by name."""
        self._rows.append(row)

    def sample(self, count: int) -> dict[str, np.ndarray]:
        """Return `count` rows, stacked."""
        rows = [self._rows[i] for i in self._rng.integers(0, len(self._rows), count)]
        return {name: np.float32(np.stack([row[name] for row in rows])) for name in rows[0]}


class TwinCritics(nn.Module):
    """Two values of an observation and an action."""

    def __init__(self, width: int) -> None:
        super().__init__()
        made = [nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1), nn.Flatten(0)) for _ in range(2)]
        self.qf1, self.qf2 = made

    def forward(self, observations: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two values, each of shape [batch]."""
        x = torch.cat([observations, actions], 1)
        return self.qf1(x), self.qf2(x)
