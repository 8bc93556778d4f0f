"""One worker process: compiles operators of PyTorch's OpInfo database and compares them with eager float64."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Case:
    """One sample input as a function of flat tensors.

    Attributes:
        run: tensors -> outputs.
        tensors: its inputs.
        differentiable: which of them get a gradient.
    """

    run: Callable[..., list[torch.Tensor]]
    tensors: list[torch.Tensor]
    differentiable: list[bool]


def operators() -> dict[str, Any]:
    """Every OpInfo with autograd and float32 by name, in the database's order."""
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

    chosen = [o for o in op_db if o.supports_autograd and torch.float32 in o.supported_dtypes("cpu")]
    return {f"{o.name}.{o.variant_test_name}" if o.variant_test_name else o.name: o for o in chosen}


def cases(op: Any, count: int) -> list[Case]:
    """The first `count` sample inputs of `op`."""
    torch.manual_seed(0)
    samples = []
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=True):
        samples.append(_case(op, sample))
        if len(samples) == count:
            break
    return samples


def _case(op: Any, sample: Any) -> Case:
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    wanted = [leaves[i].requires_grad for i in places]

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        # A copy first: some operators write into their input, and autograd refuses that of a leaf.
        given = [t.clone() if w else t.detach().clone() for t, w in zip(tensors, wanted, strict=True)]
        filled = list(leaves)
        for place, tensor in zip(places, given, strict=True):
            filled[place] = tensor
        first, args, kwargs = tree_unflatten(filled, spec)
        output = sample.output_process_fn_grad(op.op(first, *args, **kwargs))
        found = [o for o in tree_flatten(output)[0] if isinstance(o, torch.Tensor)]
        return [torch.view_as_real(o.resolve_conj()) if o.is_complex() else o for o in found]

    return Case(run, [leaves[i].detach() for i in places], wanted)


def combined(samples: Sequence[Case]) -> tuple[Callable[..., Any], list[torch.Tensor], bool]:
    """All samples as one function: (random weighted sum of all outputs, outputs), for one compilation.

    Returns the function, its example arguments, and whether it has gradients.
    """
    torch.manual_seed(1)
    outputs = [
        s.run(*(t.clone().requires_grad_(d) for t, d in zip(s.tensors, s.differentiable, strict=True))) for s in samples
    ]
    weights = [torch.randn(o.shape) for out in outputs for o in out]
    has_gradient = any(o.requires_grad for out in outputs for o in out)
    tensors = [t for s in samples for t in s.tensors]

    def run(*arguments: torch.Tensor) -> Any:
        given, factors = list(arguments[: len(tensors)]), list(arguments[len(tensors) :])
        found: list[torch.Tensor] = []
        for sample in samples:
            found += sample.run(*(given.pop(0) for _ in sample.tensors))
        if not has_gradient:
            return found
        loss = torch.zeros((), dtype=factors[0].dtype)
        for output, factor in zip(found, factors, strict=True):
            if output.requires_grad:
                loss = loss + (output * factor.detach()).sum()
        return loss, [o.detach() for o in found]

    return run, tensors + (weights if has_gradient else []), has_gradient


def attempt(samples: Sequence[Case]) -> tuple[str, str]:
    """Compile and verify `samples` together. Returns the verdict and what was said."""
    import irongrad as ig
    from irongrad.runtime.errors import (
        CaptureError,
        InternalError,
        ToolchainError,
        UnsupportedOpError,
        VerificationError,
    )

    try:
        try:
            function, arguments, gradients = combined(samples)
        except RuntimeError:  # eager refuses the sample as a function of arrays; so must the compiler, by name
            (sample,) = samples
            function, arguments, gradients = sample.run, sample.tensors, False
        ig.compile_function(function, arguments, gradients=gradients, cache=False)
    except UnsupportedOpError as error:
        return "refused", str(error)
    except CaptureError as error:
        return "capture", str(error)
    except ToolchainError as error:
        return ("import" if "torch-mlir" in str(error)[:40] else "compile"), str(error)
    except VerificationError as error:
        return "wrong", str(error)
    except InternalError as error:
        return "internal", str(error)
    except Exception:
        return "error", traceback.format_exc()[-1500:]
    return "pass", ""


def serve(connection: Connection) -> None:
    """Answer requests (operator name, number of samples) until the connection closes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    known = operators()
    while True:
        try:
            name, count = connection.recv()
        except EOFError:
            return
        start = time.monotonic()
        samples = cases(known[name], count)
        verdict, detail = attempt(samples)
        results = [(verdict, detail)] * len(samples)
        if verdict != "pass" and len(samples) > 1:
            results = []
            for number, sample in enumerate(samples):
                connection.send(("progress", number))
                results.append(attempt([sample]))
        connection.send(("done", results, time.monotonic() - start))
