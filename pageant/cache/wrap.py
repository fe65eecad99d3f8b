"""Pages that exist already, the engine's: its tensors as a LayerCache, without a copy."""

from __future__ import annotations

from dataclasses import replace

import torch

from pageant.cache.formats import Format, resolve
from pageant.cache.layout import CacheLayout
from pageant.cache.pages import LayerCache, layout_for
from pageant.cache.tensors import overlaps_itself
from pageant.types import CacheSpec, Shape, bad

Scales = tuple[torch.Tensor | None, torch.Tensor | None]


def wrap(
    shape: Shape,
    spec: CacheSpec,
    tensors: tuple[torch.Tensor, torch.Tensor | None],
    scales: Scales,
    device: torch.device,
) -> LayerCache:
    """One layer's cache over tensors that exist already, without copying.

    Args:
        shape, spec: what the tensors must hold.
        tensors: keys and values as in LayerCache; or both in one, axes in the layout's order, and
            None: [.., Hkv, .., D + Dv] elements. Formats that store scales have them in bytes:
            [.., Hkv, .., bytes of a row] or, where D = Dv, [.., 2 Hkv, .., bytes of a key].
        scales: as in LayerCache, for formats that store them beside separate keys and values.
        device: where the tensors must be.

    Tensors may have the format's own types, or a one-byte integer type for others of one byte.
    """
    fmt = resolve(spec.format, shape.dtype)
    k, v = tensors
    _check_given(fmt, scales, is_combined=v is None)
    if v is not None:
        elements = _typed("k", k, fmt.element_dtype), _typed("v", v, fmt.element_dtype)
        stored = _typed_scales(fmt, scales)
    elif fmt.scale_dtype is None:
        elements = _split(_typed("combined", k, fmt.element_dtype), shape, spec)
        stored = scales
    else:
        layout = layout_for(shape, spec, 1, 1)
        elements, stored = _regions(_typed("combined", k, torch.uint8), layout, fmt)
    rows = (spec.page_size, shape.num_kv_heads)
    dims = (shape.head_dim, shape.value_dim)
    names = ("k", "v") if v is not None else ("combined", "combined")
    for name, view, dim in zip(names, elements, dims, strict=True):
        _check(name, view, (*rows, dim // fmt.per_byte), device)
    for name, scale, dim in zip(("k_scales", "v_scales"), stored, dims, strict=True):
        if scale is not None:
            _check(name, scale, (*rows, fmt.num_scales(dim)) if fmt.scale_block else rows, device)
    for name, other in (("v", elements[1]), ("k_scales", stored[0]), ("v_scales", stored[1])):
        if other is not None and other.shape[0] != elements[0].shape[0]:
            allowed = f"as many pages as k, {elements[0].shape[0]}"
            raise bad(name, f"{other.shape[0]} pages", allowed)
    _check_apart({"k": elements[0], "v": elements[1], "k_scales": stored[0], "v_scales": stored[1]})
    return LayerCache(*elements, fmt, *stored, spec.v_scale_order)


def _check_apart(views: dict[str, torch.Tensor | None]) -> None:
    """Raise where two slots are one in memory: writing one would change the other."""
    starts: dict[int, str] = {}
    for name, view in views.items():
        if view is None or not view.numel():
            continue
        steps = sorted(
            (step, size) for size, step in zip(view.shape, view.stride(), strict=True) if size > 1
        )
        reach = 1
        for step, size in steps:
            if step < reach and overlaps_itself(view):
                raise bad(name, f"a tensor of strides {view.stride()}", "slots that are apart")
            reach = max(reach, step * (size - 1) + reach)
        other = starts.setdefault(view.data_ptr(), name)
        if other != name:
            raise bad(name, f"the memory of {other}", "memory of its own")


def _check_given(fmt: Format, scales: Scales, *, is_combined: bool) -> None:
    for name, given in zip(("k_scales", "v_scales"), scales, strict=True):
        if given is not None and fmt.scale_dtype is None:
            raise bad(name, "given", f"None: cache format {fmt.name} stores no scales")
        if given is not None and is_combined:
            raise bad(name, "given", "None beside one tensor that holds everything")
        if given is None and fmt.scale_dtype is not None and not is_combined:
            raise bad(name, None, f"a tensor of {fmt.scale_dtype} for cache format {fmt.name}")


def _typed(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor as one of `dtype`: it is, or both it and `dtype` take one byte."""
    if not isinstance(tensor, torch.Tensor):
        raise bad(name, tensor, f"a tensor of {dtype}")
    if tensor.dtype == dtype:
        return tensor
    is_bytes = tensor.dtype in (torch.uint8, torch.int8)
    if dtype.itemsize == 1 and (is_bytes or (tensor.element_size() == 1 and dtype == torch.uint8)):
        return tensor.view(dtype)
    bytes_too = " or uint8" if dtype.itemsize == 1 and dtype != torch.uint8 else ""
    raise bad(name, tensor.dtype, f"{dtype}{bytes_too}")


def _typed_scales(fmt: Format, scales: Scales) -> Scales:
    k_scales, v_scales = scales
    if k_scales is None or v_scales is None or fmt.scale_dtype is None:
        return None, None
    names = (("k_scales", k_scales), ("v_scales", v_scales))
    k_scales, v_scales = (_typed(name, scale, fmt.scale_dtype) for name, scale in names)
    return k_scales, v_scales


def _check(name: str, view: torch.Tensor, want: tuple[int, ...], device: torch.device) -> None:
    if view.dim() != 1 + len(want) or tuple(view.shape[1:]) != want:
        names = ("page_size", "kv heads", "elements a row")
        sizes = ", ".join(f"{name} {size}" for name, size in zip(names, want, strict=False))
        raise bad(name, tuple(view.shape), f"[pages, {sizes}]")
    if view.device != device:
        raise bad(name, str(view.device), f"a tensor on {device}")
    if len(want) == 3 and want[-1] > 1 and view.stride(-1) != 1:
        raise bad(name, f"content stride {view.stride(-1)}", "content stride 1")
    if view.requires_grad:
        raise bad(name, "a tensor that requires grad", "one that does not")


def _split(
    combined: torch.Tensor, shape: Shape, spec: CacheSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one tensor [.., D + Dv] whose axes stand in the layout's order."""
    axes = spec.layout.replace("L", "")
    dims = [shape.head_dim, shape.value_dim]
    _check_axes(combined, axes, {"H": shape.num_kv_heads, "N": spec.page_size, "C": sum(dims)})
    logical = combined.permute([axes.index(axis) for axis in "BNHC"])
    key, value = logical.split(dims, dim=-1)
    return key, value


def _check_axes(combined: torch.Tensor, axes: str, want: dict[str, int]) -> None:
    shape = ", ".join(str(want.get(axis, "pages")) for axis in axes)
    if combined.dim() != len(axes) or any(
        size != want.get(axis, size) for axis, size in zip(axes, combined.shape, strict=True)
    ):
        allowed = f"[{shape}], axes {', '.join(axes)} of the layout"
        raise bad("combined", tuple(combined.shape), allowed)


def _regions(
    combined: torch.Tensor, layout: CacheLayout, fmt: Format
) -> tuple[tuple[torch.Tensor, torch.Tensor], Scales]:
    """The four parts of one tensor of bytes, a budget the regions of `layout` lie in.

    Args:
        combined: uint8, axes in the layout's order without L.
        layout: of one layer; its number of pages is not looked at.
        fmt: the cache format.
    """
    axes, want = layout.order.replace("L", ""), {axis: layout.sizes[axis] for axis in "HNC"}
    heads, key_bytes = axes.index("H"), layout.key_bytes + layout.key_scale_bytes
    in_halves = combined.dim() == len(axes) and combined.shape[heads] == 2 * want["H"]
    if in_halves and 2 * key_bytes == layout.row_bytes:  # values follow keys as more heads
        want |= {"H": 2 * want["H"], "C": key_bytes}
    _check_axes(combined, axes, want)
    _check_dense(combined, 1 + len(layout.inner))
    parts = {part: (combined, layout, part) for part in layout.parts}
    if want["C"] == key_bytes and "H" not in layout.inner:
        side = replace(layout, value_bytes=0, value_scale_bytes=0)
        keys, values = combined.chunk(2, heads)
        parts = {"k": (keys, side, "k"), "k_scales": (keys, side, "k_scales")}
        parts |= {"v": (values, side, "k"), "v_scales": (values, side, "k_scales")}
    views = {part: _region(*where, fmt) for part, where in parts.items()}
    return (views["k"], views["v"]), (views["k_scales"], views["v_scales"])


def _check_dense(combined: torch.Tensor, num_axes: int) -> None:
    """Raise unless the last axes lie one inside the other without gaps."""
    step: int = 1
    for axis in range(-1, -1 - num_axes, -1):
        if combined.shape[axis] > 1 and combined.stride(axis) != step:
            allowed = f"no gaps within the last {num_axes} axes"
            raise bad("combined", f"a tensor of strides {combined.stride()}", allowed)
        step *= int(combined.shape[axis])


def _region(source: torch.Tensor, layout: CacheLayout, part: str, fmt: Format) -> torch.Tensor:
    """One part as [P, N, Hkv, elements], or without the last axis for one scale a row."""
    axes = layout.order.replace("L", "")
    start, strides = layout.place(part)
    outer = {axis: i for i, axis in enumerate(axes) if axis not in (*layout.inner, "C")}
    strides |= {axis: source.stride(i) for axis, i in outer.items()}
    sizes = {**layout.sizes, "B": source.shape[axes.index("B")], "C": layout.parts[part][1]}
    start = int(start + source.storage_offset())
    dtype = fmt.scale_dtype if part.endswith("scales") else fmt.element_dtype
    assert dtype is not None
    for place in (start, *(strides[axis] for axis in "BNH" if sizes[axis] > 1)):
        if place % dtype.itemsize:
            allowed = f"pages that begin at multiples of {dtype.itemsize} bytes"
            raise bad("combined", f"a tensor with an offset or stride of {place}", allowed)
    strides |= {axis: dtype.itemsize for axis in "BNH" if sizes[axis] == 1}
    view = source.as_strided([sizes[a] for a in "BNHC"], [strides[a] for a in "BNHC"], start)
    view = view.view(dtype)
    return view if fmt.scale_block or part in ("k", "v") else view.squeeze(-1)
