"""A refusal of the capture names the user's line and says what to write instead, in at most two lines."""

from __future__ import annotations

import inspect
import linecache
import re
import sysconfig
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

import irongrad as ig
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.differentiate.differentiate import differentiate
from irongrad.pipeline.optimizer.update import add_optimizer
from irongrad.runtime.errors import CaptureError, UnsupportedOpError, UserError

LOG: list[object] = []
COUNT = 0


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(6, 4), nn.Dropout(0.5)
        self.counter, self._hidden, self.log, self.cache = 0, 0, [], {}
        self.plain = torch.zeros(4)
        self.config = SimpleConfig()
        self.register_buffer("buffer", torch.zeros(4))


class SimpleConfig:
    def __init__(self) -> None:
        self.calls = 0


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def refusal(
    model: nn.Module,
    loss: Callable[..., object] | None = functional.cross_entropy,
    kind: type[UserError] = CaptureError,
    **inputs: torch.Tensor,
) -> str:
    """The message with which the step is refused."""
    batch = inputs or {"x": torch.randn(16, 6), "y": torch.randint(0, 4, (16,))}
    with pytest.raises(kind) as caught:
        add_optimizer(differentiate(capture(ig.TrainStep(model, loss, sgd(model), batch))))
    assert caught.type is kind
    message = str(caught.value)
    assert len(message) < 700
    assert message.count("\n") <= 1
    return message


def line_of(thing: object, marker: str = "# here") -> str:
    """`file:line:` of the line in the source of `thing` that ends with `marker`."""
    lines, start = inspect.getsourcelines(thing)
    offset = next(i for i, line in enumerate(lines) if line.rstrip().endswith(marker))
    return f"{__file__}:{start + offset}:"


# --- values of tensors --------------------------------------------------------------------------------------------


