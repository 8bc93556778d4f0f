"""The registry, the manager and the verifier of passes, and bisection."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.graph.float64_runs import run_in_float64
from irongrad.graph.nodes import call, replace
from irongrad.passes import PassResult, parse_passes, passes_at, registered, registry, run_passes, without
from irongrad.passes.graph.common_subexpressions import CommonSubexpressions
from irongrad.passes.graph.dead_code import DeadCode
from irongrad.passes.pipelines import LEVELS
from irongrad.pipeline.bisect.bisect import bisect
from irongrad.pipeline.driver import step_graph
from irongrad.pipeline.options import make_options
from irongrad.runtime.errors import InternalError, UserError

aten = torch.ops.aten


@dataclass(frozen=True)
class Swap:
    """Replace every ReLU by another operator, and break the graph in the way that `how` names."""

    name: ClassVar[str] = "swap"
    how: str = "negative"
    times: int = 1

    def run(self, graph, context):
        found = [n for n in graph.graph.nodes if n.target is aten.relu.default]
        for node in found:
            self._change(graph.graph, node)
        return PassResult(bool(found), {"swapped": len(found)})

    def _change(self, graph, node):
        (source,) = node.args
        with graph.inserting_before(node):
            match self.how:
                case "negative":
                    replace(node, call(graph, aten.neg.default, source, like=node))
                case "twice":
                    graph.inserting_after(node)
                    node.replace_input_with(source, call(graph, aten.neg.default, source, like=node))
                case "no value":
                    replace(node, graph.call_function(aten.neg.default, (source,)))
                case "shape":
                    node.meta["val"] = node.meta["val"].new_empty(7)
                    node.args = (call(graph, aten.neg.default, source, like=node),)
                case "write":
                    replace(node, call(graph, aten.relu_.default, source, like=node))
                case "random":
                    replace(node, call(graph, aten.bernoulli.default, source, like=node))
                case "python":
                    replace(node, call(graph, torch.relu, source, like=node))
                case "order":
                    node.append(call(graph, aten.neg.default, source, like=node))
                    node.args = (node.next,)
                case "move":
                    next(iter(node.users)).append(node)
                case "dtype":
                    graph.inserting_after(node)
                    new = call(graph, aten._to_copy.default, node, like=node, dtype=torch.float64)
                    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
                case "result":
                    output = next(n for n in reversed(graph.nodes) if n.op == "output")
                    graph.inserting_before(output)
                    output.args = ([call(graph, aten.sum.default, node, like=node)],)
                case "argument":
                    graph.placeholder("extra")
                case "effect":
                    graph.call_function(aten._assert_async.msg, (source, "no zero")).meta["val"] = None
                case "method":
                    new = graph.call_method("neg", (source,))
                    new.meta = dict(node.meta)
                    replace(node, new)
                case "constant":
                    graph.owning_module.register_buffer("two", torch.ones(2))
                    new = graph.get_attr("two")
                    new.meta = dict(node.meta)
                    replace(node, new)


def test_the_registry_has_the_passes_of_every_level():
    assert list(LEVELS) == [0, 1, 2, 3]
    for level in LEVELS:
        assert {p.name for p in passes_at(level)} <= set(registered())
    assert passes_at(0) == ()
    assert all(p.__doc__ and "Before:" in p.__doc__ and "After" in p.__doc__ for p in registered().values())


def test_pipelines_are_parsed(monkeypatch):
    monkeypatch.setitem(registered(), "swap", Swap)
    assert parse_passes("dce, swap{how=twice,times=3},cse") == (DeadCode(), Swap("twice", 3), CommonSubexpressions())
    assert without(parse_passes("dce,cse"), ["dce"]) == (CommonSubexpressions(),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dce,nothing", "there is no pass 'nothing'; the passes are dce, "),
        ("swap{color=red}", "the pass 'swap' has no option 'color'; it has how, times"),
        ("dce{a=1}", "the pass 'dce' has no option 'a'; it has no options"),
        ("swap{times=many}", "swap{times=many}: Expected `int`"),
        ("swap{how}", "'how' is not OPTION=VALUE"),
        ("dce cse", "'dce cse' is not NAME"),
    ],
)
def test_mistakes_in_a_pipeline_are_named(monkeypatch, text, message):
    monkeypatch.setitem(registered(), "swap", Swap)
    with pytest.raises(UserError) as caught:
        parse_passes(text)
    assert message in str(caught.value)


def test_the_manager_leaves_the_given_graph_alone_and_records_what_was_done(step_of):
    step = step_of(lambda x: x.relu() + x.relu(), torch.randn(3))
    before = str(step.functions["call"].graph.graph)
    records = []
    after = run_passes(step, parse_passes("dce,cse"), on_pass=lambda number, record, function: records.append(record))
    assert str(step.functions["call"].graph.graph) == before
    assert len(after.functions["call"].graph.graph.nodes) == len(step.functions["call"].graph.graph.nodes) - 1
    assert [(r.name, r.changed, r.nodes) for r in records] == [("dce", False, (5, 5)), ("cse", True, (5, 4))]
    assert all(r.seconds >= 0 and r.function == "call" for r in records)


def test_new_nodes_keep_the_users_line():
    graph = run_passes(step_graph(_step()), [Swap()]).functions["joint"].graph
    lines = [n.meta["stack_trace"] for n in graph.graph.nodes if n.target is aten.neg.default]
    assert any("self.layer(x).relu()" in line for line in lines)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no value", "has no meta"),
        ("shape", "meta['val'] says"),
        ("result", "the results were"),
        ("write", "writes into an argument, is random, or has another effect"),
        ("random", "writes into an argument, is random, or has another effect"),
        ("effect", "writes into an argument, is random, or has another effect"),
        ("method", "call_method is no call of an ATen operator"),
        ("constant", "it holds ((2,), torch.float32)"),
        ("python", "is no ATen operator"),
        ("order", "a value is used before it is computed"),
        ("move", "a value is used before it is computed"),
        ("dtype", "meta['val'] says"),
        ("argument", "the arguments were"),
    ],
)
def test_the_verifier_catches_a_pass_that_leaves_the_graph_wrong(step_of, how, message):
    step = step_of(lambda x: x.relu().neg(), torch.randn(3))
    with pytest.raises(InternalError) as caught:
        run_passes(step, [DeadCode(), Swap(how)])
    assert "the pass 'swap' left a graph that is not well formed on the function 'call' after dce" in str(caught.value)
    assert message in str(caught.value)


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return torch.nn.functional.dropout(self.layer(x).relu(), 0.5, self.training)


def _step():
    torch.manual_seed(0)
    model = _Net()
    return ig.TrainStep(
        model, nn.functional.cross_entropy, torch.optim.AdamW(model.parameters()),
        {"x": torch.randn(5, 4), "y": torch.tensor([0, 1, 2, 0, 1])}, seed=3,
    )  # fmt: skip


@dataclass(frozen=True)
class Says:
    """Change the graph, and return `what`."""

    name: ClassVar[str] = "says"
    what: object = None

    def run(self, graph, context):
        Swap().run(graph, context)
        return self.what


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (None, "it returned None, and no PassResult"),
        (PassResult(True, {"a": "b"}), "its stats are no counts: {'a': 'b'}"),
    ],
)
def test_a_pass_with_a_wrong_result_is_named(step_of, what, message):
    with pytest.raises(InternalError, match="the pass 'says' failed on the function 'call'") as caught:
        run_passes(step_of(lambda x: x.relu(), torch.randn(3)), [Says(what)])
    assert message in str(caught.value)


def test_bisection_finds_a_pass_that_reports_no_change(step_of):
    found = bisect(step_of(lambda x: x.relu(), torch.randn(3)), [CommonSubexpressions(), Says(PassResult(False))])
    assert (found[-1].name, found[-1].changes_numbers) == ("says", True)


@dataclass(frozen=True)
class Misnamed:
    """Its name differs from its entry point's."""

    name: ClassVar[str] = "other"

    def run(self, graph, context):
        return PassResult(False)


