"""Generation: text to tokens and back in the parent, tokens to tokens on the ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.jobs.request import Request, request
from hocket.jobs.validate import validate
from hocket.spec.errors import ModelError, OptionError
from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec, Workload

if TYPE_CHECKING:
    from hocket.launch import Launcher, RankContext
    from hocket.models.source import ModelSource
    from hocket.serving.request import Sampling
    from hocket.training.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """What followed one prompt: the new tokens, without the one that ended it, and their text."""

    prompt: str
    text: str
    tokens: tuple[int, ...]


OnText = Callable[[int, str], None]
"""Called with the number of the prompt and the next piece of its text, as it is made."""


def generate(
    model: str,
    prompts: Sequence[str],
    *,
    layout: str | Layout = "dp1",
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    on_text: OnText | None = None,
    launcher: Launcher | None = None,
    **options: Any,
) -> list[Completion]:
    """Continue each prompt with a key/value cache, greedily unless `temperature` is above 0.

    Args:
        model: a Hugging Face directory or a run folder; it must hold weights and a tokenizer.
        prompts: the texts to continue.
        layout: of tp and pp.
        max_new_tokens, temperature, top_k, top_p, seed: how tokens are chosen.
        on_text: told of the text as it grows.
        launcher: a warm one to use. None: one is started.
        **options: `dtype`, `schedule`, `cut`, `device`, `backend`, `threads`, `attention`,
            `tokenizer`, `trust_remote_code`, as for training.

    Raises:
        HocketError: what the caller can mend, before any rank starts wherever possible.
    """
    from hocket.jobs import twin
    from hocket.launch import joined
    from hocket.models.source import resolve
    from hocket.serving.request import Sampling, check_prompts, refuse_replicas
    from hocket.serving.front.text import TextPieces

    if joined() is not None:
        raise OptionError(
            "generate starts its own ranks; it was started as one of another launcher's",
            hint="run it without torchrun",
        )
    wanted = request({"model": model, "layout": layout, "seed": seed, **options})
    refuse_replicas(wanted.layout)
    source = resolve(model, trust_remote_code=wanted.options.trust_remote_code)
    workload = Workload(seq_len=2, global_batch=1, dtype=wanted.workload.dtype)
    where = validate(source.dimensions, wanted.layout, workload)
    if source.weights is None:
        raise ModelError(
            f"{model} has no weights, and random ones would write noise",
            hint="a run folder, or a directory with safetensors weights",
        )
    words = _tokenizer(source, wanted)
    ids = [words.encode(prompt, special=True) for prompt in prompts]
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=_stop(source, words),
    )
    check_prompts(ids, sampling, source.dimensions.vocab_size, source.dimensions.max_positions)
    spec = RunSpec(
        model=str(source.directory),
        config=source.config,
        layout=dataclasses.replace(where, microbatches=1),
        workload=workload,
        options=dataclasses.replace(wanted.options, dropout=0.0),
        weights=str(source.weights.resolve()),
        command="generate",
    )
    pieces = [TextPieces(words.decode) for _ in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]

    def tell(row: int, text: str) -> None:
        if on_text is not None and text:
            on_text(row, text)

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "tokens":
            for row, token in enumerate(event["tokens"]):
                if token is not None:
                    tokens[row].append(token)
                    tell(row, pieces[row].add(token))

    with _warm(launcher, wanted) as ranks:
        twin.require(ranks, source, where, attention=wanted.options.attention)
        ranks.run(
            "hocket.jobs.generate:main",
            where.world_size,
            {"spec": spec.to_json(), "prompts": ids, "sampling": dataclasses.asdict(sampling)},
            listen,
            startup_timeout=600.0,
            silence_timeout=max(300.0, wanted.options.timeout),
        )
    for row, piece in enumerate(pieces):
        tell(row, piece.end())
    return [
        Completion(prompt=prompt, text=piece.text, tokens=tuple(found))
        for prompt, piece, found in zip(prompts, pieces, tokens, strict=True)
    ]


@contextlib.contextmanager
def _warm(launcher: Launcher | None, wanted: Request) -> Iterator[Launcher]:
    """The launcher given, or one of our own."""
    if launcher is not None:
        yield launcher
        return
    from hocket.launch import Launcher

    preload = ("hocket.training.build", "hocket.serving.padded")
    with Launcher(wanted.options.device, wanted.options.threads, preload=preload) as own:
        yield own


def _tokenizer(source: ModelSource, wanted: Request) -> Tokenizer:
    from hocket.training import tokenizer

    choice = wanted.options.tokenizer
    if choice == "train":
        raise OptionError("--tokenizer train makes one for training", hint="--tokenizer DIR")
    if choice is None and source.tokenizer is None:
        raise ModelError(
            f"{source.name} holds no tokenizer", hint="--tokenizer DIR, or --tokenizer bytes"
        )
    return tokenizer.resolve(
        choice,
        model_dir=source.tokenizer,
        trust_remote_code=wanted.options.trust_remote_code,
    )


def _stop(source: ModelSource, words: Tokenizer) -> tuple[int, ...]:
    """The tokens that end a text: as the model's generation settings say, else the tokenizer's."""
    found: Any = source.config.get("eos_token_id")
    settings = Path(source.directory or "") / "generation_config.json"
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(settings.read_text()).get("eos_token_id", found)
    if found is None:
        found = words.eos_id
    ids = found if isinstance(found, list) else [found]
    return tuple(int(i) for i in ids if i is not None)


def main(context: RankContext, payload: dict[str, Any]) -> None:
    """In each rank: build its part of the model and generate; rank 0 emits the tokens.

    Payload: `spec` (a RunSpec's JSON), `prompts` (token ids), `sampling` (a Sampling's fields).
    """
    from hocket.schedules.registry import build
    from hocket.serving.padded import Engine
    from hocket.serving.request import Sampling
    from hocket.training.build import build_model, join_world

    spec = RunSpec.from_json(payload["spec"])
    sampling: Sampling = Sampling(
        **{**payload["sampling"], "stop": tuple(payload["sampling"]["stop"])}
    )
    schedule = build(spec.layout, 1) if spec.layout.num_stages > 1 else None
    mesh = join_world(spec, context)
    source, skeleton, _, parallel = build_model(spec, mesh, schedule)
    engine = Engine(
        parallel.stages,
        mesh,
        skeleton.config,
        stage_ranks=None if schedule is None else schedule.stage_ranks,
        positions=source.dimensions.max_positions,
    )

    def tell(number: int, tokens: list[int | None]) -> None:
        if context.rank == 0:
            context.emit({"event": "tokens", "number": number, "tokens": tokens})

    engine.generate(payload["prompts"], sampling, tell)
