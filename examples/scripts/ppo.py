"""Proximal policy optimisation on CartPole, after CleanRL's ppo.py: `python examples/scripts/ppo.py`."""

import numpy as np
import torch
from cartpole import CartPole, advantages
from torch import nn
from torch.distributions import Categorical

import irongrad as ig


class Agent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        self.actor = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, obs: torch.Tensor, action: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        probs, value = Categorical(logits=self.actor(obs)), self.critic(obs)[:, 0]
        action = probs.sample() if action is None else action
        return {"action": action, "logprob": probs.log_prob(action), "entropy": probs.entropy(), "value": value}


def loss_function(out: dict[str, torch.Tensor], logprob, advantage, returned) -> tuple[torch.Tensor, dict]:
    ratio, advantage = (out["logprob"] - logprob).exp(), (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    pg_loss, v_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)), (out["value"] - returned) ** 2
    return (pg_loss - 0.01 * out["entropy"] + 0.25 * v_loss).mean(), {"approx_kl": ((ratio - 1) - ratio.log()).mean()}


def make_step(batch: int = 128, envs: int = 4, width: int = 64) -> ig.TrainStep:
    torch.manual_seed(1)
    agent, obs, one = Agent(width), torch.randn(batch, 4), torch.randn(batch)
    inputs = {"obs": obs, "action": one.gt(0).long(), "logprob": -one.abs(), "advantage": one, "returned": one}
    optimizer, act = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5), (agent, {"obs": obs[:envs]})
    return ig.TrainStep(agent, loss_function, optimizer, inputs, clip_grad_norm=0.5, entries={"act": act})


def train(session, updates: int = 100, length: int = 128, batch: int = 128, envs: int = 4) -> list[int]:
    env, rng = CartPole(envs, seed=1), np.random.default_rng(1)
    for update in range(updates):
        lr, roll = 1e-3 * (1 - update / updates), []
        for _ in range(length):
            roll.append({"obs": env.observations, **session.call("act", obs=env.observations)})
            roll[-1]["goes_on"] = 1 - np.logical_or(*env.step(roll[-1]["action"])[1:])
        data = {name: np.stack([row[name] for row in roll]) for name in roll[0]}
        data["advantage"] = advantages(session.call("act", obs=env.observations), data)
        data["returned"] = data["advantage"] + data["value"]
        inputs = {n: a.reshape(-1, *a.shape[2:]) for n, a in data.items() if n not in ("value", "entropy", "goes_on")}
        for _ in range(4):
            for rows in rng.permutation(length * envs).reshape(-1, batch):
                loss, values = session.train_step(**{n: a[rows] for n, a in inputs.items()}, lr=lr)
            if values["approx_kl"] > 0.02:  # the policy has moved far enough
                break
        print(f"{update}: loss {loss:.3f}, KL {values['approx_kl']:.4f}, return {np.mean(env.returns[-20:]):.0f}")
    return env.returns


if __name__ == "__main__":
    train(ig.compile(make_step(), "build/ppo").load())
