"""Ask which kernels a configuration gets on a device, and why.

>>> shape = Shape(num_q_heads=32, num_kv_heads=8, head_dim=128)
>>> explain(shape, CacheSpec(format="fp8"), device="cpu").rows["decode"].name
'cpu.decode'
"""

from __future__ import annotations

from typing import Any

import torch

from pageant.device import Device
from pageant.select.answer import Explanation
from pageant.select.built import missing_elsewhere, missing_here, never_missing
from pageant.select.choose import Missing, choose_together, device_of
from pageant.select.needs import needs_of
from pageant.select.validate import check_config
from pageant.types import ArgumentError, CacheSpec, Features, Options, Shape, Support

__all__ = ["Explanation", "explain"]


def explain(
    shape: Shape,
    cache: CacheSpec | None = None,
    features: Features | None = None,
    options: Options | None = None,
    device: Device | torch.device | str = "cpu",
    *,
    cubins: bool = True,
    missing: Missing = missing_here,
) -> Explanation:
    """Choose a kernel for each phase and say why.

    Args:
        shape, cache, features, options: as for ``Attention``.
        device: a device of this machine, or any family: a Device, "sm90" or "90".
        cubins: whether FlashInfer's prebuilt kernels can be had.
        missing: which kernels cannot be had there; by default, what cannot be had here.
            ``missing_in`` is for machines elsewhere.
    """
    cache = CacheSpec() if cache is None else cache
    features = Features() if features is None else features
    options = Options() if options is None else options
    asked: dict[str, Any] = {
        "shape": shape,
        "cache": cache,
        "features": features,
        "options": options,
        "cubins": cubins,
    }
    support = check_config(shape, cache, features, options)
    if not support.ok:
        return Explanation(support=support, **asked)
    try:
        known = device_of(device)
    except ArgumentError as error:
        return Explanation(support=Support(False, str(error), error.argument), **asked)
    needs = needs_of(shape, cache, features, options, known, cubins)
    choices = choose_together(needs, options.kernels, missing)
    support = next((c.support for c in choices if c.row is None), Support(True))
    return Explanation(
        support=support, device=known, choices=choices, needs=needs, missing=missing, **asked
    )


def missing_in(kernels: object) -> Missing:
    """What is missing in a machine elsewhere; FlashInfer's kernels, asked for, need no FlashInfer.

    >>> missing_in("flashinfer.xqa") is missing_in("flashinfer"), missing_in("auto").__name__
    (True, 'missing_elsewhere')
    """
    asks_flashinfer = isinstance(kernels, str) and kernels.partition(".")[0] == "flashinfer"
    return never_missing if asks_flashinfer else missing_elsewhere
