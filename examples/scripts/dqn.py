"""Deep Q-learning on CartPole, after CleanRL's dqn.py: `python examples/scripts/dqn.py`."""

import copy

import numpy as np
import torch
from cartpole import CartPole
from torch import nn
from torch.nn import functional as F

import irongrad as ig


def make_step(batch: int = 128, width: int = 84, every: int = 100) -> ig.TrainStep:
    torch.manual_seed(1)
    q_network = nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, width), nn.ReLU(), nn.Linear(width, 2))
    target_network = copy.deepcopy(q_network)

    def loss(q_values: torch.Tensor, actions, rewards, next_obs, dones) -> tuple[torch.Tensor, dict]:
        with torch.no_grad():
            target_max, _ = target_network(next_obs).max(dim=1)
            td_target = rewards + 0.99 * target_max * (1 - dones)
        old_val = q_values.gather(1, actions[:, None]).squeeze()
        return F.mse_loss(td_target, old_val), {"q_values": old_val.mean()}

    def update_target(q_network: nn.Module) -> None:
        target_network.load_state_dict(q_network.state_dict())

    obs, some = torch.randn(batch, 4), torch.zeros(batch)
    inputs = {"obs": obs, "actions": some.long(), "rewards": some, "next_obs": obs, "dones": some}
    return ig.TrainStep(
        q_network, loss, torch.optim.Adam(q_network.parameters(), lr=1e-3), inputs, modules={"target": target_network},
        after_step=ig.every(every, update_target),
        entries={"act": (lambda obs: q_network(obs).argmax(dim=1), {"obs": obs[:1]})},
    )  # fmt: skip


def train(session, steps: int = 25_000, starts: int = 1000, batch: int = 128) -> list[int]:
    env, rng = CartPole(1, seed=1), np.random.default_rng(1)
    replay = {"rewards": np.ones(steps, np.float32), "dones": np.zeros(steps, np.float32)}
    replay |= {"obs": np.zeros((steps, 4), np.float32), "next_obs": np.zeros((steps, 4), np.float32)}
    replay["actions"] = np.zeros(steps, np.int64)
    for step in range(steps):
        obs, epsilon = env.observations, max(1 - step / (0.4 * steps), 0.05)
        action = rng.integers(0, 2, 1) if rng.random() < epsilon else session.call("act", obs=obs)
        next_obs, terminated, _ = env.step(action)
        for name, value in {"obs": obs, "actions": action, "next_obs": next_obs, "dones": terminated}.items():
            replay[name][step] = value[0]
        if step >= starts and step % 4 == 0:
            rows = rng.integers(0, step + 1, batch)
            loss, values = session.train_step(**{name: array[rows] for name, array in replay.items()})
            if step % 1000 == 0:
                print(f"{step}: loss {loss:.3f}, Q {values['q_values']:.1f}, return {np.mean(env.returns[-20:]):.0f}")
    return env.returns


if __name__ == "__main__":
    train(ig.compile(make_step(), "build/dqn").load())
