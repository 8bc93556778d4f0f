"""The cache key of a compiled step.

The key is the sha256 of everything that the artifact depends on:

* the captured graphs with their source locations;
* the values of parameters, buffers, optimizer state and example inputs;
* the options, and the versions and sources of the compiler;
* the machine, because `host` means its CPU.

Nothing else enters a compilation after capture, as long as only PyTorch's and IronGrad's own Python code runs. A step
that runs other Python code, or that holds values which cannot be compared, has no key.
"""

from __future__ import annotations

import platform
from dataclasses import fields
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.optim import optimizer as torch_optimizer

from irongrad.cache.machine import host, sha256, sources
from irongrad.operators.decompositions.registry import LIBRARY, users_operators
from irongrad.padding.registry import has_users_rules
from irongrad.passes import Pass, spelled
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.pipeline.capture.step_modules import StepModule
from irongrad.pipeline.described_values import UnknownValueError, described, described_program
from irongrad.step.layouts import layouts_of
from irongrad.step.train_step import TrainStep

if TYPE_CHECKING:
    from irongrad.pipeline.options import Options

PACKAGES = ("torch", "torch-mlir", "iree-base-compiler", "iree-base-runtime", "numpy", "scipy", "safetensors")

# Namespaces of operators whose implementation is part of PyTorch, or of the sources in the key.
_NAMESPACES = ("aten", "prims", "prim", "higher_order", "irongrad")
# Fields of steps and options that the key describes separately, or that do not affect the build. All other fields,
# including future ones, are described as they are.
_DESCRIBED_APART = frozenset(
    {"model", "loss", "optimizer", "inputs", "entries", "loss_scale", "targets", "passes", "_made_at"}
    | {"output", "dump_dir", "stop_after", "cache", "on_stage", "on_measuring"}
)


def step_key(captured: CapturedStep, options: Options, golden_steps: int) -> str | None:
    """The key of a whole build; None if the artifact depends on anything that cannot be compared."""
    step = captured.step
    programs = captured.programs
    # `LIBRARY` has the calls of users' autograd.Functions, each for one step: `_has_foreign_operators` finds them.
    users = any(o.namespace != LIBRARY for o in users_operators()) or has_users_rules()
    if users or any(map(_has_foreign_code, options.passes)) or _is_hooked(step):
        return None
    if any(_has_foreign_operators(p.graph_module) for p in programs):
        return None
    try:
        return sha256(
            [described_program(p) for p in programs],
            described(
                [captured.output_names, *((n, made.inputs, made.outputs) for n, made in captured.inference.items())]
            ),
            _step(step),
            golden_steps,
            _options(options),
            environment(),
            sources(),
        )
    except UnknownValueError:
        return None


def _step(step: TrainStep) -> Any:
    module = StepModule(step)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    names = {
        n: first.setdefault(id(p), n) for n, p in parameters.items()
    }  # tied parameters have the first of their names
    others = {f.name: getattr(step, f.name) for f in fields(step) if f.name not in _DESCRIBED_APART}
    return (
        names,
        described(parameters),
        described(dict(module.named_buffers(remove_duplicate=False))),
        tuple(_optimizer(o, first) for o in step.optimizers),
        described(step.examples),
        described(others),
        _loss_scale(step),
        described({name: (layout.tensors, layout.config) for name, layout in layouts_of(step.model).items()}),
    )


def _optimizer(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> Any:
    groups = [{**g, "params": [names[id(p)] for p in g["params"]]} for g in optimizer.param_groups]
    state = {names[id(p)]: values for p, values in optimizer.state.items()}
    return (type(optimizer).__qualname__, described(groups), described(state))


def _loss_scale(step: TrainStep) -> Any:
    scaler = step.scaler
    return described(scaler.state_dict() if isinstance(scaler, torch.amp.GradScaler) else scaler)


def _options(options: Options) -> Any:
    others = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in _DESCRIBED_APART}
    return (repr(options.targets), tuple(map(spelled, options.passes)), described(others))


def environment() -> Any:
    """The versions of packages, the machine, and the settings that PyTorch's numbers depend on."""
    return (
        platform.python_version(),
        tuple((p, version(p)) for p in PACKAGES),
        host(),
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        torch.get_float32_matmul_precision(),
        str(torch.get_default_dtype()),
    )


def _has_foreign_code(pass_: Pass) -> bool:
    return not type(pass_).__module__.startswith("irongrad.")


def _is_hooked(step: TrainStep) -> bool:
    """Whether Python code outside of the captured graphs runs when gradients are computed or parameters updated."""
    module = StepModule(step)
    hooks = [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    for optimizer in step.optimizers:
        if not type(optimizer).__module__.startswith("torch.optim."):
            return True
        hooks += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    for submodule in module.modules():
        hooks += [submodule._backward_hooks, submodule._backward_pre_hooks]
    for parameter in module.parameters():
        hooks += [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]
    hooks += [nn.modules.module._global_backward_hooks, nn.modules.module._global_backward_pre_hooks]
    scaler = step.scaler
    return any(hooks) or (scaler is not None and type(scaler) not in (float, torch.amp.GradScaler))


def _has_foreign_operators(graph: GraphModule) -> bool:
    nodes = [n for m in graph.modules() if isinstance(m, GraphModule) for n in m.graph.nodes]
    return any(n.op == "call_function" and not _is_known(n.target) for n in nodes)


def _is_known(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in _NAMESPACES
    return getattr(target, "__module__", "").partition(".")[0] in ("torch", "_operator", "builtins", "math")
