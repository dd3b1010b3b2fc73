"""`hocket generate`: continue a text with a trained model, or chat with it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import tyro

from hocket.cli.flags import Folder, Model, Text, explicit, flag_values, parse_flags
from hocket.spec.errors import HocketError, OptionError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue texts, with a key/value cache; greedy unless --temperature is above 0.

    Attributes:
        model: run folder, Hugging Face directory with weights and a tokenizer, PEFT adapter, or
            ORG/NAME[@REVISION] on the Hugging Face Hub.
        prompt: one prompt or several (default: the text on stdin).
        chat: chat by the model's template: each line of stdin, or each --prompt, is a message;
            /reset begins a new conversation, /exit ends.
        chat_template_file: with --chat, a template that replaces the tokenizer's own: a Jinja file,
            or one of chatml, llama-3, zephyr.
        layout: tensor and pipeline parallelism: tp2.pp2 (default: dp1, one process).
        pipeline_split: layers per pipeline stage: balanced (by cost), even, or a list such as 3-5
            (default: balanced).
        max_new_tokens: maximum number of tokens per prompt (default: 64; with --chat 1024).
        temperature: sampling temperature; 0 is greedy.
        top_k: sample among the k most likely tokens (default: all).
        top_p: sample among the most likely tokens whose probabilities reach this sum (default:
            all).
        seed: sampling seed.
        dtype: compute precision; auto is bf16 on GPUs that have it, else fp32. One of: auto, fp32,
            bf16.
        tokenizer: a directory, or `bytes` (default: the model's own).
        json: print one JSON object per prompt.
    """

    model: Model = ""
    prompt: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT...")] = ()
    chat: bool = False
    chat_template_file: Text = None
    layout: Text = None
    pipeline_split: Text = None
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    dtype: str = "auto"
    tokenizer: Folder = None
    attention: str = "sdpa"
    device: str = "auto"
    backend: str = "auto"
    threads: int = 1
    trust_remote_code: bool = False
    json: bool = False


def main(arguments: Sequence[str]) -> int:
    """Generate. Returns 0."""
    flags = parse_flags(Generate, "generate", arguments, Generate())
    if not flags.model:
        raise OptionError("no model was named", hint="hocket generate RUN --prompt TEXT")
    said = flag_values(flags, also=explicit(arguments))
    for name in ("json", "model", "prompt", "chat"):
        said.pop(name, None)
    if flags.chat:
        return _chat(flags, said)
    if said.pop("chat_template_file", None) is not None:
        raise OptionError("--chat-template-file without --chat", hint="--chat")
    prompts = flags.prompt or _piped()
    from hocket.jobs.generate import generate_texts

    streams = len(prompts) == 1 and not flags.json

    begun = False

    def show(_: int, text: str) -> None:
        nonlocal begun
        print(text if begun else prompts[0] + text, end="", flush=True)
        begun = True

    found = generate_texts(flags.model, prompts, on_text=show if streams else None, **said)
    if streams:
        print("" if begun else prompts[0])
        return 0
    for number, one in enumerate(found):
        if flags.json:
            print(json.dumps({"prompt": one.prompt, "text": one.text, "tokens": one.tokens}))
        else:
            print(("\n" if number else "") + one.prompt + one.text)
    return 0


def _chat(flags: Generate, said: dict[str, Any]) -> int:
    """A conversation. Returns 0."""
    from hocket.jobs.chat import Chat

    person = not flags.prompt and sys.stdin is not None and sys.stdin.isatty()

    def show(_: int, text: str) -> None:
        print(text, end="", flush=True)

    with Chat(flags.model, **said) as chat:
        if person:
            print("/reset begins a new conversation, /exit ends.", file=sys.stderr)
        for message in flags.prompt or _messages(person):
            if message == "/exit":
                break
            if message == "/reset":
                chat.reset()
                continue
            try:
                found = chat.ask(message, None if flags.json else show)
            except (HocketError, KeyboardInterrupt) as error:
                if not person:
                    raise
                if isinstance(error, HocketError):
                    print(f"hocket: {error.message}\n  hint: {error.hint}", file=sys.stderr)
                continue
            turn = {"prompt": message, "text": found.text, "tokens": found.tokens}
            print(json.dumps(turn) if flags.json else "", flush=True)
    return 0


def _messages(person: bool) -> Iterator[str]:
    """The lines of stdin that are not empty; Ctrl-C or Ctrl-D at the prompt of a person ends."""
    if person:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # arrows and history
    while sys.stdin is not None:
        try:
            line = input("> " if person else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            if person:
                return
            raise
        if line.strip():
            yield line.strip()


def _piped() -> tuple[str, ...]:
    """The text on stdin as one prompt, without its last line break.

    Raises:
        OptionError: nothing is piped.
    """
    text = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    if not text:
        raise OptionError("no prompt was given", hint="--prompt 'Once upon a time'")
    return (text.removesuffix("\n"),)
