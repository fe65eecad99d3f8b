"""The command `pageant generate`: complete prompts with a model, and show what it took."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from pageant.cache.calibrate import Scales
from pageant.cache.calibrate import calibrate as fit_scales
from pageant.cache.formats import FORMATS, Format, resolve
from pageant.device import Device
from pageant.engine.config import EngineConfig
from pageant.engine.display import LiveTexts, figures
from pageant.engine.errors import EngineError
from pageant.engine.model import DEFAULT_MODEL, FoundModel, LoadedModel, find
from pageant.engine.prompts import DEMO_PROMPTS, LengthLimit, check_text, tokens_of
from pageant.engine.ranks import joined, own_device
from pageant.engine.request import OnText, Sampling
from pageant.parallel.combine import RanksError
from pageant.types import ArgumentError, CacheSpec, Options, bad

if TYPE_CHECKING:  # brings in transformers, which takes seconds that `--help` should not
    from pageant.engine.engine import Completion, Engine

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def generate(  # budget: one parameter for each option of the command line
    model: Annotated[str, typer.Option(help="smollm2, a local folder, or a hub id.")] = (
        DEFAULT_MODEL
    ),
    prompt: Annotated[list[str] | None, typer.Option(help="May be given several times.")] = None,
    prompts_file: Annotated[Path | None, typer.Option(help="One prompt a line.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="For each prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Probability that the kept tokens hold.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Default: float32 on the CPU, else bfloat16.")
    ] = None,
    cache: Annotated[str, typer.Option(help="Cache format; auto stores the model's dtype.")] = (
        "auto"
    ),
    calibrate: Annotated[
        int,
        typer.Option(help="Fit the cache's scales to the prompts' first N tokens; 0: scales 1."),
    ] = 0,
    page_size: Annotated[int, typer.Option(help="Tokens a page.")] = 16,
    num_pages: Annotated[int | None, typer.Option(help="Default: for 8192 tokens.")] = None,
    chunk_size: Annotated[int, typer.Option(help="Prompt tokens a step; 0: whole prompts.")] = 256,
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Compute every prompt from its start.")
    ] = False,
    spec: Annotated[
        int, typer.Option(help="Tokens to draft a step from the text so far; 0: none.")
    ] = 0,
    context_parallel: Annotated[
        int, typer.Option(min=1, help="Processes that share the cache; start them by torchrun.")
    ] = 1,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    no_graphs: Annotated[
        bool, typer.Option("--no-graphs", help="On a GPU: launch decode steps kernel by kernel.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Complete prompts with a language model through paged attention.

    Without a prompt, eight built-in ones run as a demonstration.
    """
    try:
        torch_device = own_device(_device(device))
        torch_dtype = _dtype(dtype, torch_device)
        _check_calibration(calibrate, resolve(cache, torch_dtype))
        sampling = Sampling(
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
        )
        prompts = _prompts(prompt or [], prompts_file)
        is_demo = not prompt and prompts_file is None
        with joined(context_parallel, torch_device) as ranks:
            config = EngineConfig(
                cache=CacheSpec(format=cache, page_size=page_size),
                num_pages=num_pages,
                chunk_size=chunk_size or None,
                prefix_cache=not no_prefix_cache,
                speculative_tokens=spec,
                graphs=not no_graphs,
                options=Options(context_parallel=ranks),
            )
            is_first = ranks is None or ranks.rank == 0  # the others work silently
            console = Console(stderr=as_json, quiet=not is_first)
            with console.status(f"loading {model}"):
                found = find(model, quiet=True)
                inputs = _tokens(found, prompts, config, chat=chat or is_demo)
                loaded = found.load(torch_dtype, torch_device)
                scales = _scales(loaded, inputs, calibrate, cache) if calibrate else None
                engine = _engine(loaded, config, scales)
            completions = _run(engine, prompts, inputs, sampling, console)
    except (EngineError, ArgumentError, RanksError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1 if isinstance(error, RanksError) else 2) from None
    if not as_json:
        _print(console, prompts, completions, engine)
    elif is_first:
        typer.echo(_json(prompts, completions, engine, scales))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise bad("device", name, "cpu, cuda or cuda:N") from None
    Device.detect(device)
    return device


def _dtype(name: str | None, device: torch.device) -> torch.dtype:
    if name is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise bad("dtype", name, ", ".join(DTYPES))
    return DTYPES[name]


