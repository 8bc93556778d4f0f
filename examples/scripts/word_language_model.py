"""An LSTM over words, after pytorch/examples/word_language_model: `python examples/scripts/word_language_model.py`."""

import numpy as np
import torch
from reading import words
from torch import nn

import irongrad as ig


class RNNModel(nn.Module):
    def __init__(self, ntoken: int, ninp: int) -> None:
        super().__init__()
        self.encoder, self.drop, self.rnn = nn.Embedding(ntoken, ninp), nn.Dropout(0.2), nn.LSTM(ninp, ninp)
        self.decoder = nn.Linear(ninp, ntoken)

    def forward(self, data: torch.Tensor, hidden: tuple) -> tuple[torch.Tensor, tuple]:
        output, hidden = self.rnn(self.drop(self.encoder(data)), hidden)
        return self.decoder(self.drop(output)).flatten(0, 1), hidden

    def init_hidden(self, bsz: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(1, bsz, self.rnn.hidden_size) for _ in range(2))

    def next_word(self, word: torch.Tensor, hidden: tuple) -> tuple[torch.Tensor, dict]:
        output, hidden = self(word, hidden)
        return output.argmax(-1)[None], {"hidden": hidden}


def criterion(out: tuple, targets: torch.Tensor) -> tuple[torch.Tensor, dict]:
    return nn.functional.cross_entropy(out[0], targets), {"hidden": out[1]}


def make_step(batch: int = 20, bptt: int = 20, ntoken: int = 1000, ninp: int = 64) -> ig.TrainStep:
    torch.manual_seed(1)
    model, data = RNNModel(ntoken, ninp), torch.zeros(bptt, batch, dtype=torch.long)
    entry = ig.Entry(model.next_word, {"word": data[:1, :1]}, carry={"hidden": model.init_hidden(1)})
    return ig.TrainStep(
        model, criterion, torch.optim.SGD(model.parameters(), lr=5.0), {"data": data, "targets": data.flatten()},
        clip_grad_norm=0.25, carry={"hidden": model.init_hidden(batch)}, entries={"next_word": entry},
    )  # fmt: skip


def train(session, epochs: int = 4, batch: int = 20, bptt: int = 20, ntoken: int = 1000, most: int = 10**9) -> None:
    (codes, names), lr, word = words(ntoken), 5.0, np.array([[1]])
    columns = codes[: len(codes) // batch * batch].reshape(batch, -1).T
    for epoch in range(epochs):
        session.reset_carry()
        for i in range(0, min(len(columns) - bptt, most * bptt), bptt):
            batch_of = {"data": columns[i : i + bptt], "targets": columns[i + 1 : i + 1 + bptt].ravel()}
            loss = session.train_step(**batch_of, lr=lr)
        print(f"epoch {epoch + 1}: loss {loss:.3f}, lr {lr:.2f}")
        lr /= 2
    for _ in range(12):
        word = session.call("next_word", word=word)
        print(names[int(word.item())], end=" ")


if __name__ == "__main__":
    train(ig.compile(make_step(), "build/words").load())
