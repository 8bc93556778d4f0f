"""What eager code does to tensors and a trace cannot: compiled as eager does it, or refused at its line."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, nll_loss

import irongrad as ig
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.differentiate.differentiate import differentiate
from irongrad.runtime.errors import CaptureError, UserError

Body = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.table = nn.Linear(6, 4), nn.Embedding(5, 6, max_norm=1.0)
        self.norm = nn.BatchNorm1d(4)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def of(body: Body) -> ig.TrainStep:
    model = Model(body)
    generator = torch.Generator().manual_seed(1)
    inputs = {"x": torch.randn(8, 6, generator=generator), "y": torch.randint(0, 4, (8,), generator=generator)}
    return ig.TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1), inputs)


def marked(function: object) -> str:
    """`file:line: ` of the line in `function` that ends with `# here`."""
    lines, start = inspect.getsourcelines(function)
    return next(f"{__file__}:{start + i}: " for i, text in enumerate(lines) if text.rstrip().endswith("# here"))


def copies_a_layer(model, x):
    return model.layer(x) - 0.1 * copy.deepcopy(model.layer)(x)


def copies_a_norm(model, x):
    """The copy's statistics are lost in eager, too."""
    return model.norm(model.layer(x)) + copy.deepcopy(model.norm)(model.layer(x))


def retains_a_gradient(model, x):
    """Its evaluation needs gradients, too."""
    h = model.layer(x)
    h.retain_grad()
    return h


def asks_for_classes(model, x):
    is_as_in_eager = type(x) is torch.Tensor and type(model.layer.weight) is nn.Parameter
    return model.layer(x) * (2 if is_as_in_eager and isinstance(type(x), type) else 1)


def looks_up_a_row(model, x):
    h = model.layer(x)
    return h + h[x[:, 0].argmax().reshape(1)].squeeze(0)


def copies_a_tensor(model, x):
    return model.layer(copy.deepcopy(x))


def chooses_by_bytes(model, x):
    h = model.layer(x)
    return torch.where((x[:, :4] > 0).to(torch.uint8), h, -h) + h.where(condition=(h > 0).byte(), other=h * 2)


def selects_by_bytes(model, x):
    h = model.layer(x)
    return h + h[(x[:, 0] > 0).byte()].mean()


def classes_of_bytes(model, x):
    h, classes = model.layer(x), torch.arange(8, dtype=torch.uint8) % 4
    return h + cross_entropy(h, classes) + nll_loss(h.log_softmax(1), classes, reduction="sum")


def asserts(model, x):
    torch._assert_async((x > -100).all())
    torch._assert_async((x < 100).all(), "too large")
    torch._assert(x.ndim == 2, "a matrix")
    return model.layer(x)


def detaches_in_place(model, x):
    total = (h := model.layer(x).exp()).sum(-1, keepdim=True)
    total.detach_()
    return h / total


def resizes_to_its_own_shape(model, x):
    h = model.layer(x)
    return h + torch.zeros(8, 4).resize_(8, 4).resize_as_(h).copy_(h)


BODIES = [
    looks_up_a_row,
    asks_for_classes,
    retains_a_gradient,
    copies_a_layer,
    copies_a_norm,
    copies_a_tensor,
    chooses_by_bytes,
    selects_by_bytes,
    classes_of_bytes,
    asserts,
    detaches_in_place,
    resizes_to_its_own_shape,
]


class Models(nn.Module):
    """A model for each body, all on one input."""

    def __init__(self) -> None:
        super().__init__()
        self.of = nn.ModuleDict({body.__name__: Model(body) for body in BODIES})

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [model(x) for model in self.of.values()]


