"""Denoising diffusion of handwritten digits, after denoising-diffusion-pytorch: `python examples/scripts/ddpm.py`."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import irongrad as ig


class Diffusion(nn.Module):
    def __init__(self, width: int, timesteps: int) -> None:
        super().__init__()
        self.time = nn.Embedding(timesteps, width)
        self.inward, self.middle, self.outward = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 64)
        self.register_buffer("betas", torch.linspace(1e-4, 0.2, timesteps))
        self.register_buffer("alphas_cumprod", torch.cumprod(1 - self.betas, 0))

    def predict_noise(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = F.silu(self.inward(x) + self.time(t))
        return self.outward(F.silu(self.middle(h)) + h)

    def forward(self, img: torch.Tensor) -> torch.Tensor:
        t, noise = torch.randint(0, len(self.betas), img.shape[:1]), torch.randn_like(img)
        kept = self.alphas_cumprod[t][:, None]
        return F.mse_loss(self.predict_noise(kept.sqrt() * img + (1 - kept).sqrt() * noise, t), noise)

    def sample(self) -> torch.Tensor:
        def p_sample(img: torch.Tensor, at: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
            t, noise, beta, kept = at
            mean = (img - beta / (1 - kept).sqrt() * self.predict_noise(img, t.expand(len(img)))) / (1 - beta).sqrt()
            return mean + beta.sqrt() * noise * (t > 0), t.clone()

        times, noise = torch.arange(len(self.betas)), torch.randn(len(self.betas), 8, 64)  # a loop draws nothing itself
        return scan(p_sample, torch.randn(8, 64), (times, noise, self.betas, self.alphas_cumprod), reverse=True)[0]


def make_step(batch: int = 128, width: int = 256, timesteps: int = 50) -> ig.TrainStep:
    torch.manual_seed(0)
    model, img = Diffusion(width, timesteps), torch.randn(batch, 64)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.995))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    entries = {"sample": (ema.module.sample, {})}
    return ig.TrainStep(model, None, optimizer, {"img": img}, after_step=ema, entries=entries)


def train(session, steps: int = 3000, batch: int = 128) -> None:
    images, rng = np.float32(load_digits().data / 8 - 1), np.random.default_rng(0)
    losses = [session.train_step(img=images[rng.integers(0, len(images), batch)]) for _ in range(steps)]
    print(f"loss of the last steps {np.mean(losses[-100:]):.3f}")
    for row in session.call("sample")[0].reshape(8, 8):
        print("".join(" .:*#"[int(np.clip((v + 1) * 2.5, 0, 4))] * 2 for v in row))


if __name__ == "__main__":
    train(ig.compile(make_step(), "build/ddpm").load())
