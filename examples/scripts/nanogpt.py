"""A character-level GPT on the text of Python's help, after nanoGPT: `python examples/scripts/nanogpt.py`."""

from pydoc_data.topics import topics

import numpy as np
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F

import irongrad as ig


class GPT(nn.Module):
    def __init__(self, block_size: int, n_embd: int, n_head: int, n_layer: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(128, n_embd), nn.Embedding(block_size, n_embd)
        kind = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.h = nn.ModuleList(nn.TransformerEncoderLayer(n_embd, n_head, 4 * n_embd, **kind) for _ in range(n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, 128, bias=False)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x, ahead = self.wte(idx) + self.wpe.weight, torch.ones(idx.shape[1], idx.shape[1], dtype=torch.bool).triu(1)
        for block in self.h:
            x = block(x, src_mask=ahead)
        return self.lm_head(self.ln_f(x))

    def generate(self, idx: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        def one(idx: torch.Tensor, gumbel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            idx_next = (self(idx)[:, -1] / temperature + gumbel).argmax(-1, keepdim=True)  # a draw from the softmax
            return torch.cat([idx[:, 1:], idx_next], 1), idx_next[:, 0].clone()

        gumbel = -torch.empty(self.wpe.num_embeddings, len(idx), 128).exponential_().log()
        return scan(one, idx, gumbel)[1].T


def make_step(batch: int = 16, block: int = 64, n_embd: int = 96, n_layer: int = 3) -> ig.TrainStep:
    torch.manual_seed(1337)
    model, idx = GPT(block, n_embd, 4, n_layer), torch.randint(0, 128, (batch, block))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    entries = {"generate": (model.generate, {"idx": idx[:1], "temperature": torch.tensor(0.8)})}
    inputs = {"idx": idx, "targets": idx.roll(-1, 1)}
    loss = lambda logits, targets: F.cross_entropy(logits.mT, targets)  # noqa: E731
    return ig.TrainStep(model, loss, optimizer, inputs, clip_grad_norm=1.0, entries=entries)


def train(session, steps: int = 1000, batch: int = 16, block: int = 64) -> None:
    data = np.frombuffer("\n\n".join(topics.values()).encode("ascii", "replace"), np.uint8).astype(np.int64)
    rng = np.random.default_rng(1337)
    for step in range(steps):
        windows = np.stack([data[i : i + block + 1] for i in rng.integers(0, len(data) - block - 1, batch)])
        loss = session.train_step(idx=windows[:, :-1], targets=windows[:, 1:], lr=1e-3 * min(1, (step + 1) / 50))
        if step % 100 == 99:
            print(f"iter {step + 1}: loss {loss:.4f}")
    print(bytes(session.call("generate", idx=data[None, :block], temperature=0.8)[0].astype(np.uint8)).decode())


if __name__ == "__main__":
    train(ig.compile(make_step(), "build/nanogpt").load())