def sum_of_losses(outputs: list[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    return torch.stack([cross_entropy(output, y) for output in outputs]).sum()


def of_all_bodies() -> ig.TrainStep:
    model, inputs = Models(), of(asserts).inputs
    return ig.TrainStep(model, sum_of_losses, torch.optim.SGD(model.parameters(), 0.1), inputs)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, np.ndarray], nn.Module]:
    """The state of a compiled step after three calls, and the model that eager trains; the losses agree."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        directory = tmp_path_factory.mktemp("idioms") / "artifact"
        session = ig.compile(of_all_bodies(), directory, entry_points=("train_step",), cache=False).load()
        step = of_all_bodies()
        for _ in range(3):
            step.optimizer.zero_grad()
            loss = sum_of_losses(step.model(step.inputs["x"]), step.inputs["y"])
            loss.backward()
            step.optimizer.step()
            assert session.train_step(**step.inputs) == pytest.approx(loss.item(), rel=1e-4)
    return session.state(), step.model


@pytest.mark.parametrize("body", BODIES)
def test_trains_as_eager_does(body: Body, trained: tuple[dict[str, np.ndarray], nn.Module]) -> None:
    found, model = trained
    expected = {n: v for n, v in model.state_dict().items() if n.startswith(f"of.{body.__name__}.")}
    assert expected
    for name, value in expected.items():
        assert torch.allclose(torch.as_tensor(found[name]), value, rtol=1e-4, atol=1e-6), name


def takes_memory(model, x):
    t = torch.empty(0)
    t.set_(x)  # here
    return model.layer(t)


def takes_a_storage(model, x):
    t = torch.empty(0)
    t.set_(x.untyped_storage(), 0, (8, 6), (6, 1))  # here
    return model.layer(t)


def compares_addresses(model, x):
    return model.layer(x) * (x.data_ptr() == x.view(-1).data_ptr())  # here


def looks_up_at_a_scalar(model, x):
    h = model.layer(x)
    return h + h[x[:, 0].argmax()]  # here


def leaves_for_numpy(model, x):
    return model.layer(x) * float(np.log(x.abs().max().item() + 1))  # here


def resizes(model, x):
    t = torch.empty(0)
    t.resize_(8, 6)  # here
    return model.layer(t.copy_(x))


def resizes_to_another(model, x):
    return model.layer(torch.empty(0).resize_as_(x).copy_(x))  # here


def copies_a_result(model, x):
    return copy.deepcopy(model.layer(x))  # here


def rescales_a_table(model, x):
    return model.layer(x + model.table(torch.arange(1)))  # here


def asks_for_a_gpu(model, x):
    return model.layer(x.to("cuda"))  # here


def waits_for_a_gpu(model, x):
    torch.cuda.synchronize()  # here
    return model.layer(x)


def finds_places(model, x):
    h = model.layer(x)
    kept = torch.where(x[:, 0] > 0)[0]  # here
    return h + h[kept].sum()


def writes_text(model, x):
    h = model.layer(x)
    assert f"{h.mean():.3f}"  # here
    return h


def computes_in_a_thread(model, x):
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(x * 2))
    thread.start()
    thread.join()
    return model.layer(found[0])


def writes_a_storage(model, x):
    t = torch.zeros(4)
    t.untyped_storage().fill_(0)  # here
    return model.layer(x) + t


def pickles_a_layer(model, x):
    return pickle.loads(pickle.dumps(model.layer))(x)  # here


def reduces_over_processes(model, x):
    h = model.layer(x)
    torch.distributed.all_reduce(h)  # here
    return h


def catches_an_error(model, x):
    try:
        return model.layer(x.reshape(3, -1))
    except RuntimeError:
        return model.layer(x)


def changes_the_default_dtype(model, x):
    torch.set_default_dtype(torch.float64)
    t = torch.zeros(4)
    torch.set_default_dtype(torch.float32)
    return model.layer(x) + t.float()  # here


def makes_a_layer(model, x):
    return nn.Linear(6, 4)(x) + model.layer(x)  # here


@pytest.mark.skipif(torch.cuda.is_available(), reason="the messages are those of a machine without a GPU")
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (takes_memory, "set_ gives a tensor the memory of another one"),
        (takes_a_storage, "set_ gives a tensor the memory of another one"),
        (compares_addresses, "the address of a tensor's memory"),
        (looks_up_at_a_scalar, "Write x[i.reshape(1)].squeeze(0)"),
        (leaves_for_numpy, "given to a function that is not PyTorch's"),
        (resizes, "resized in place"),
        (resizes_to_another, "resized in place"),
        (copies_a_result, "x.detach().clone()"),
        (rescales_a_table, "leave max_norm out"),
        (asks_for_a_gpu, "captured on the CPU"),
        (waits_for_a_gpu, "captured on the CPU"),
        (finds_places, "shape depends on values"),
        (writes_text, "text is made from the value of a tensor"),
        (writes_a_storage, "the storage of a tensor"),
        (pickles_a_layer, "the step pickles an object"),
        (reduces_over_processes, "torch.distributed"),
    ],
)
def test_refused_at_its_line(body: Body, says: str) -> None:
    with pytest.raises(UserError) as caught:
        capture(of(body))
    assert str(caught.value).startswith(marked(body))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("body", "says"),
    [(catches_an_error, "catches an exception"), (computes_in_a_thread, "in another thread")],
)
def test_refused_at_the_model(body: Body, says: str) -> None:
    with pytest.raises(CaptureError, match=says) as caught:
        capture(of(body))
    assert str(caught.value).startswith(f"{__file__}:{Model.forward.__code__.co_firstlineno}")


@pytest.mark.parametrize(
    ("body", "says"),
    [(makes_a_layer, "make layers in __init__"), (changes_the_default_dtype, "the default dtype changes")],
)
def test_refused_at_its_line_by_the_backward(body: Body, says: str) -> None:
    with pytest.raises(CaptureError, match=says) as caught:
        differentiate(capture(of(body)))
    assert str(caught.value).startswith(marked(body))


def selects_for_a_layer(model, x):
    rows = x[x[:, 0] > 0]
    rows = rows * 2
    return model.layer(rows)  # here


def test_where_selected_rows_leave_both_lines_are_named() -> None:
    with pytest.raises(UserError) as caught:
        capture(of(selects_for_a_layer))
    assert str(caught.value).startswith(marked(selects_for_a_layer))
    _, start = inspect.getsourcelines(selects_for_a_layer)
    assert f"this line takes the rows that {__file__}:{start + 1}: rows = x" in str(caught.value)


def updates_in_a_hook(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update(parameter: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return optimizer


def updates_each_in_a_hook(model: nn.Module) -> list[torch.optim.Optimizer]:
    own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter in own:
        parameter.register_post_accumulate_grad_hook(lambda p: own[p].step())
    return list(own.values())


@pytest.mark.parametrize(
    ("make", "says"), [(updates_in_a_hook, "leave the hook out"), (updates_each_in_a_hook, "can be left out")]
)
def test_an_update_in_a_gradient_hook_is_refused(make: Callable[[nn.Module], object], says: str) -> None:
    model = nn.Linear(6, 4)
    step = ig.TrainStep(model, cross_entropy, make(model), of(copies_a_layer).inputs)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="gradient hook of the parameter 'weight' cannot be compiled") as caught:
        ig.compile(step, "nowhere", cache=False)
    assert says in str(caught.value)
    assert __file__ in str(caught.value)
