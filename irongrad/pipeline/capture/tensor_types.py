"""`type(x)` in the user's code gives the class that a tensor has in eager, where a trace has a class of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from irongrad.pipeline.capture.later import users_namespaces


@contextmanager
def eager_types() -> Iterator[None]:
    """While open, `type` in the user's modules takes the tensors of a trace for those that they stand for."""
    with ExitStack() as stack:
        for names in users_namespaces():
            if "type" not in names:
                stack.enter_context(mock.patch.dict(names, {"type": _Type}))
        yield


class _LikeType(type):
    """The class of what replaces `type`: classes are its instances."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, type)

    def __call__(cls, *args: Any, **named: Any) -> Any:
        kind = type(*args, **named)
        if kind not in (FakeTensor, FunctionalTensor):
            return kind
        return nn.Parameter if isinstance(args[0], nn.Parameter) else torch.Tensor


class _Type(metaclass=_LikeType):
    pass