class Branches(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        if h.sum() > 0:  # here
            return h
        return -h


class Loops(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        while h.norm() > 1:  # here
            h = h / 2
        return h


class Asserts(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert (x > -100).all()  # here
        return self.layer(x)


class InHelper(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper(self.layer(x))

    def helper(self, h: torch.Tensor) -> torch.Tensor:
        return h if h.max() > 0 else -h  # here


@pytest.mark.parametrize("kind", [Branches, Loops, Asserts, InHelper])
def test_data_dependent_decision(kind: type[nn.Module]) -> None:
    message = refusal(kind())
    assert message.startswith(line_of(kind))
    assert "torch.where" in message


class TakesItem(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        return h * h.max().item()  # here


def test_item() -> None:
    message = refusal(TakesItem())
    assert message.startswith(line_of(TakesItem))
    assert "Keep it a tensor" in message


class LeavesTorch(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * torch.from_numpy(x.numpy()).sum()  # here


def test_numpy() -> None:
    message = refusal(LeavesTorch())
    assert message.startswith(line_of(LeavesTorch))
    assert ".numpy()" in message


class Selects(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        return h[h[:, 0] > 0]  # here


def test_shape_that_depends_on_values() -> None:
    message = refusal(Selects(), lambda o, y: o.sum() + y.sum(), UnsupportedOpError)
    assert message.startswith(line_of(Selects))
    assert "shape depends on values" in message
    assert "torch.where" in message


# --- side effects -------------------------------------------------------------------------------------------------


class Counts(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter += 1  # here
        return self.layer(x)


class CountsPrivately(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._hidden = self._hidden + 1  # here
        return self.layer(x)


class Appends(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        self.log.append(h)  # here
        return h


class Caches(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        self.cache["hidden"] = h  # here
        return h


class Assigns(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x) + self.plain
        self.plain = h.detach().mean(0)  # here
        return h


class AssignsNew(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x) + getattr(self, "last", 0)
        self.last = h  # here
        return h


class ChangesObject(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.config.calls += 1  # here
        return self.layer(x)


class AppendsToGlobal(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LOG.append(x.shape)  # here
        return self.layer(x)


class CountsGlobal(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global COUNT
        COUNT += 1  # here
        return self.layer(x)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (Counts, "self.counter"),
        (CountsPrivately, "self._hidden"),
        (Appends, "self.log"),
        (Caches, "self.cache"),
        (Assigns, "self.plain"),
        (AssignsNew, "self.last"),
        (ChangesObject, "self.config"),
        (AppendsToGlobal, "LOG"),
        (CountsGlobal, "COUNT"),
    ],
)
def test_python_state(kind: type[nn.Module], named: str) -> None:
    model = kind()
    message = refusal(model)
    assert message.startswith(line_of(kind))
    assert f"changes {named}, a Python value" in message
    assert "register_buffer" in message
    assert model.counter == 0


def test_python_state_of_a_closure_and_a_hook() -> None:
    seen: list[int] = []

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(1)  # here
        return functional.cross_entropy(output, y)

    message = refusal(nn.Linear(6, 4), loss)
    assert message.startswith(line_of(loss))
    assert "changes seen" in message

    model = nn.Linear(6, 4)
    model.register_forward_hook(lambda module, args, output: seen.append(2))
    assert "changes seen" in refusal(model)


class CountingLoss:
    calls = 0

    def __init__(self) -> None:
        self.count, self.recent = 0, deque(maxlen=3)

    def __call__(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class CountsInAttribute(CountingLoss):
    def __call__(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.count += 1  # here
        return functional.cross_entropy(output, y) * self.count


class CountsInDeque(CountingLoss):
    def __call__(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.recent.append(1)  # here
        return functional.cross_entropy(output, y) * len(self.recent)


class CountsInClass(CountingLoss):
    def __call__(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        CountingLoss.calls += 1  # here
        return functional.cross_entropy(output, y) * CountingLoss.calls


class KeepsMean(CountingLoss):
    def __call__(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean = functional.cross_entropy(output, y)
        self.count = 0.9 * self.count + 0.1 * mean.detach()  # here
        return mean / self.count


@pytest.mark.parametrize("kind", [CountsInAttribute, CountsInDeque, CountsInClass, KeepsMean])
@pytest.mark.parametrize(
    "spelt", [lambda loss: loss, lambda loss: loss.__call__, partial], ids=["object", "method", "partial"]
)
def test_python_state_of_an_object_that_is_the_loss(kind: type[CountingLoss], spelt: Callable[..., object]) -> None:
    message = refusal(nn.Linear(6, 4), spelt(kind()))
    assert message.startswith(line_of(kind))
    assert "a Python value" in message


class ChangesALayer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm.momentum *= 0.9  # here
        return self.norm(self.layer(x))


def test_a_setting_of_a_layer_that_every_call_changes() -> None:
    message = refusal(ChangesALayer())
    assert message.startswith(line_of(ChangesALayer))
    assert "changes self.momentum" in message


class WritesConstant(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        self.plain.add_(h.detach().mean(0))  # here
        return h + self.plain


class WritesInput(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[:, 0].mul_(2)  # here
        return self.layer(x)


class WritesParameter(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layer.weight.clamp_(-1, 1)  # here
        return self.layer(x)


class ReshapesBuffer(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.buffer = x.detach().mean(0)  # here
        return self.layer(x)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (WritesConstant, "register_buffer"),
        (WritesInput, "an input of the step"),
        (WritesParameter, "the parameter weight"),
        (ReshapesBuffer, "another shape or dtype"),
    ],
)
def test_write_in_place(kind: type[nn.Module], says: str) -> None:
    message = refusal(kind())
    assert message.startswith(line_of(kind))
    assert says in message


# --- the loss -----------------------------------------------------------------------------------------------------


def not_scalar(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, y, reduction="none")  # here


def not_floating(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (output.argmax(-1) == y).sum()  # here


def no_tensor(output: torch.Tensor, y: torch.Tensor) -> float:  # here
    return 3.0


def number_of_python(output: torch.Tensor, y: torch.Tensor) -> float:  # here
    return functional.cross_entropy(output, y).item()


def nothing(output: torch.Tensor, y: torch.Tensor) -> None:  # here
    functional.cross_entropy(output, y)


def two_values(output: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # here
    return functional.cross_entropy(output, y), output


def without_gradient(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return functional.cross_entropy(output, y)  # here


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (not_scalar, "shape (16,) and dtype torch.float32; it must be a floating-point scalar"),
        (not_floating, "dtype torch.int64"),
        (no_tensor, "the loss is a float, not a tensor"),
        (
            number_of_python,
            "such as loss.mean(), without .item()",
        ),
        (nothing, "the loss is None, not a tensor"),
        (two_values, "the loss is a tuple, not a tensor"),
        (without_gradient, "no parameter gets a gradient"),
    ],
)
def test_loss(loss: Callable[..., object], says: str) -> None:
    message = refusal(nn.Linear(6, 4), loss)
    assert message.startswith(line_of(loss))
    assert says in message


def test_model_without_its_own_loss() -> None:
    message = refusal(nn.Linear(6, 4), None, input=torch.randn(3, 6))
    assert "TrainStep.loss is None" in message
    model = Base()
    model.forward = lambda x: {"logits": model.layer(x)}
    assert "it has ['logits']" in refusal(model, None, x=torch.randn(3, 6))


# --- inputs and the optimizer -------------------------------------------------------------------------------------


class Plain(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # here
        return self.layer(x)


def three(output: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, y)


def test_unused_input() -> None:
    x, y = torch.randn(16, 6), torch.randint(0, 4, (16,))
    message = refusal(Plain(), three, x=x, y=y, z=x)
    assert message.startswith(line_of(Plain))
    assert "input 'z' is not used" in message


def test_calls_that_do_not_fit() -> None:
    x, y = torch.randn(16, 6), torch.randint(0, 4, (16,))
    assert "the loss gets (model_output, y), but its signature" in refusal(Plain(), three, x=x, y=y)
    model = Plain()
    inputs = {"a": x, "b": y}
    with pytest.raises(CaptureError, match=r"the model gets \(a, b\).*TrainStep.model_inputs"):
        ig.TrainStep(model, functional.cross_entropy, sgd(model), inputs, model_inputs=["a", "b"])


def test_everything_frozen() -> None:
    message = refusal(Plain().requires_grad_(False))
    assert message.startswith(line_of(Plain))
    assert "every parameter of the model is frozen" in message


def test_optimizer_over_other_parameters() -> None:
    x, y = torch.randn(16, 6), torch.randint(0, 4, (16,))
    with pytest.raises(CaptureError, match=r"SGD holds a parameter of shape \(2, 3\) that is not in the model"):
        ig.TrainStep(Plain(), functional.cross_entropy, sgd(nn.Linear(3, 2)), {"x": x, "y": y})
    model = Plain()
    with pytest.raises(CaptureError, match="two optimizers hold the same parameter"):
        ig.TrainStep(model, functional.cross_entropy, [sgd(model), sgd(model)], {"x": x, "y": y})


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"x": torch.randn(16, 6).double()}, "Arrays of NumPy are float64 by default: convert the input"),
        ({"y": torch.full((16,), 4)}, "IndexError: Target 4 is out of bounds. Class labels are below"),
        ({"y": torch.zeros(16, dtype=torch.int32)}, "but got Int. Class labels and indices are int64"),
        ({"x": torch.full((16, 6), torch.nan)}, "the loss is NaN on the example inputs.*NaN is in input 'x'"),
        ({"y": torch.full((16,), -100)}, "the loss is NaN.*such as labels that are all ignored"),
    ],
)
def test_examples_that_only_eager_refuses(inputs: dict[str, torch.Tensor], says: str) -> None:
    """Tracing knows no values, and compares few dtypes. Without the eager run the oracle would tell, much later."""
    batch = {"x": torch.randn(16, 6), "y": torch.randint(0, 4, (16,)), **inputs}
    assert re.search(says, refusal(Plain(), **batch))


def test_nan_in_the_model() -> None:
    model = Plain()
    nn.init.constant_(model.layer.bias, torch.nan)
    assert "NaN is in 'layer.bias' of the model" in refusal(model)


def test_an_output_that_is_no_tensor() -> None:
    model = Plain()
    model.forward = lambda x: {"logits": model.layer(x)}  # type: ignore[method-assign]
    message = refusal(model)
    assert "must be Tensor, not dict" in message
    assert "cross_entropy(output['logits'], y)" in message


def test_a_size_that_another_input_fixes() -> None:
    batch = {"x": torch.randn(16, 6), "y": torch.randint(0, 4, (16,))}
    model = Plain()
    with pytest.raises(CaptureError, match="another input with this size, such as the labels"):
        capture(ig.TrainStep(model, functional.cross_entropy, sgd(model), batch, dynamic={"x": {0: "B"}}))


def test_inputs() -> None:
    model = Plain()
    for inputs, says in [
        ({}, "inputs is empty"),
        ({"x": 3.0}, "input 'x' is a float, not a torch.Tensor"),
        ({"not a name": torch.zeros(1)}, "is not an identifier"),
    ]:
        with pytest.raises(CaptureError, match=says):
            ig.TrainStep(model, functional.cross_entropy, sgd(model), inputs)


def test_input_with_the_name_of_a_hyperparameter() -> None:
    message = refusal(nn.Linear(6, 4), lr=torch.randn(16, 6), y=torch.randint(0, 4, (16,)))
    assert "inputs ['lr']" in message
    assert "rename" in message


# --- random operators ---------------------------------------------------------------------------------------------


class Poisson(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            counts = torch.poisson(x.abs())  # here
        return self.layer(x + counts)


class OwnGenerator(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + torch.zeros(6).normal_(generator=torch.Generator()))  # here


class DrawsInBranch(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        return torch.cond(h.sum() > 0, self.noisy, self.plainly, (h,))  # here

    def noisy(self, h: torch.Tensor) -> torch.Tensor:
        return h + torch.rand(4)

    def plainly(self, h: torch.Tensor) -> torch.Tensor:
        return h + 1


@pytest.mark.parametrize(
    ("kind", "operator"), [(Poisson, "aten.poisson"), (OwnGenerator, "aten.normal_"), (DrawsInBranch, "aten.rand")]
)
def test_random_operator(kind: type[nn.Module], operator: str) -> None:
    message = refusal(kind(), kind=UnsupportedOpError)
    assert message.startswith(line_of(kind))
    assert operator in message


# --- the user's own mistakes --------------------------------------------------------------------------------------


class Raises(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("first line\n" + "x" * 5000)  # here


class Mismatched(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) @ x  # here


def test_an_exception_of_the_model(capfd: pytest.CaptureFixture[str]) -> None:
    message = refusal(Raises())
    assert message.startswith(line_of(Raises))
    assert message.endswith("ValueError: first line")
    assert refusal(Mismatched()).startswith(line_of(Mismatched))
    assert capfd.readouterr().err == ""


def test_errors_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    refusal(Branches())
    assert capfd.readouterr().err == ""


def test_user_data_in_a_namespace_is_left_alone() -> None:
    model = Plain()
    model.settings = SimpleNamespace(width=4)
    inputs = {"x": torch.randn(16, 6), "y": torch.randint(0, 4, (16,))}
    capture(ig.TrainStep(model, functional.cross_entropy, sgd(model), inputs))


# --- installed packages -------------------------------------------------------------------------------------------

PACKAGED = """
from torch import nn

class Layer(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

class Masked(nn.Module):
    def forward(self, x):
        return x - x[x[:, 0] > 0].mean(0)
"""


def packaged() -> tuple[str, dict[str, type[nn.Module]]]:
    """The path and the classes of a module that appears to lie in an installed package."""
    path = f"{sysconfig.get_paths()['purelib']}/some_package/layers.py"
    linecache.cache[path] = len(PACKAGED), None, PACKAGED.splitlines(keepends=True), path
    names: dict[str, type[nn.Module]] = {}
    exec(compile(PACKAGED, path, "exec"), {"__name__": "some_package.layers"}, names)
    return path, names


@pytest.mark.parametrize(("name", "line", "kind"), [("Layer", 6, CaptureError), ("Masked", 10, UnsupportedOpError)])
def test_a_line_in_a_package_is_named_with_the_line_that_called_it(name: str, line: int, kind: type[UserError]) -> None:
    path, names = packaged()

    class Calls(Base):
        def __init__(self) -> None:
            super().__init__()
            self.inner = names[name]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.layer(x))  # here

    message = refusal(Calls(), kind=kind)
    assert message.startswith(f"{path}:{line}: return x")
    assert f"(called from {line_of(Calls).rstrip(':')})" in message


def test_a_line_in_a_package_alone_is_named() -> None:
    path, names = packaged()
    assert refusal(nn.Sequential(nn.Linear(6, 4), names["Layer"]())).startswith(f"{path}:6: return x")


def test_a_hyperparameter_that_the_loss_reads() -> None:
    """Each call of a compiled step may have another learning rate, and a trace would keep the optimizer's."""
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, y) * optimizer.param_groups[0]["lr"]  # here

    inputs = {"x": torch.randn(8, 6), "y": torch.zeros(8, dtype=torch.long)}
    with pytest.raises(CaptureError, match="reads 'lr' of the optimizer") as caught:
        capture(ig.TrainStep(model, loss, optimizer, inputs))
    assert str(caught.value).startswith(line_of(loss))
    assert type(optimizer.param_groups[0]) is dict
