"""The command `pageant generate`: output, and one clear line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
import typer
from click.testing import Result
from typer.testing import CliRunner

from pageant.engine.generate import DEMO_PROMPTS, generate

APP = typer.Typer()
APP.command()(generate)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(APP, list(arguments))


def test_json_is_one_object_and_alone_on_stdout() -> None:
    result = run("--json", "--prompt", "The capital of France is", "--max-new-tokens", "4")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    (completion,) = answer["completions"]
    assert completion["text"].startswith(" Paris")
    assert (len(completion["tokens"]), completion["finish_reason"]) == (4, "length")
    assert answer["metrics"]["generated_tokens"] == 4


def test_seed_repeats_the_output() -> None:
    arguments = ["--json", "--prompt", "Once", "--temperature", "1", "--top-p", "0.9"]
    arguments += ["--max-new-tokens", "6"]
    first, again, other = (
        json.loads(run(*arguments, "--seed", seed).stdout)["completions"]
        for seed in ("1", "1", "2")
    )
    assert first == again != other


def test_prompts_of_a_file_follow_the_options(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("One two three\n\nA B C D\n")
    result = run("--prompt", "Hello", "--prompts-file", str(file), "--max-new-tokens", "2")
    assert result.exit_code == 0, result.stderr
    places = [result.stdout.index(text) for text in ("Hello", "One two three", "A B C D")]
    assert places == sorted(places)
    assert "inter-token latency" in result.stdout


def test_demonstration_uses_the_chat_template_and_shares_its_start() -> None:
    result = run("--json", "--max-new-tokens", "2")
    answer = json.loads(result.stdout)
    assert [c["prompt"] for c in answer["completions"]] == list(DEMO_PROMPTS)
    assert min(c["num_prompt_tokens"] for c in answer["completions"]) > 30
    assert answer["metrics"]["prefix_hit_tokens"] > 0


def test_chat_changes_the_prompt() -> None:
    plain, chat = (
        json.loads(run("--json", "--prompt", "Hi", "--max-new-tokens", "1", *option).stdout)
        for option in ((), ("--chat",))
    )
    lengths = [answer["completions"][0]["num_prompt_tokens"] for answer in (plain, chat)]
    assert lengths == [1, 31]


def test_calibration_fits_the_scales_to_the_first_tokens() -> None:
    arguments = ["--json", "--cache", "fp8", "--max-new-tokens", "4"]
    arguments += ["--prompt", "The capital of France is", "--prompt", "Paris is a city in"]
    short, long, plain = (
        json.loads(run(*arguments, *option).stdout)
        for option in (("--calibrate", "2"), ("--calibrate", "100"), ())
    )
    assert "scales" not in plain
    assert len(long["scales"]) == 30
    for few, all_ in zip(short["scales"], long["scales"], strict=True):
        for name, scale in all_.items():
            # Never more than a matrix product's rounding above; SmolLM2's values are far below 448.
            assert 0 < few[name] <= 1.0001 * scale < 1
    assert short["scales"] != long["scales"]
    assert long["completions"][0]["text"].startswith(" Paris")


def test_drafts_are_in_the_metrics() -> None:
    arguments = ["--prompt", "one two three four one two three", "--max-new-tokens", "8"]
    answer = json.loads(run("--json", *arguments, "--spec", "3").stdout)
    assert answer["completions"][0]["text"].startswith(" four")
    metrics = answer["metrics"]
    assert 0 < metrics["accepted_tokens"] <= metrics["drafted_tokens"]
    assert metrics["acceptance_rate"] == metrics["accepted_tokens"] / metrics["drafted_tokens"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "/no/such/model"], "model '/no/such/model' was not found"),
        (["--prompt", "word " * 40, "--num-pages", "2"], "up to 31"),
        (["--prompt", "word " * 9000, "--num-pages", "2000"], "the model's 8192 positions"),
        (["--prompt", ""], "empty"),
        (["--cache", "fp3"], "cache is 'fp3'"),
        (["--dtype", "float8"], "dtype is 'float8'"),
        (["--device", "tpu9"], "device is 'tpu9'"),
        (["--page-size", "0"], "page_size is 0"),
        (["--num-pages", "0"], "num_pages is 0"),
        (["--chunk-size", "-1"], "chunk_size is -1"),
        (["--spec", "-1"], "speculative_tokens is -1; allowed: a whole number from 0 to 4096"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--top-p", "0"], "top_p is 0"),
        (["--calibrate", "-1", "--cache", "fp8"], "calibrate is -1"),
        (["--calibrate", "8"], "0 for cache fp32; fp8_e4m3, fp8_e5m2"),
        (["--calibrate", "8", "--cache", "fp8", "--prompt", ""], "empty"),
        (["--seed", str(2**64)], f"seed is {2**64}"),
        (["--page-size", str(2**31)], f"page_size is {2**31}"),
        (["--num-pages", str(2**31)], f"num_pages is {2**31}"),
        (["--num-pages", str(2**31 - 1)], f"num_pages is {2**31 - 1}; allowed: what fits"),
        (["--prompts-file", "/no/such/file"], "prompts file '/no/such/file'"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert said in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", "fits", "--prompt", ""], "empty"),
        (["--prompt", "", "--chat"], "empty"),
        (["--prompt", "word " * 40, "--num-pages", "2"], "up to 31"),
        (["--prompt", "word " * 40, "--num-pages", "2", "--chat"], "up to 31"),
        (["--prompt", "word " * 9000, "--num-pages", "2000"], "the model's 8192 positions"),
    ],
)
def test_a_wrong_prompt_is_found_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    if said == "empty":  # that needs no tokenizer either
        monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", load)
    result = run(*arguments)
    assert result.exit_code == 2, result.exception
    assert said in result.stderr


def test_a_completion_cut_short_says_so() -> None:
    arguments = ["--prompt", "The capital of France is", "--page-size", "4", "--num-pages", "2"]
    answer = json.loads(run("--json", *arguments).stdout)
    assert answer["completions"][0]["finish_reason"] == "cache_full"
    assert "the cache is full" in run(*arguments).stdout
    assert "the cache is full" not in run(*arguments, "--max-new-tokens", "1").stdout


def test_a_file_without_prompts_is_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "empty.txt"
    file.write_text("\n \n")
    result = run("--prompts-file", str(file))
    assert result.exit_code == 2
    assert "holds no prompt" in result.stderr
