"""Tokenizer files: what a model directory says of its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hocket.spec.files import read_object

FILE = "tokenizer.json"
SOURCES = (FILE, "tokenizer.model", "vocab.json", "spiece.model")
_USUAL_EOS = (
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "[EOS]",
)


def has_tokenizer(directory: Path | str) -> bool:
    """Whether a directory holds a tokenizer's files."""
    return any((Path(directory) / name).is_file() for name in SOURCES)


def eos_of(directory: Path, settings: dict[str, Any], backend: Any) -> str | None:
    """The end token's text, from the tokenizer's settings, the model's, or what is usual."""
    special = read_object(directory / "special_tokens_map.json")
    for found in (settings.get("eos_token"), special.get("eos_token")):
        text = found.get("content") if isinstance(found, dict) else found
        if isinstance(text, str) and backend.token_to_id(text) is not None:
            return text
    for name in ("generation_config.json", "config.json"):
        found = read_object(directory / name).get("eos_token_id")
        number = found[0] if isinstance(found, list) and found else found
        if isinstance(number, int) and backend.id_to_token(number) is not None:
            return str(backend.id_to_token(number))
    return next((t for t in _USUAL_EOS if backend.token_to_id(t) is not None), None)


def converted(directory: Path, trust_remote_code: bool) -> Any:
    """The tokenizer of a directory that has only older files, converted by transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        directory, trust_remote_code=trust_remote_code, local_files_only=True
    ).backend_tokenizer