@dataclass(frozen=True)
class Impostor(Says):
    """Has the name of another pass."""


@dataclass(frozen=True)
class Other(Misnamed):
    """Has the name of a pass of IronGrad."""

    name: ClassVar[str] = "dce"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("Misnamed", "calls itself 'other'"),
        ("_step", "is no dataclass with a method `run`"),
        ("Nowhere", "cannot be loaded"),
        ("DeadCode", "calls itself 'dce'"),
    ],
)
def test_an_entry_point_that_is_no_pass_is_named(monkeypatch, value, message):
    entry = EntryPoint("mine", f"test_framework_passes:{value}", registry.GROUP)
    monkeypatch.setitem(sys.modules, "test_framework_passes", sys.modules[__name__])
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    monkeypatch.setattr(registry, "all_passes", registry.all_passes.__wrapped__)
    assert passes_at(2)  # other passes still work
    assert parse_passes("dce") == (DeadCode(),)
    with pytest.raises(UserError, match="the pass 'mine'") as caught:
        parse_passes("dce,mine")
    assert message in str(caught.value)


def test_of_two_passes_with_one_name_only_irongrads_own_is_registered(monkeypatch):
    monkeypatch.setitem(sys.modules, "test_framework_passes", sys.modules[__name__])
    values = {"says": ["Says", "Impostor"], "dce": ["Other"]}
    entries = [EntryPoint(n, f"test_framework_passes:{v}", registry.GROUP) for n, vs in values.items() for v in vs]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    monkeypatch.setattr(registry, "all_passes", registry.all_passes.__wrapped__)
    assert "says" not in registered()
    with pytest.raises(UserError, match=r"the pass 'says' \(test_framework_passes:Impostor\) has the name of another"):
        parse_passes("says")
    assert registered()["dce"] is DeadCode
    assert set(registry.all_passes().broken) == {"says", "dce"}


