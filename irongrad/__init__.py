"""IronGrad: an ahead-of-time compiler for PyTorch training steps.

`TrainStep` and `compile` need torch (`pip install irongrad[compile]`); `irongrad.runtime` does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from irongrad.runtime.installed import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from irongrad.frontends.compile_function import compile_function as compile_function
    from irongrad.frontends.torch_compile import torch_backend as torch_backend
    from irongrad.frontends.torch_ranks import TorchCommunicator as TorchCommunicator
    from irongrad.operators.decompositions.registry import register_decomposition as register_decomposition
    from irongrad.padding.registry import register_padding_rule as register_padding_rule
    from irongrad.pipeline.driver import compile as compile
    from irongrad.pipeline.proposed_placement import propose_placement as propose_placement
    from irongrad.quantisation.gguf_file import load_gguf as load_gguf
    from irongrad.quantisation.quantize import quantize as quantize
    from irongrad.sizes.buckets import choose_buckets as choose_buckets
    from irongrad.sizes.buckets import pow2 as pow2
    from irongrad.step.after_step import every as every
    from irongrad.step.checkpoint import load_checkpoint as load_checkpoint
    from irongrad.step.checkpoint import save_checkpoint as save_checkpoint
    from irongrad.step.entries import Entry as Entry
    from irongrad.step.hyperparameters import hypers as hypers
    from irongrad.step.sam import SAM as SAM
    from irongrad.step.steps import Steps as Steps
    from irongrad.step.train_step import TrainStep as TrainStep
    from irongrad.step.train_step import pieces as pieces

__all__ = [
    "SAM",
    "Entry",
    "Steps",
    "TorchCommunicator",
    "TrainStep",
    "__version__",
    "choose_buckets",
    "compile",
    "compile_function",
    "every",
    "hypers",
    "load_checkpoint",
    "load_gguf",
    "pieces",
    "pow2",
    "propose_placement",
    "quantize",
    "register_decomposition",
    "register_padding_rule",
    "save_checkpoint",
    "torch_backend",
]

# Imported when first used, so that `import irongrad.runtime` stays free of torch.
_HOME = {
    "Entry": "irongrad.step.entries",
    "SAM": "irongrad.step.sam",
    "Steps": "irongrad.step.steps",
    "TorchCommunicator": "irongrad.frontends.torch_ranks",
    "TrainStep": "irongrad.step.train_step",
    "choose_buckets": "irongrad.sizes.buckets",
    "compile": "irongrad.pipeline.driver",
    "compile_function": "irongrad.frontends.compile_function",
    "every": "irongrad.step.after_step",
    "hypers": "irongrad.step.hyperparameters",
    "load_checkpoint": "irongrad.step.checkpoint",
    "load_gguf": "irongrad.quantisation.gguf_file",
    "pieces": "irongrad.step.train_step",
    "pow2": "irongrad.sizes.buckets",
    "propose_placement": "irongrad.pipeline.proposed_placement",
    "quantize": "irongrad.quantisation.quantize",
    "register_decomposition": "irongrad.operators.decompositions.registry",
    "register_padding_rule": "irongrad.padding.registry",
    "save_checkpoint": "irongrad.step.checkpoint",
    "torch_backend": "irongrad.frontends.torch_compile",
}


# Subpackages, each with an extra of its own that installs the package of the same name.
_SUBMODULES = ("jax", "onnx")


def __getattr__(name: str) -> Any:
    if name not in _HOME and name not in _SUBMODULES:
        raise AttributeError(f"module 'irongrad' has no attribute {name!r}")
    try:
        if name in _SUBMODULES:
            return import_module(f"irongrad.{name}")
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        raise (compiler_missing(f"irongrad.{name}", error) or error) from error


def compiler_missing(what: str, error: ModuleNotFoundError) -> ImportError | None:
    """The error to raise if `what` could not import the compiler, JAX or onnx; None for any other module."""
    package = (error.name or "").partition(".")[0]
    if package in _SUBMODULES:
        return ImportError(f"{what} needs {package}, which is not installed: pip install 'irongrad[{package}]'")
    if package not in ("torch", "torch_mlir", "iree", "platformdirs"):
        return None
    return ImportError(f"{what} needs the compiler, which is not installed: pip install 'irongrad[compile]'")
