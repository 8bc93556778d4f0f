"""A WGAN with gradient penalty on a ring, after PyTorch-GAN's wgan_gp: `python examples/scripts/wgan_gp.py`."""

import numpy as np
import torch
from torch import nn

import irongrad as ig


def network(inputs: int, width: int, outputs: int) -> nn.Module:
    first, second, last = nn.Linear(inputs, width), nn.Linear(width, width), nn.Linear(width, outputs)
    return nn.Sequential(first, nn.LeakyReLU(0.2), second, nn.LeakyReLU(0.2), last)


def make_step(batch: int = 128, width: int = 64, lambda_gp: float = 0.1) -> ig.Steps:
    torch.manual_seed(1)
    generator, discriminator = network(4, width, 2), network(2, width, 1)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))

    def d_loss(real_validity: torch.Tensor, real_imgs, z) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        fake_imgs = generator(z).detach()
        alpha = torch.rand(len(real_imgs), 1)
        interpolates = (alpha * real_imgs + (1 - alpha) * fake_imgs).requires_grad_()
        validity = discriminator(interpolates)
        (gradients,) = torch.autograd.grad(validity, interpolates, torch.ones_like(validity), create_graph=True)
        penalty = ((gradients.norm(2, dim=1) - 1) ** 2).mean()
        distance = real_validity.mean() - discriminator(fake_imgs).mean()
        return lambda_gp * penalty - distance, {"distance": distance}

    def g_loss(fake_imgs: torch.Tensor) -> torch.Tensor:
        return -discriminator(fake_imgs).mean()

    real_imgs, z = torch.randn(batch, 2), torch.randn(batch, 4)
    given = {"model_inputs": ["real_imgs"], "loss_inputs": ["real_imgs", "z"]}
    critic = ig.TrainStep(discriminator, d_loss, optimizer_d, {"real_imgs": real_imgs, "z": z}, **given)
    faker = ig.TrainStep(generator, g_loss, optimizer_g, {"z": z}, entries={"sample": (generator, {"z": z})})
    return ig.Steps({"critic": critic, "generator": faker})


def train(session, steps: int = 600, batch: int = 128, n_critic: int = 5) -> float:
    rng = np.random.default_rng(1)
    for step in range(steps):
        for _ in range(n_critic):
            angle, z = rng.uniform(0, 2 * np.pi, batch), rng.standard_normal((batch, 4), np.float32)
            ring = np.float32(np.stack([np.cos(angle), np.sin(angle)], 1))
            _, values = session.train_step(step="critic", real_imgs=ring, z=z)
        session.train_step(step="generator", z=rng.standard_normal((batch, 4), np.float32))
        if step % 100 == 0:
            print(f"{step}: distance {values['distance']:.3f}")
    samples = session.call("sample", z=rng.standard_normal((batch, 4), np.float32))
    return float(np.linalg.norm(samples, axis=1).mean())


if __name__ == "__main__":
    print(f"mean radius {train(ig.compile(make_step(), 'build/wgan_gp').load()):.2f}")
