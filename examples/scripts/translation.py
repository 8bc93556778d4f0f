"""A Transformer that reads digits and writes them backwards, after PyTorch's translation tutorial, with padding."""

import numpy as np
import torch
from torch import nn
from torch._higher_order_ops.scan import scan

import irongrad as ig

PAD, BOS, EOS, LONGEST = 10, 11, 12, 8


class Seq2SeqTransformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(13, width), nn.Embedding(LONGEST + 2, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 2 * width, dropout=0.0, batch_first=True)
        self.generator = nn.Linear(width, 13)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        causal = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
        masks = {"src_key_padding_mask": src == PAD, "memory_key_padding_mask": src == PAD, "tgt_mask": causal}
        both = (self.tok_emb(x) + self.pos_emb.weight[: x.shape[1]] for x in (src, tgt))
        return self.generator(self.transformer(*both, **masks)).transpose(1, 2)

    def greedy_decode(self, src: torch.Tensor) -> torch.Tensor:
        def one(ys: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            next_word = self(src, ys).index_select(2, i[None]).argmax(1)
            return torch.where(torch.arange(LONGEST + 2) == i + 1, next_word, ys), next_word[:, 0].clone()

        return scan(one, torch.tensor([[BOS, *[PAD] * (LONGEST + 1)]] * len(src)), torch.arange(LONGEST + 1))[1].T


def sentences(batch: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    src, tgt = np.full((batch, LONGEST), PAD), np.full((batch, LONGEST + 2), PAD)
    for row, n in enumerate(rng.integers(1, LONGEST + 1, batch)):
        src[row, :n] = rng.integers(0, 10, n)
        tgt[row, : n + 2] = [BOS, *src[row, :n][::-1], EOS]
    return {"src": src, "tgt": tgt[:, :-1], "tgt_out": tgt[:, 1:]}


def make_step(batch: int = 64, width: int = 64) -> ig.TrainStep:
    torch.manual_seed(0)
    model, criterion = Seq2SeqTransformer(width), nn.CrossEntropyLoss(ignore_index=PAD)
    inputs = {n: torch.from_numpy(a.copy()) for n, a in sentences(batch, np.random.default_rng(0)).items()}
    entries = {"greedy_decode": (model.greedy_decode, {"src": inputs["src"][:16]})}
    return ig.TrainStep(model, criterion, torch.optim.Adam(model.parameters(), lr=1e-3), inputs, entries=entries)


def train(session, steps: int = 1500, batch: int = 64) -> None:
    rng = np.random.default_rng(1)
    losses = [session.train_step(**sentences(batch, rng)) for _ in range(steps)]
    src, _, wanted = sentences(16, rng).values()
    right = (session.call("greedy_decode", src=src) == wanted)[wanted != PAD].mean()
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last; right {right:.1%}")


if __name__ == "__main__":
    train(ig.compile(make_step(), "build/translation").load())