def _prompts(given: list[str], file: Path | None) -> list[str]:
    """Prompts of the options and the file (blank lines left out), or the demonstration's."""
    for prompt in given:
        check_text(prompt)
    if file is None:
        return given or list(DEMO_PROMPTS)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise EngineError(f"prompts file {str(file)!r} cannot be read: {error}") from error
    prompts = given + [line for line in lines if line.strip()]
    if not prompts:
        raise EngineError(f"prompts file {str(file)!r} holds no prompt")
    return prompts


def _check_calibration(num_tokens: int, fmt: Format) -> None:
    if num_tokens < 0:
        raise bad("calibrate", num_tokens, "a number of tokens, from 0 up")
    if num_tokens and not fmt.uses_layer_scales:
        scaled = ", ".join(name for name, each in FORMATS.items() if each.uses_layer_scales)
        raise bad("calibrate", num_tokens, f"0 for cache {fmt.name}; {scaled} have scales to fit")


def _tokens(
    found: FoundModel, prompts: Sequence[str], config: EngineConfig, *, chat: bool
) -> list[list[int]]:
    """Token ids of each prompt, all short enough; with `chat`, as a user's message."""
    limit = LengthLimit.of(found.config, config)
    inputs = chat_tokens(found.tokenizer, prompts) if chat else prompts
    return [tokens_of(given, found.tokenizer, limit) for given in inputs]


def chat_tokens(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each prompt as a user's message."""
    if not tokenizer.chat_template:
        raise EngineError("the model has no chat template; give prompts without --chat")
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = tokenizer.apply_chat_template(conversations, add_generation_prompt=True, tokenize=False)
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


def _scales(
    loaded: LoadedModel, inputs: Sequence[Sequence[int]], num_tokens: int, cache: str
) -> list[Scales]:
    """Each layer's scales, from the inputs' first `num_tokens` tokens."""
    from pageant.engine.prefill import first_tokens, observe

    longest = loaded.model.config.get_text_config(decoder=True).max_position_embeddings
    texts = first_tokens(inputs, num_tokens, longest)
    return [fit_scales(seen, cache) for seen in observe(loaded.model, texts)]


def _engine(loaded: LoadedModel, config: EngineConfig, scales: list[Scales] | None) -> Engine:
    from pageant.engine.engine import Engine

    return Engine(*loaded, config, scales)


def _run(
    engine: Engine,
    prompts: Sequence[str],
    inputs: Sequence[Sequence[int]],
    sampling: Sampling,
    console: Console,
) -> list[Completion]:
    """Generate, and show text as it comes if there is a terminal to show it on."""
    if not console.is_terminal:
        return engine.generate(inputs, sampling)
    if len(prompts) == 1:
        console.print(Text(prompts[0], style="bold"))
        completions = engine.generate(inputs, sampling, [_writer(console)])
        console.print()
        return completions
    with LiveTexts(console, prompts) as view:
        return engine.generate(inputs, sampling, view.callbacks())


def _writer(console: Console) -> OnText:
    def write(piece: str) -> None:
        console.print(Text(piece), end="", soft_wrap=True)

    return write


def _print(
    console: Console, prompts: Sequence[str], completions: list[Completion], engine: Engine
) -> None:
    """Texts that were not streamed, which of all were cut short, and the figures."""
    for prompt, completion in zip(prompts, completions, strict=True):
        if not (console.is_terminal and len(prompts) == 1):
            console.print(Text(prompt, style="bold"), soft_wrap=True)
            console.print(Text(completion.text.strip() + "\n"), soft_wrap=True)
        if completion.finish_reason == "cache_full":
            console.print("Cut short: the cache is full. More pages: --num-pages.\n")
    console.print(figures(engine.report()))


def _json(
    prompts: Sequence[str],
    completions: list[Completion],
    engine: Engine,
    scales: list[Scales] | None,
) -> str:
    answer: dict[str, Any] = {
        "completions": [
            {"prompt": prompt, **dataclasses.asdict(completion)}
            for prompt, completion in zip(prompts, completions, strict=True)
        ],
        "metrics": dataclasses.asdict(engine.report()),
    }
    if scales is not None:
        answer["scales"] = [dataclasses.asdict(each) for each in scales]
    return json.dumps(answer)
