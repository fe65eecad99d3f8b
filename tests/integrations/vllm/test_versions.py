"""Our classes beside those of each version at hand: every hook is there, with vLLM's arguments.

The installed vLLM is looked at, and any that PAGEANT_VLLM_SOURCES names: folders, divided by ":",
that hold a `vllm` folder, as an unpacked wheel does. Nothing in them is imported.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make vllm` has an environment")

from pageant.integrations.vllm.backend import PageantBackend
from pageant.integrations.vllm.builder import PageantBuilder
from pageant.integrations.vllm.impl import PageantImpl

SPEC = importlib.util.find_spec("vllm")
INSTALLED = Path(SPEC.origin).parent.parent if SPEC and SPEC.origin else Path()
EXTRA = [Path(path) for path in os.environ.get("PAGEANT_VLLM_SOURCES", "").split(":") if path]
OURS = {
    "AttentionBackend": PageantBackend,
    "AttentionMetadataBuilder": PageantBuilder,
    "AttentionImplBase": PageantImpl,
    "AttentionImpl": PageantImpl,
}
# Left as vLLM has it: hooks of other kinds of attention, and fused operations nobody serves yet.
LEFT = {
    *("get_preferred_block_size", "is_mla", "is_sparse", "is_ssm", "full_cls_name"),
    *("supports_alibi_sqrt", "supports_mm_prefix", "supports_rswa", "supports_pcp", "supports_dcp"),
    *("supports_per_head_quant_scales", "supports_non_causal_dcp", "supports_block_size"),
    *("supports_dtype", "supports_kv_cache_dtype", "supports_kv_connector"),
    *("get_supported_head_sizes", "supported_kv_cache_layouts", "validate_configuration"),
    *("get_varlen_cudagraph_max_query_len", "_init_reorder_batch_threshold"),
    *("build_for_cudagraph_capture", "build_for_drafting", "update_block_table"),
    *("use_cascade_attention", "set_kernel_block_size", "__new__", "get_impl_variants"),
    *("prepare_for_batch", "reserve_workspace", "kv_quant_mode", "set_interleaved_v_cache"),
    *("fused_qk_norm_rope_kvcache_supported", "fused_qk_norm_mrope_kvcache_supported"),
    *("fused_rope_kvcache_supported", "do_qk_norm_rope_kvcache_update"),
    *("do_qk_norm_mrope_kvcache_update", "do_rope_and_kv_cache_update"),
}


def hooks(root: Path) -> dict[tuple[str, str], list[str]]:
    """Class and method, with the names of its arguments."""
    tree = ast.parse((root / "vllm/v1/attention/backend.py").read_text(encoding="utf-8"))
    return {
        (cls.name, each.name): [arg.arg for arg in (*each.args.args, *each.args.kwonlyargs)]
        for cls in tree.body
        if isinstance(cls, ast.ClassDef) and cls.name in OURS
        for each in cls.body
        if isinstance(each, ast.FunctionDef)
    }


@pytest.mark.parametrize("root", [INSTALLED, *EXTRA], ids=str)
def test_every_hook_is_known_and_takes_the_same_arguments(root: Path) -> None:
    found = hooks(root)
    assert len(found) > 40
    for (owner, name), arguments in found.items():
        ours = vars(OURS[owner]).get(name)
        if ours is None:
            assert name in LEFT, f"{owner}.{name} of {root} is new: serve it, or leave it"
            continue
        function = getattr(ours, "__func__", ours)
        taken = list(inspect.signature(function).parameters)
        assert taken[: len(arguments)] == arguments, f"{owner}.{name}"


@pytest.mark.parametrize("root", EXTRA, ids=str)
def test_what_we_import_is_there(root: Path) -> None:
    """Each name our files import from vLLM is one that its module defines or imports."""
    package = Path(inspect.getfile(PageantImpl)).parent
    wanted = {
        (node.module, alias.name)
        for path in package.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm"
        for alias in node.names
    }
    assert len(wanted) > 8
    for module, name in wanted:
        path = root / (module or "").replace(".", "/")
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        known = (path / f"{name}.py").exists() or name in source.read_text(encoding="utf-8")
        assert known, f"{module}.{name}"
