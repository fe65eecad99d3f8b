"""Pageant as an attention implementation of transformers models.

    register()                                             # once
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="pageant")
    model.generate(...)

    use(model)                                             # before continuous batching
    model.generate_batch(inputs, generation_config)

Continuous batching takes no name without the word flash in it, and does not ask for more, so the
same function has a second one, which only ``use`` can set. It serves ``generate`` too.

Pageant's own engine runs models through ``layers_of`` and ``Step``: see ``engine``.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from pageant.integrations.transformers.engine import NAME, LayerCall, Step, layers_of
from pageant.integrations.transformers.function import attention

CONTINUOUS = "pageant_flash"

__all__ = ["CONTINUOUS", "NAME", "LayerCall", "Step", "attention", "layers_of", "register", "use"]


def register() -> None:
    """Make "pageant" known to transformers; importing this package has done so already."""
    for name in (NAME, CONTINUOUS):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, _mask)


def use(model: Any) -> Any:
    """Switch a loaded model to Pageant, for continuous batching and everything else.

    Returns:
        The model.
    """
    register()
    model.config._attn_implementation = CONTINUOUS
    return model


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor | None:
    """Mask [B, <= kv_length] of the keys that are tokens, or None if all are.

    A cache of fixed size has room behind the last token; the mask ends with that token.
    """
    end = int(q_offset) + q_length
    if attention_mask is None and end < kv_length:
        device = others.get("device", "cpu")
        return torch.ones(batch_size, end, dtype=torch.bool, device=device)
    mask = flash_attention_mask(
        batch_size, q_length, kv_length, q_offset, attention_mask=attention_mask, **others
    )
    return None if mask is None else mask.bool()


register()
