"""`irongrad.quantize`: replace the frozen layers of a model by quantised ones."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from irongrad.quantisation.layers import Model, is_transposed, quantisable, replace_layers
from irongrad.quantisation.torchao import is_torchao, read_torchao
from irongrad.quantisation.weights import FORMS, QuantizedWeight, pack
from irongrad.runtime.errors import UserError

_GROUPS = {"int4": 64}  # the columns that share a scale, by form; a whole row for others


def quantize(model: Model, form: str | None = None, *, group: int | None = None, skip: Collection[str] = ()) -> Model:
    """Quantise the linear layers and embeddings of a model in place: they are stored packed, and not trained.

    If some parameters of the model are frozen, as by PEFT, only frozen weights are quantised; otherwise all are. Biases
    and all other parameters stay as they are. So do layers that are quantised already. Tied weights stay tied.

    Args:
        model: the model; its `nn.Linear`, `nn.Embedding` and transformers' `Conv1D` are replaced.
        form: `int8`, `int4` or `bf16`; None leaves all weights alone but those that torchao has quantised. The numbers
            of these are taken as they are, whatever the form.
        group: the number of columns of a weight that share a scale: 64 by default with `int4`, all with `int8`.
        skip: names of modules to leave as they are, with all that is in them: whole names, or parts of names between
            dots, such as `lm_head`.

    Returns:
        The same model; or the new layer, if the model is itself a layer.

    Raises:
        UserError: there is no such form, no layer to quantise, or a layer that cannot be quantised so. The model is
            unchanged then.
    """
    _check(form, group, skip, model)
    some_frozen = any(not p.requires_grad for p in model.parameters() if not is_torchao(p))
    weights: dict[nn.Module, QuantizedWeight] = {}
    of_tensor: dict[int, QuantizedWeight] = {}
    for name, layer in quantisable(model):
        tensor: Any = layer.weight
        wanted = is_torchao(tensor) or (form is not None and not (some_frozen and tensor.requires_grad))
        if wanted and not _is_skipped(name, skip):
            if id(tensor) not in of_tensor:
                of_tensor[id(tensor)] = _quantised(name, layer, form, group or _GROUPS.get(form or ""))
            weights[layer] = of_tensor[id(tensor)]
    if not weights:
        what = "weight that torchao has quantised" if form is None else "linear layer or embedding with a frozen weight"
        raise UserError(f"{type(model).__name__} has no {what}, so there is nothing to quantise")
    return replace_layers(model, weights)


def _check(form: str | None, group: int | None, skip: Collection[str], model: nn.Module) -> None:
    if form is not None and form not in FORMS:
        raise UserError(f"there is no form {form!r} of quantised weights; the forms are {', '.join(FORMS)}")
    if group is not None and (form not in ("int8", "int4") or not isinstance(group, int) or group < 1):
        raise UserError(f"group={group!r}: a group is a positive number of columns, with the form int8 or int4")
    if isinstance(skip, str):
        raise UserError(f"skip={skip!r}: give a list of names of modules")
    names = [name for name, _ in model.named_modules()]
    if unknown := [s for s in skip if not any(_is_skipped(name, [s]) for name in names)]:
        raise UserError(f"skip names {unknown[0]!r}, and the model has no such module")


def _is_skipped(name: str, skip: Collection[str]) -> bool:
    """Whether `name` is, or lies in, a module that `skip` names."""
    return any(f".{skipped}." in f".{name}." for skipped in skip)


def _quantised(name: str, layer: nn.Module, form: str | None, group: int | None) -> QuantizedWeight:
    """The quantised weight of a layer, with a row for each feature of its result, or for each row of its table."""
    try:
        if getattr(layer, "max_norm", None) is not None:
            raise UserError("with max_norm, the embedding changes its table")
        tensor: Any = layer.weight
        if is_torchao(tensor):
            return read_torchao(tensor)
        assert form is not None
        return pack(tensor.mT if is_transposed(layer) else tensor, form, group)
    except UserError as error:
        where = f"the weight of {name!r}" if name else "the weight"
        raise UserError(f"{where} cannot be quantised: {error}. Name the layer in skip=[...] to leave it") from error
