"""CartPole-v1 in numpy, several at once: the equations and limits of Barto, Sutton and Anderson (1983), as in Gym."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


class CartPole:
    """Poles on carts. An episode ends when a pole falls, a cart leaves the track, or after 500 steps.

    Attributes:
        returns: the rewards of every episode that has ended, in order.
    """

    def __init__(self, count: int, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._steps = np.zeros(count, int)
        self._state = self._start(count)
        self.returns: list[int] = []

    @property
    def observations(self) -> np.ndarray:
        """float32 [count, 4]: position, velocity, angle, angular velocity."""
        return self._state.astype(np.float32)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Push each cart to the left (0) or to the right (1).

        Returns:
            As Gymnasium: what is seen after the push, float32 [count, 4], which episodes are terminated and which are
            truncated, bool [count]. Both begin anew; `observations` are then those of the new episodes.
        """
        x, v, angle, spin = self._state.T
        force = np.where(actions == 1, 10.0, -10.0)
        push = (force + 0.05 * spin**2 * np.sin(angle)) / 1.1
        turn = (9.8 * np.sin(angle) - np.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
        speedup = push - 0.05 * turn * np.cos(angle) / 1.1
        self._state = np.stack([x + 0.02 * v, v + 0.02 * speedup, angle + 0.02 * spin, spin + 0.02 * turn], axis=1)
        self._steps += 1
        seen = self.observations
        fallen = (np.abs(self._state[:, 0]) > 2.4) | (np.abs(self._state[:, 2]) > 12 * 2 * np.pi / 360)
        truncated = ~fallen & (self._steps == 500)
        ended = fallen | truncated
        self.returns += self._steps[ended].tolist()
        self._steps[ended] = 0
        self._state[ended] = self._start(int(ended.sum()))
        return seen, fallen, truncated

    def _start(self, count: int) -> np.ndarray:
        return self._rng.uniform(-0.05, 0.05, (count, 4))


def advantages(after: Mapping[str, np.ndarray], data: Mapping[str, np.ndarray]) -> np.ndarray:
    """Generalised advantages of steps with the reward 1, with a discount of 0.99 and a decay of 0.95.

    Args:
        after: `value` after the last step, float32 [count].
        data: `value` before each step, float32 [steps, count], and `goes_on`, 0 where an episode ended with the step.
    """
    found, last, value = np.zeros_like(data["value"]), np.float32(0), after["value"]
    for t in reversed(range(len(found))):
        last = 1 + data["goes_on"][t] * (0.99 * value + 0.99 * 0.95 * last) - data["value"][t]
        found[t], value = last, data["value"][t]
    return found
