"""A DCGAN on handwritten digits, after pytorch/examples/dcgan: `python examples/scripts/dcgan.py`."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import irongrad as ig


def make_step(batch: int = 64, nz: int = 16, width: int = 32) -> ig.Steps:
    torch.manual_seed(1)
    net_g = nn.Sequential(
        nn.ConvTranspose2d(nz, 2 * width, 4, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.ConvTranspose2d(2 * width, 1, 4, stride=2, padding=1), nn.Tanh(),
    )  # fmt: skip
    net_d = nn.Sequential(
        nn.Conv2d(1, width, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
        nn.Conv2d(width, 1, 4, bias=False), nn.Flatten(0),
    )  # fmt: skip
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=5e-4, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=1e-3, betas=(0.5, 0.999))

    def err_d(real: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        fake = net_d(net_g(noise).detach())
        loss = F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
        return loss + F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake)), {"D(x)": real.sigmoid().mean()}

    def err_g(fake: torch.Tensor) -> torch.Tensor:
        output = net_d(fake)
        return F.binary_cross_entropy_with_logits(output, torch.ones_like(output))

    images, noise = torch.rand(batch, 1, 8, 8), torch.randn(batch, nz, 1, 1)
    entries = {"sample": (net_g, {"noise": noise[:4]})}
    both = {"images": images, "noise": noise}
    discriminator = ig.TrainStep(net_d, err_d, optimizer_d, both, model_inputs=["images"])
    return ig.Steps(
        {"D": discriminator, "G": ig.TrainStep(net_g, err_g, optimizer_g, {"noise": noise}, entries=entries)}
    )


def train(session, epochs: int = 20, batch: int = 64, nz: int = 16) -> None:
    images, rng = np.float32(load_digits().images / 8 - 1)[:, None], np.random.default_rng(1)
    for epoch in range(epochs):
        order = rng.permutation(len(images))[: len(images) // batch * batch].reshape(-1, batch)
        for rows in order:
            noise = rng.standard_normal((batch, nz, 1, 1), np.float32)
            loss_d, values = session.train_step(step="D", images=images[rows], noise=noise)
            loss_g = session.train_step(step="G", noise=noise)
        print(f"epoch {epoch + 1}: loss_D {loss_d:.3f}, loss_G {loss_g:.3f}, D(x) {values['D(x)']:.2f}")
    session.call("sample", noise=rng.standard_normal((4, nz, 1, 1), np.float32))


if __name__ == "__main__":
    train(ig.compile(make_step(), "build/dcgan").load())