def test_bisection_finds_the_pass_and_the_function():
    found = bisect(step_graph(_step()), [CommonSubexpressions(), Swap(), DeadCode()])
    assert [f.changes_numbers for f in found] == [False] * (len(found) - 1) + [True]
    assert (found[-1].number, found[-1].name, found[-1].function) == (2, "swap", "joint")
    assert found[-1].difference > 1e-3


def test_bisection_of_a_step_in_buckets():
    """One bucket is smaller than the example, and one larger."""
    model = nn.Linear(4, 3)
    inputs = {"x": torch.randn(5, 4), "y": torch.tensor([0, 1, 2, 0, 1])}
    dynamic = {"x": {0: "B"}, "y": {0: "B"}}
    step = ig.TrainStep(
        model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters()), inputs, dynamic=dynamic,
        buckets={"B": [4, 8]},
    )  # fmt: skip
    found = bisect(step_graph(step), passes_at(1))
    assert {"joint", "joint@B4", "eval@B4", "predict"} <= {f.function for f in found}
    assert not any(f.changes_numbers for f in found)


def test_fractions_of_integers_are_float64_too(step_of):
    """Otherwise bisection would report their rounding to float32 as a change."""
    graph = step_of(lambda i: i.exp() + i / 3, torch.tensor([1, 2])).functions["call"].graph
    (result,) = run_in_float64(graph, [torch.tensor([1, 2])])
    assert torch.equal(result, torch.tensor([1.0, 2.0], dtype=torch.float64).exp() + torch.tensor([1, 2]).double() / 3)


def test_rounding_of_a_gradient_that_is_zero_changes_nothing(step_of):
    """The gradient of a bias before a normalisation: its terms cancel, and only rounding errors remain."""

    def normalised(x, weight, bias):
        y = nn.functional.conv2d(x, weight, bias, padding=1)
        return nn.functional.batch_norm(y, None, None, training=True).sin().sum()

    def gradients(*tensors):
        return torch.func.grad(normalised, (0, 1, 2))(*tensors)

    torch.manual_seed(0)
    step = step_of(gradients, torch.randn(4, 3, 5, 5), torch.randn(8, 3, 3, 3), torch.randn(8))
    found = bisect(step, parse_passes("convolutions{direct=false},layout"))
    assert [f.name for f in found] == ["convolutions", "layout"]
    assert 0 < max(f.difference for f in found) < 1e-12


