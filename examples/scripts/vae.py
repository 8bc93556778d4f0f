"""A variational autoencoder on handwritten digits, after pytorch/examples/vae: `python examples/scripts/vae.py`."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import irongrad as ig


class VAE(nn.Module):
    def __init__(self, width: int, latent: int) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, width), nn.Linear(width, latent), nn.Linear(width, latent)
        self.fc3, self.fc4 = nn.Linear(latent, width), nn.Linear(width, 64)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def sample(self) -> torch.Tensor:
        return self.decode(torch.randn(16, self.fc3.in_features))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mu, logvar = self.encode(x)
        return self.decode(mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)), mu, logvar


def loss_function(out: tuple[torch.Tensor, ...], x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    recon, mu, logvar = out
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / len(x)
    return F.binary_cross_entropy(recon, x, reduction="sum") / len(x) + kld, {"kld": kld}


def make_step(batch: int = 64, width: int = 128, latent: int = 8) -> ig.TrainStep:
    torch.manual_seed(1)
    model, x, z = VAE(width, latent), torch.rand(batch, 64), torch.randn(4, latent)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    entries = {"encode": (model.encode, {"x": x}), "decode": (model.decode, {"z": z}), "sample": (model.sample, {})}
    return ig.TrainStep(model, loss_function, optimizer, {"x": x}, loss_inputs=["x"], entries=entries)


def train(session, epochs: int = 30, batch: int = 64) -> None:
    images = np.float32(load_digits().data / 16)
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(images))[: len(images) // batch * batch]
        found = [session.train_step(x=images[rows]) for rows in order.reshape(-1, batch)]
        print(f"epoch {epoch + 1}: loss {np.mean([loss for loss, _ in found]):.3f}, KL {found[-1][1]['kld']:.3f}")


if __name__ == "__main__":
    with ig.compile(make_step(), "build/vae").load() as session:
        train(session)
        for row in session.call("sample")[0].reshape(8, 8):
            print("".join(" .:*#"[min(int(v * 5), 4)] * 2 for v in row))
