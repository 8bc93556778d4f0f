"""TD3 on a pendulum, after CleanRL's td3_continuous_action.py: `python examples/scripts/td3.py`."""

import copy

import numpy as np
import torch
from pendulum import Pendulum, Replay, TwinCritics
from torch import nn
from torch.nn import functional as F

import irongrad as ig


def make_step(batch: int = 128, width: int = 128) -> ig.Steps:
    torch.manual_seed(1)
    qf = TwinCritics(width)
    actor = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 1), nn.Tanh())
    targets = {"target_qf": copy.deepcopy(qf), "target_actor": copy.deepcopy(actor)}

    def qf_loss(q_values: tuple[torch.Tensor, torch.Tensor], rewards, next_observations) -> torch.Tensor:
        with torch.no_grad():
            next_actions = targets["target_actor"](next_observations)
            noise = (torch.randn_like(next_actions) * 0.2).clamp(-0.5, 0.5)
            next_q = torch.min(*targets["target_qf"](next_observations, (next_actions + noise).clamp(-1, 1)))
        return sum(F.mse_loss(q, rewards + 0.99 * next_q) for q in q_values)

    def update_targets(tau: float = 0.005) -> None:
        for slow, fast in ((targets["target_qf"], qf), (targets["target_actor"], actor)):
            for target_param, param in zip(slow.parameters(), fast.parameters(), strict=True):
                target_param.data.copy_(tau * param.data + (1 - tau) * target_param.data)

    obs, some, q_optimizer = torch.randn(batch, 3), torch.zeros(batch), torch.optim.Adam(qf.parameters(), lr=1e-3)
    data = {"observations": obs, "actions": some[:, None], "rewards": some, "next_observations": obs}
    policy = ig.TrainStep(
        actor, lambda actions, observations: -qf(observations, actions)[0].mean(),
        torch.optim.Adam(actor.parameters(), lr=1e-3), {"observations": obs}, loss_inputs=["observations"],
        modules=targets, after_step=update_targets, entries={"act": (actor, {"obs": obs[:1]})},
    )  # fmt: skip
    return ig.Steps({"critic": ig.TrainStep(qf, qf_loss, q_optimizer, data, modules=targets), "actor": policy})


def train(session, steps: int = 8000, starts: int = 1000, batch: int = 128) -> list[float]:
    env, rng, replay = Pendulum(seed=1), np.random.default_rng(1), Replay(seed=1)
    for step in range(steps):
        obs, explored = env.observation, rng.uniform(-1, 1, (1, 1))
        action = explored if step < starts else np.clip(session.call("act", obs=obs) + explored / 6, -1, 1)
        next_obs, reward = env.step(2 * action)
        replay.add(
            observations=obs[0], actions=action[0], rewards=np.float32(reward / 10), next_observations=next_obs[0]
        )
        if step >= starts:
            session.train_step(step="critic", **(data := replay.sample(batch)))
            if step % 2 == 0:
                session.train_step(step="actor", observations=data["observations"])
    return env.returns


if __name__ == "__main__":
    print(np.round(train(ig.compile(make_step(), "build/td3").load())))
