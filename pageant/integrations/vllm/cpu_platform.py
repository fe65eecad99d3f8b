"""vLLM's CPU platform, which honours ``--attention-backend CUSTOM`` and starts beside numba."""

from __future__ import annotations

import sys
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import cpu_platform_plugin
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

log = init_logger("vllm.pageant")
Stock: Any = resolve_obj_by_qualname(cpu_platform_plugin() or "vllm.platforms.cpu.CpuPlatform")


class PageantCpuPlatform(Stock):
    """The stock platform, or that of AMD's Zen where vLLM would choose it."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """The path of the backend to use.

        Raises:
            ValueError: CUSTOM was asked for and does not serve this model, with the reasons.
        """
        if selected_backend is not AttentionBackendEnum.CUSTOM:
            stock: str = super().get_attn_backend_cls(
                selected_backend, attn_selector_config, num_heads
            )
            return stock
        path: str = selected_backend.get_path()
        reasons = selected_backend.get_class().validate_configuration(
            device_capability=None, **attn_selector_config._asdict()
        )
        if reasons:
            raise ValueError(f"attention backend CUSTOM ({path}) cannot be used: {reasons}")
        log.info_once("Using %s for attention.", path)
        return path

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """As the stock platform does, which looks for kernels in whatever all modules hold.

        It fails on llvmlite's handle of its library (seen in 0.32), which pretends to have every
        attribute: a second engine in one process, or one after numba was imported, did not start.
        """
        name = "llvmlite.binding.ffi"
        module = sys.modules.pop(name, None)
        try:
            super().register_triton_kernel_overrides()
        finally:
            if module is not None:
                sys.modules[name] = module
