"""Generation: texts continued by the engine that serves; models it refuses, by padded rows."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hocket.jobs import precision
from hocket.jobs.request import NAMES, JobRequest, request
from hocket.jobs.serving.llm import LLM, Completion, OnText
from hocket.jobs.validate import validate_layout
from hocket.spec import renamed
from hocket.spec.errors import ModelError
from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec, Workload

if TYPE_CHECKING:
    from hocket.jobs.serving.request import PreparedServer
    from hocket.launch import Launcher
    from hocket.serving.request import SamplingParams


def generate_texts(
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
    """Continue each prompt, greedily unless `temperature` is above 0.

    Args:
        model: a Hugging Face directory or a run folder; it must hold weights and a tokenizer.
        prompts: the texts to continue.
        layout: of tp and pp.
        max_new_tokens, temperature, top_k, top_p, seed: how tokens are chosen.
        on_text: called with the text as it grows.
        launcher: a warm one to use. None: one is started.
        **options: `dtype`, `schedule`, `pipeline_split`, `device`, `backend`, `threads`,
            `attention`, `tokenizer`, `trust_remote_code`, as for training.

    Raises:
        HocketError: what the caller can mend, before any rank starts wherever possible.
    """
    from hocket.serving.request import SamplingParams, check_prompts

    wanted, server = prepared(model, layout, {"seed": seed, **options})
    ids = [server.words.encode(prompt, special=True) for prompt in prompts]
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=server.stop,
    )
    dimensions = server.source.dimensions
    check_prompts(ids, sampling, dimensions.vocab_size, dimensions.max_positions)
    sized = _sized(server, ids, max_new_tokens)
    try:
        with LLM.of(sized, launcher) as llm:
            found = llm.generate(ids, sampling, on_text=on_text, progress=False)
    except ModelError as error:
        if "cannot be served" not in error.message:
            raise
        return _padded(wanted, server, prompts, sampling, on_text=on_text, launcher=launcher)
    return [
        dataclasses.replace(one, prompt=prompt) for one, prompt in zip(found, prompts, strict=True)
    ]


def prepared(
    model: str, layout: str | Layout, options: dict[str, Any], **serving: Any
) -> tuple[JobRequest, PreparedServer]:
    """A checked request, and one replica that answers it.

    Args:
        options: as of `generate_texts`. serving: options of `ServeOptions`.

    Raises:
        HocketError: what the caller can mend.
    """
    from hocket.jobs.serving import request as serve_request
    from hocket.serving.request import refuse_replicas

    options = renamed.present_options(options, NAMES)
    wanted = request({"model": model, "layout": layout, **options})
    precision.reject_served_dtype(wanted.workload)
    refuse_replicas(wanted.layout)
    # A schedule of training steps says nothing about answers: each rank holds one stage.
    plain = dataclasses.replace(
        wanted.layout, schedule=Layout().schedule, virtual_stages=1, microbatches=None
    )
    shared = {name: value for name, value in options.items() if name in serve_request.SHARED}
    return wanted, serve_request.server({"model": model, "layout": plain, **shared, **serving})


def _sized(server: PreparedServer, ids: Sequence[Sequence[int]], new: int) -> PreparedServer:
    """With rows and a cache for these prompts, and no larger."""
    options = server.options
    longest = max(map(len, ids)) + new
    rows = min(len(ids), options.max_num_seqs or len(ids))
    sizes = dataclasses.replace(
        options,
        max_model_len=longest,
        max_num_seqs=rows,
        num_blocks=options.block_size and rows * -(-longest // options.block_size),
        cache_memory=None,
    )
    return dataclasses.replace(server, options=sizes)


# --- models whose layers keep something else than keys and values ---------------------------------


def _padded(
    wanted: JobRequest,
    server: PreparedServer,
    prompts: Sequence[str],
    sampling: SamplingParams,
    *,
    on_text: OnText | None,
    launcher: Launcher | None,
) -> list[Completion]:
    """By `serving.padded`, through the model's own cache: what pages cannot hold (BLOOM's own
    attention, recurrent states)."""
    from hocket.jobs.proxy import require_equal
    from hocket.serving.front.text import TextPieces

    source, words = server.source, server.words
    workload = Workload(seq_len=2, global_batch=1, dtype=wanted.workload.dtype)
    where = validate_layout(source.dimensions, wanted.layout, workload)
    assert source.weights is not None
    ids = [words.encode(prompt, special=True) for prompt in prompts]
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
        require_equal(ranks, source, where, attention=wanted.options.attention, loss=False)
        ranks.run(
            "hocket.ranks.generate:main",
            where.world_size,
            {"spec": spec.to_json(), "prompts": ids, "sampling": sampling.to_json()},
            listen,
            startup_timeout=600.0,
            silence_timeout=max(300.0, wanted.options.timeout),
        )
    for row, piece in enumerate(pieces):
        tell(row, piece.end())
    return [
        Completion(
            prompt=prompt,
            text=piece.text,
            tokens=tuple(found),
            prompt_tokens=tuple(given),
            finish_reason="length" if len(found) == sampling.max_new_tokens else "stop",
        )
        for prompt, given, piece, found in zip(prompts, ids, pieces, tokens, strict=True)
    ]


@contextlib.contextmanager
def _warm(launcher: Launcher | None, wanted: JobRequest) -> Iterator[Launcher]:
    """The launcher given, or one of our own."""
    if launcher is not None:
        yield launcher
        return
    from hocket.launch import Launcher

    preload = ("hocket.training.build", "hocket.serving.padded")
    with Launcher(wanted.options.device, wanted.options.threads, preload=preload) as own:
        yield own
