"""`hocket generate`: continue a text with a trained model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated

import tyro

from hocket.cli.flags import Folder, LayoutFlags, Model, explicit, parse, values
from hocket.spec.errors import OptionError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue texts, with a key/value cache; greedy unless --temperature is above 0.

    Attributes:
        model: a run folder, a Hugging Face directory with weights and a tokenizer, an adapter of
            PEFT, or ORG/NAME[@REVISION] on the Hugging Face Hub.
        prompt: one text or several.
        parallel: where everything lives; generation splits over tp and pp.
        max_new_tokens: tokens per prompt.
        temperature: 0 takes the likeliest token; above, logits are divided by it.
        top_k: draw among the k likeliest tokens. None: among all.
        top_p: draw among the likeliest tokens that together reach this probability. None: all.
        seed: of the draws.
        dtype: `fp32` or `bf16`.
        tokenizer: a directory, or `bytes`. None: the model's own.
        attention: attention implementation, `sdpa` or `eager`.
        device: `auto`, `cpu` or `cuda`.
        backend: `auto`, `shm`, `gloo` or `nccl`.
        threads: CPU threads per rank.
        trust_remote_code: run code that a model directory brings along.
        json: print one JSON object a prompt.
    """

    model: Model = ""
    prompt: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT...")] = ()
    parallel: Annotated[LayoutFlags, tyro.conf.arg(name="layout")] = dataclasses.field(
        default_factory=LayoutFlags
    )
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    dtype: str = "fp32"
    tokenizer: Folder = None
    attention: str = "sdpa"
    device: str = "auto"
    backend: str = "auto"
    threads: int = 1
    trust_remote_code: bool = False
    json: bool = False


def main(arguments: Sequence[str]) -> int:
    """Generate. Returns 0."""
    flags = parse(Generate, "generate", arguments, Generate())
    if not flags.model:
        raise OptionError("no model was named", hint="hocket generate RUN --prompt TEXT")
    said = values(flags, also=explicit(arguments))
    for name in ("json", "model", "prompt"):
        said.pop(name, None)
    from hocket.jobs.generate import generate

    streams = len(flags.prompt) == 1 and not flags.json

    begun = False

    def show(_: int, text: str) -> None:
        nonlocal begun
        print(text if begun else flags.prompt[0] + text, end="", flush=True)
        begun = True

    found = generate(flags.model, flags.prompt, on_text=show if streams else None, **said)
    if streams:
        print("" if begun else flags.prompt[0])
        return 0
    for number, one in enumerate(found):
        if flags.json:
            print(json.dumps({"prompt": one.prompt, "text": one.text, "tokens": one.tokens}))
        else:
            print(("\n" if number else "") + one.prompt + one.text)
    return 0