@pytest.mark.parametrize("level", LEVELS)
def test_no_pass_of_a_level_changes_the_numbers(level):
    assert not any(f.changes_numbers for f in bisect(step_graph(_step()), passes_at(level)))


_PACKAGE = """
    from dataclasses import dataclass
    from typing import ClassVar
    import torch
    from irongrad.passes import PassResult

    @dataclass(frozen=True)
    class Halve:
        "Halve what is added."
        factor: float = 0.5
        name: ClassVar[str] = "halve"

        def run(self, graph, context):
            sums = [n for n in graph.graph.nodes if n.target is torch.ops.aten.add.Tensor]
            sums = [n for n in sums if n.meta["val"].is_floating_point()]
            for node in sums:
                node.kwargs = {"alpha": self.factor}
            return PassResult(bool(sums), {"halved": len(sums)})
"""

_STEP = """
    import torch
    import irongrad as ig

    def make_step():
        model = torch.nn.Linear(2, 2)
        torch.nn.init.ones_(model.bias)
        optimizer = torch.optim.SGD(model.parameters())
        return ig.TrainStep(model, lambda y: y.square().mean(), optimizer, {"input": torch.ones(3, 2)})
"""

# One process for all calls, which imports torch once; prints the exit code and the output of each.
_CALLS = """
    import io, json, sys
    from contextlib import redirect_stdout

    sys.path.insert(0, sys.argv[1])
    from irongrad.cli.main import main

    for call in json.loads(sys.argv[2]):
        sys.argv = ["irongrad", *call]
        with redirect_stdout(io.StringIO()) as printed:
            try:
                main()
            except SystemExit as end:
                code = end.code or 0
        print(json.dumps([code, json.loads(printed.getvalue())]))
"""


def test_a_pass_of_another_package_is_found_and_bisected(tmp_path):
    """From the entry point of an installed package, on the command line."""
    (tmp_path / "other.py").write_text(textwrap.dedent(_PACKAGE))
    metadata = tmp_path / "other-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    entries = "halve = other:Halve\ngone = nowhere:Gone"
    (metadata / "entry_points.txt").write_text(f"[irongrad.passes]\n{entries}\n")
    (tmp_path / "step.py").write_text(textwrap.dedent(_STEP))
    source = f"{tmp_path}/step.py:make_step"
    calls = [
        ["passes", "--json"],
        ["bisect", source, "--passes", "dce,halve{factor=0.25}", "--json"],
        ["bisect", source, "--passes", "dce,halve{factor=1}", "--precision", "bf16", "--json"],
    ]
    code = textwrap.dedent(_CALLS)
    given = [sys.executable, "-c", code, str(tmp_path), json.dumps(calls)]
    done = subprocess.run(given, capture_output=True, text=True, check=True)
    (_, listed), (found_code, found), (good_code, good) = map(json.loads, done.stdout.splitlines())
    assert "the pass 'gone' (nowhere:Gone) cannot be loaded: ModuleNotFoundError" in listed["broken"]["gone"]
    assert {"name": "halve", "summary": "Halve what is added.", "levels": []}.items() <= listed["passes"][-1].items()
    assert found["first"]["name"] == "halve"
    assert found_code == InternalError.exit_code
    assert good["first"] is None
    assert good_code == 0


def test_an_unknown_pass_to_leave_out_is_refused_with_the_passes_of_both_kinds(tmp_path):
    with pytest.raises(UserError, match=r"no pass 'nothing'; .*dce, .* IREE's module are .*share-kernels"):
        make_options(tmp_path / "out", disable_passes=["share-kernels", "nothing"])
