"""The byte map of a cache, for people and for programs: where each element and scale lies.

>>> from pageant.cache.formats import FORMATS
>>> layout = CacheLayout("LBHNC", 1, 1, 2, 4, 16, 16, 2, 2)
>>> ByteMap(layout, FORMATS["nvfp4"]).formula("k")
'layer * 288 + page * 288 + head * 64 + token * 16 + i // 2'
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pageant.cache.formats import Format
from pageant.cache.layout import CacheLayout

AXES = {"L": "layer", "B": "page", "H": "head", "N": "token"}
NAMES = {"k": "key", "k_scales": "key scales", "v": "value", "v_scales": "value scales"}
SHOWN = 4  # rows at the beginning of memory; half as many of each region


@dataclass(frozen=True)
class ByteMap:
    """What a layout and a format make of memory; prints as text.

    Attributes:
        layout: where the bytes of each part lie.
        fmt: what they mean.
        v_scale_order: of the value scales of nvfp4, as in CacheSpec.
    """

    layout: CacheLayout
    fmt: Format
    v_scale_order: str = "linear"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready. Bytes are of one layer; `first_byte` counts from where regions begin.

        Without stored scales there are no regions, and it counts from where a row begins.
        """
        layout, fmt = self.layout, self.fmt
        return {
            "format": fmt.name,
            "element_bits": fmt.bits,
            "elements_per_byte": fmt.per_byte,
            "scale_dtype": None if fmt.scale_dtype is None else _name(fmt.scale_dtype),
            "scale_block": fmt.scale_block,
            "v_scale_order": self.v_scale_order,
            "layout": layout.order,
            "sizes": layout.sizes,
            "strides_bytes": layout.strides,
            "region_rows": layout.region_rows,
            **{NAMES[part].replace(" ", "_"): self._part(part) for part in layout.parts},
            "row_bytes": layout.row_bytes,
            "token_bytes": layout.row_bytes * layout.num_kv_heads,
            "page_bytes": layout.page_bytes,
            "cache_bytes": layout.num_bytes,
        }

    def _part(self, part: str) -> dict[str, Any]:
        first, strides = self.layout.place(part)
        _, size = self.layout.parts[part]
        return {
            "first_byte": first,
            "row_bytes": size,
            "token_bytes": size * self.layout.num_kv_heads,
            "page_bytes": size * self.layout.num_kv_heads * self.layout.page_size,
            "strides_bytes": strides,
            "formula": self.formula(part),
        }

    def formula(self, part: str) -> str:
        """First byte of an element `i` or of a scale `s`, from layer, page, head and token."""
        first, strides = self.layout.place(part)
        terms = [f"{AXES[axis]} * {strides[axis]}" for axis in self.layout.order if axis != "C"]
        if not part.endswith("scales"):
            size, per_byte = self.fmt.bits // 8, self.fmt.per_byte
            terms.append(f"i * {size}" if per_byte == 1 else f"i // {per_byte}")
        elif self._is_swizzled(part):
            quarter = self.layout.parts[part][1] // 4
            row = f"(token // 4 * 4 + s // {quarter})"
            terms = [term.replace("token", row) for term in terms]
            terms.append(f"s % {quarter} * 4 + token % 4")
        elif self.fmt.scale_block:
            terms.append("s")
        return " + ".join([*terms, *([str(first)] if first else [])])

    def _is_swizzled(self, part: str) -> bool:
        return part == "v_scales" and self.v_scale_order == "swizzled"

    def __str__(self) -> str:
        layout, axes = self.layout, [axis for axis in self.layout.order if axis != "C"]
        order = ", ".join(AXES[axis] for axis in axes)
        row = "" if self._has_scales else ": its key, then its value"
        lines = [
            *self._elements(f"Layout {layout.order}, outermost axis first: {order}, content."),
            "",
            f"A page holds {layout.page_size} tokens of {layout.num_kv_heads} heads. "
            f"A row is one token of one head{row}.",
            *self._regions(),
            "Bytes of one layer, and where each element lies:",
            "",
            *_columns(self._sizes()),
            "",
            *_columns(self._strides(axes)),
            "",
            f"The first rows {'of each region' if self._has_scales else 'in memory'}, "
            f"and the last of {layout.num_bytes} bytes:",
            "",
            *_columns([["bytes", *AXES.values(), ""], *self._rows()]),
        ]
        return "\n".join(lines)

    @property
    def _has_scales(self) -> bool:
        return self.fmt.scale_dtype is not None

    def _elements(self, order: str) -> Iterator[str]:
        """How elements are packed and read."""
        fmt, size = self.fmt, self.fmt.bits // 8
        if not self._has_scales:
            yield f"{fmt.name}: {size} byte{'s' * (size > 1)} an element. {order}"
            return
        packed = f"{size} byte an element"
        if fmt.per_byte > 1:
            bits = f"1 sign, {fmt.exponent_bits} exponent and {fmt.mantissa_bits} mantissa bit"
            packed = f"2 elements a byte, the even one in the low four bits ({bits})"
        yield f"{fmt.name}: {packed}."
        whose, index = "each row", ""
        if fmt.scale_block:
            whose, index = f"each {fmt.scale_block} elements", f"[i // {fmt.scale_block}]"
        layer = ", times the layer's k_scale or v_scale" if fmt.uses_layer_scales else ""
        yield f"One {_name(fmt.scale_dtype)} scale for {whose}."
        yield f"Element i reads as code[i] * scale{index}{layer}."
        yield order

    def _regions(self) -> Iterator[str]:
        """Where scales lie: what regions there are, and what each holds."""
        layout = self.layout
        if not self._has_scales:
            return
        together = "A page" if "H" in layout.inner else "One head of a page"
        size = layout.region_rows * layout.row_bytes
        yield f"{together}, {size} bytes, is four regions that begin at its bytes"
        yield ", ".join(f"{layout.place(part)[0]} ({NAMES[part]})" for part in layout.parts) + "."
        if self.v_scale_order == "swizzled":
            yield "Value scales are swizzled: those of four tokens are transposed."

    def _sizes(self) -> list[list[str]]:
        table = [["", "row", "token", "page", "element i begins at byte"]]
        if self._has_scales:
            scale = "scale s" if self.fmt.scale_block else "the scale"
            table[0][4] = f"element i, or {scale}, begins at byte"
        said = self.to_dict()
        for part in self.layout.parts:
            sizes = self._part(part)
            numbers = [str(sizes[f"{column}_bytes"]) for column in table[0][1:4]]
            table.append([NAMES[part], *numbers, sizes["formula"]])
        numbers = [str(said[f"{column}_bytes"]) for column in table[0][1:4]]
        return [*table, ["both" if len(table) == 3 else "all", *numbers, ""]]

    def _strides(self, axes: list[str]) -> list[list[str]]:
        """Strides of each part; one line where parts share them."""
        step = str(self.fmt.bits // 8) if self.fmt.per_byte == 1 else "1 for two"
        names = [AXES[axis] for axis in axes]
        if self.fmt.scale_dtype is None:
            numbers = [str(self.layout.strides[axis]) for axis in axes]
            return [["axis", *names, "element"], ["stride in bytes", *numbers, step]]
        table = [["stride in bytes", *names, "element", "scale"]]
        for part in self.layout.parts:
            strides = self.layout.place(part)[1]
            own = (
                ["", str(self.fmt.scale_dtype.itemsize)] if part.endswith("scales") else [step, ""]
            )
            table.append([NAMES[part], *(str(strides[axis]) for axis in axes), *own])
        return table

    def _rows(self) -> Iterator[list[str]]:
        """The first rows in memory, or of the first regions, and the last row of all."""
        layout = self.layout
        count = layout.num_bytes // layout.row_bytes
        if not self._has_scales:
            rows = dict.fromkeys([*range(min(SHOWN, count)), count - 1])
            for row in rows:
                for first, size in layout.parts.values():
                    yield self._row(row * layout.row_bytes + first, size)
            return
        for part, (_, size) in layout.parts.items():
            first = layout.place(part)[0]
            for row in range(min(SHOWN // 2, layout.region_rows)):
                yield self._row(first + row * size, size)
        last = layout.parts["v_scales"][1]
        yield self._row(layout.num_bytes - last, last)

    def _row(self, start: int, size: int) -> list[str]:
        at = self.layout.position(start)
        part = next(
            name for name, (first, width) in self.layout.parts.items() if at["C"] < first + width
        )
        places = {axis: str(at[axis]) for axis in AXES}
        if self._is_swizzled(part):
            tile = at["N"] // 4 * 4
            places["N"] = f"{tile}..{tile + 3}"
        return [f"{start}..{start + size - 1}", *places.values(), NAMES[part]]


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _columns(table: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        yield "  ".join(map(str.ljust, line, widths)).rstrip()
