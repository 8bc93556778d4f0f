"""Carried values: a hidden state goes from batch to batch as in the user's own loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import irongrad as ig
from irongrad.runtime import load
from irongrad.runtime.errors import CaptureError, UserError

Hidden = tuple[torch.Tensor, torch.Tensor]


class Words(nn.Module):
    """A recurrent language model, as in PyTorch's example word_language_model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.recurrent = nn.LSTM(6, 8)
        self.out = nn.Linear(8, 7)

    def forward(self, words: torch.Tensor, hidden: Hidden) -> tuple[torch.Tensor, Hidden]:
        found, hidden = self.recurrent(self.table(words), hidden)
        return self.out(found).flatten(0, 1), hidden

    def init_hidden(self, rows: int) -> Hidden:
        return torch.zeros(1, rows, 8), torch.zeros(1, rows, 8)

    def next_word(self, word: torch.Tensor, hidden: Hidden) -> tuple[torch.Tensor, dict[str, Any]]:
        logits, hidden = self(word, hidden)
        return logits.argmax(-1).reshape(1, 1), {"hidden": hidden}


def loss(out: tuple[torch.Tensor, Hidden], y: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    logits, hidden = out
    return cross_entropy(logits, y.flatten()), {"hidden": hidden, "norm": hidden[0].norm()}


def batch(seed: int) -> dict[str, torch.Tensor]:
    words = torch.randint(0, 7, (6, 4), generator=torch.Generator().manual_seed(seed))
    return {"words": words[:-1], "y": words[1:]}


def make_step(**changed: Any) -> ig.TrainStep:
    torch.manual_seed(0)
    model = Words()
    entries = {"say": ig.Entry(model.next_word, {"word": torch.tensor([[3]])}, carry={"hidden": model.init_hidden(1)})}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return ig.TrainStep(
        model, loss, optimizer, batch(0), carry={"hidden": model.init_hidden(4)}, entries=entries, **changed
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("carry") / "net"
    ig.compile(make_step(), directory)
    return directory


class Loop:
    """The user's own loop."""

    def __init__(self) -> None:
        self.step = make_step()
        self.model: Any = self.step.model
        self.hidden = self.model.init_hidden(4)

    def train(self, data: dict[str, torch.Tensor]) -> tuple[float, float]:
        (optimizer,) = self.step.optimizers
        self.hidden = tuple(h.detach() for h in self.hidden)
        optimizer.zero_grad()
        out, self.hidden = self.model(data["words"], self.hidden)
        value = cross_entropy(out, data["y"].flatten())
        value.backward()
        optimizer.step()
        return value.item(), self.hidden[0].norm().item()


def test_a_hidden_state_goes_from_batch_to_batch(compiled: Path, tmp_path: Path) -> None:
    loop = Loop()
    with load(compiled) as session:
        for number in range(3):
            value, values = session.train_step(**batch(number))
            assert (value, values["norm"]) == pytest.approx(loop.train(batch(number)), abs=1e-5)
            assert set(values) == {"norm"}
        evaluated, _ = session.eval_step(**batch(8))  # carries values of its own
        stacked = {n: np.stack([batch(k)[n].numpy() for k in (3, 4)]) for n in batch(0)}
        losses, _ = session.train_steps(**stacked)
        assert losses == pytest.approx([loop.train(batch(k))[0] for k in (3, 4)], abs=1e-5)
        np.testing.assert_allclose(session.state()["carry/hidden_0"], loop.hidden[0].detach(), atol=1e-5)
        session.save(tmp_path / "net.safetensors")
        assert session.eval_step(**batch(8))[0] != evaluated
        session.reset_carry()
        loop.hidden = loop.model.init_hidden(4)
        assert session.train_step(**batch(5))[0] == pytest.approx(loop.train(batch(5))[0], abs=1e-5)
    with load(compiled, checkpoint=tmp_path / "net.safetensors") as session:
        assert np.abs(session.state()["carry/hidden_1"]).max() > 0


def test_an_entry_carries_values_of_its_own(compiled: Path) -> None:
    model: Any = make_step().model
    model.eval()
    with load(compiled) as session:
        word, hidden = torch.tensor([[3]]), model.init_hidden(1)
        for _ in range(4):
            found = session.call("say", word=word)
            with torch.no_grad():
                word, values = model.next_word(word, hidden)
            hidden = values["hidden"]
            np.testing.assert_array_equal(found, word)
        np.testing.assert_allclose(session.state()["carry/say.hidden_0"], hidden[0], atol=1e-5)
        assert not np.any(session.state()["carry/hidden_0"])


def test_a_step_that_carries_nothing_has_nothing_to_reset(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    ig.compile(
        ig.TrainStep(model, torch.mean, torch.optim.SGD(model.parameters(), lr=0.1), {"x": torch.ones(1, 2)}),
        tmp_path / "net",
    )
    with load(tmp_path / "net") as session, pytest.raises(UserError, match="carries nothing from call to call"):
        session.reset_carry()


def growing(out: Any, y: torch.Tensor) -> Any:
    value, values = loss(out, y)
    return value, {**values, "hidden": tuple(torch.cat([h, h]) for h in values["hidden"])}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"loss": lambda out, y: loss(out, y)[0]},
            r"test_carry.py:\d+: carry has 'hidden', whose new value is missing",
        ),
        ({"loss": growing}, r"test_carry.py:\d+: the new value of 'hidden_0' has shape \(2, 4, 8\)"),
        ({"carry": {"words": torch.zeros(1)}}, "no name of an input"),
        ({"carry": {"hidden": 3}}, "carry.'hidden'. is a int; it must be a tensor"),
        ({"accumulate": 2}, "leave out accumulate"),
    ],
)
def test_what_cannot_be_carried_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = Words()
    given = {"loss": loss, "carry": {"hidden": model.init_hidden(4)}, **changed}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = {n: torch.cat([t, t[:1]]) for n, t in batch(0).items()}
    with pytest.raises(CaptureError, match=message):
        ig.compile(ig.TrainStep(model, optimizer=optimizer, inputs=inputs, **given), tmp_path / "net")
