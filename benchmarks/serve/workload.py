"""Workload: the models that every contender serves, and the prompts it is asked to continue.

Two random Llamas in fp32: on a tiny one everything but arithmetic costs, on a larger one reading
weights and multiplying does. The tokenizer writes token i as three hexadecimal digits, so that text
and token ids say the same: contenders that take text alone get the same prompts, and what a server
streams can be compared token by token.

Letters: V vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

DIGITS = 3
"""Hexadecimal digits of one token."""
VOCAB = 16**DIGITS
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """One random Llama and what is asked of it.

    Attributes:
        name: in tables and folder names.
        prompt: tokens of a prompt.
        prefix: of these, how many all requests have in common in the shared case.
        new: tokens generated per request.
    """

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    prompt: int
    prefix: int
    new: int
    positions: int = 512
    seed: int = 0

    @property
    def parameters(self) -> int:
        """Elements of the model; embeddings and head are not tied."""
        head = self.hidden // self.heads
        attention = self.hidden * head * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return 2 * VOCAB * self.hidden + self.layers * layer + self.hidden

    def config(self) -> dict[str, Any]:
        """The fields of its LlamaConfig. No token ends a sequence."""
        return {
            "vocab_size": VOCAB,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": 0,
        }

    def write(self, folder: Path) -> None:
        """A Hugging Face directory with its seed's weights and the tokenizer (needs torch)."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(self.seed)
        # The default spread of 0.02 makes logits of a random model nearly equal: ties would decide.
        config = LlamaConfig(**self.config(), initializer_range=0.06)
        LlamaForCausalLM(config).float().eval().save_pretrained(folder)
        write_tokenizer(folder)


TINY = Model(
    name="tiny",
    hidden=256,
    intermediate=688,
    layers=4,
    heads=8,
    kv_heads=4,
    prompt=224,
    prefix=192,
    new=64,
)
LARGER = Model(
    name="larger",
    hidden=768,
    intermediate=2048,
    layers=12,
    heads=12,
    kv_heads=4,
    prompt=96,
    prefix=80,
    new=32,
)
MODELS = {model.name: model for model in (TINY, LARGER)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """How many clients ask at the same time, how often each, and whether prompts begin alike."""

    clients: int
    repeats: int
    shared: bool = False

    @property
    def requests(self) -> int:
        return self.clients * self.repeats

    @property
    def label(self) -> str:
        return f"{self.clients}{' shared' if self.shared else ''}"


def loads(clients: list[int], prefixes: list[str]) -> list[Load]:
    """One load a number of clients and kind of prefix ("own", "shared"). Few clients ask more
    than once, or a turn would be over before it could be timed."""
    return [
        Load(clients=n, repeats=4 if n < 4 else 2 if n < 16 else 1, shared=kind == "shared")
        for kind in prefixes
        for n in clients
    ]


def prompts(model: Model, load: Load, turn: int) -> list[list[int]]:
    """Token ids of every request of one turn: a function of the turn, the same for everybody.

    Prompts of another turn are other prompts, or a prefix cache would answer them; what is shared
    in the shared case is the same in all turns, as a system prompt is.
    """
    draw = random.Random(f"{model.name} {load.clients} {load.shared} {turn}")
    common = random.Random(f"{model.name} common")
    prefix = [common.randrange(VOCAB) for _ in range(model.prefix if load.shared else 0)]
    own = model.prompt - len(prefix)
    return [prefix + [draw.randrange(VOCAB) for _ in range(own)] for _ in range(load.requests)]


def text(tokens: list[int]) -> str:
    """Token ids as the tokenizer writes them."""
    return "".join(f"{token:0{DIGITS}x}" for token in tokens)


def tokens(written: str) -> list[int]:
    """Token ids of what `text` wrote.

    Raises:
        ValueError: it is not whole tokens.
    """
    if len(written) % DIGITS:
        raise ValueError(f"{len(written)} digits are not whole tokens")
    return [int(written[at : at + DIGITS], 16) for at in range(0, len(written), DIGITS)]


def write_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` of the hexadecimal tokens, and what Hugging Face wants beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": f".{{{DIGITS}}}"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {f"{token:0{DIGITS}x}": token for token in range(VOCAB)},
            "unk_token": "0" * DIGITS,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
