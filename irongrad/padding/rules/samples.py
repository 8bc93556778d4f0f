"""Padding rules of operators that compute each image or matrix by itself, so that padding may lie between these."""

from __future__ import annotations

from typing import Any

from irongrad.padding.layout import layout_of, solid
from irongrad.padding.padded import Padded
from irongrad.padding.registry import Call, NoRule, aten, rule

# For each operator, its tensors, and how many of the last dimensions of each are one image or matrix.
_IMAGES = {
    **{
        getattr(aten, f"{kind}_pad{rank}d{suffix}").default: dict.fromkeys(names, rank)
        for kind in ("reflection", "replication")
        for rank in (1, 2, 3)
        for suffix, names in (("", ("self",)), ("_backward", ("grad_output", "self")))
    },
    aten.im2col.default: {"self": 3},
    aten.col2im.default: {"self": 2},
    aten.pixel_shuffle.default: {"self": 3},
    aten.pixel_unshuffle.default: {"self": 3},
    aten.channel_shuffle.default: {"self": 3},
    aten.grid_sampler_2d.default: {"input": 3, "grid": 3},
    aten.grid_sampler_2d_backward.default: {"grad_output": 3, "input": 3, "grid": 3},
}
_UPSAMPLED = {
    getattr(getattr(aten, f"upsample_{kind}{suffix}"), overload): {name: rank}
    for kind, rank in {
        "linear1d": 1,
        "bilinear2d": 2,
        "bicubic2d": 2,
        "trilinear3d": 3,
        "nearest1d": 1,
        "nearest2d": 2,
        "nearest3d": 3,
    }.items()
    for suffix, overload, name in (
        ("", "default", "self"),
        ("", "vec", "input"),
        ("_backward", "default", "grad_output"),
    )
}
_MATRICES = {
    aten.linalg_inv_ex.default: {"A": 2},
    aten.linalg_cholesky_ex.default: {"self": 2},
    aten.linalg_lu_factor_ex.default: {"A": 2},
    aten.linalg_qr.default: {"A": 2},
    aten._linalg_det.default: {"A": 2},
    aten._linalg_slogdet.default: {"A": 2},
    aten._linalg_eigh.default: {"A": 2},
    aten.linalg_solve_triangular.default: {"self": 2, "B": 2},
    aten.linalg_lu_solve.default: {"LU": 2, "pivots": 1, "B": 2},
    aten._linalg_solve_ex.default: {"A": 2, "B": 2},
}
_OWN = {**_IMAGES, **_UPSAMPLED, **_MATRICES}


@rule(*_OWN)
def _each(call: Call) -> Any:
    own = dict(_OWN[call.operator])
    if call.operator is aten._linalg_solve_ex.default and call["B"].ndim < call["A"].ndim:
        own["B"] = 1
    for name, rank in own.items():
        if call[name].padded(range(call[name].ndim - rank, call[name].ndim)):
            raise NoRule("has no padding rule where an image or a matrix is itself padded")
    outer = call.broadcast_layouts([call[name].layout[: call[name].ndim - rank] for name, rank in own.items()])
    kept = tuple(map(solid, outer))
    made = call.run(**{name: call.padding.fill(call[name], 1) for name in own if name == "pivots"})  # they are indices
    results = made if isinstance(made, (tuple, list)) else [made]
    padded = [
        None if result is None else Padded(result, (*kept, *layout_of((sizes or ())[len(kept) :])))
        for result, sizes in zip(results, call.made, strict=True)
    ]
    return padded if isinstance(made, (tuple, list)) else padded[0]
