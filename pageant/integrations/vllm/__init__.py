"""Pageant as an attention backend of vLLM 0.31 to 0.33.

Installed beside vLLM, Pageant registers itself in every process: ``--attention-backend CUSTOM``, or
``LLM(attention_backend="CUSTOM")``, uses it. The stock CPU platform would ignore that choice, so
there a platform of ours takes its place, which differs in nothing else.

====================  ========================================================================
``backend``           what vLLM may ask for, and the reason where the answer is no
``builder``           once a step: vLLM's metadata in, a plan out
``impl``              once a layer: writes keys and values, attends
``encoder``           encoder-only layers, which cache nothing
``group``             what the layers of one cache group need, as an Attention
``cache``             vLLM's cache tensors and type names, in our words
``cpu_platform``      the CPU platform that honours CUSTOM
``compat``            all that differs from version to version
====================  ========================================================================
"""

from __future__ import annotations

import logging

BACKEND = "pageant.integrations.vllm.backend.PageantBackend"
CPU_PLATFORM = "pageant.integrations.vllm.cpu_platform.PageantCpuPlatform"


def register() -> None:
    """Make CUSTOM mean Pageant; an entry point of ``vllm.general_plugins``, harmless when repeated.

    Another plug-in's CUSTOM is left alone, with a warning.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    log = logging.getLogger("vllm.pageant")
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        log.warning("CUSTOM is %s already; Pageant is not registered.", custom.get_path())
        return
    register_backend(custom, BACKEND)
    stock = logging.getLogger("vllm.platforms.cpu")
    if _warn_if_ignored not in stock.filters:
        stock.addFilter(_warn_if_ignored)


def cpu_platform() -> str | None:
    """The platform to use, if this is a CPU: an entry point of ``vllm.platform_plugins``."""
    from vllm.platforms import cpu_platform_plugin

    return None if cpu_platform_plugin() is None else CPU_PLATFORM


def _warn_if_ignored(record: logging.LogRecord) -> bool:
    """Say clearly what the stock CPU platform mentions in passing: that it ignores CUSTOM."""
    if "CUSTOM" in record.getMessage() and record.getMessage().startswith("Cannot use"):
        logging.getLogger("vllm.pageant").warning(
            "--attention-backend CUSTOM did not take: vLLM's own CPU platform is active and "
            "ignores it, so Pageant does not run. Unset VLLM_TARGET_DEVICE, and let VLLM_PLUGINS "
            "(if set) name pageant_cpu beside pageant."
        )
    return True
