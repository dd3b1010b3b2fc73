"""Fetched: a model's repository on the Hub as a directory, and the formats that are not read.

RepoId -> configuration (and tokenizer) -> the safetensors files that the index names
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hocket.models import hub, repo_id
from hocket.models.weight_headers import INDEX, SINGLE, files_of
from hocket.spec.errors import ModelError

ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
CONFIG = ("config.json", ADAPTER_CONFIG)
_TOKENIZER_FILES = (
    "generation_config.json", INDEX, "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.*", "merges.txt", "*.model", "*.tiktoken", "chat_template*",
    "additional_chat_templates/*",
)  # fmt: skip
_CARD = "README.md"
_BASE = re.compile(r"^base_model:[ \t]*\n?[ \t]*(?:-[ \t]*)?['\"]?([\w./-]+)", re.MULTILINE)


def fetched_directory(repo: repo_id.RepoId, *, weights: bool, code: bool = False) -> Path:
    """The snapshot folder of a model, with its configuration and, for `weights`, its safetensors
    files and tokenizer.

    Args:
        code: also the Python files of the repository.

    Raises:
        ModelError: as `hub.snapshot`, or it holds no weights in safetensors.
    """
    patterns = (*CONFIG, *(_TOKENIZER_FILES if weights else ()), *(("*.py",) if code else ()))
    folder = hub.snapshot(repo, patterns)
    here = repo.at(folder)
    config, adapter = folder / "config.json", folder / ADAPTER_CONFIG
    if not config.exists() and not adapter.exists():
        raise _unread(here, hub.file_names(here))
    if weights:
        names = [ADAPTER]
        if config.exists():
            names = files_of(folder / INDEX) if (folder / INDEX).exists() else [SINGLE]
        if any(not (folder / name).exists() for name in names):
            listed = hub.file_names(here)
            lost = sorted(set(names) - set(listed))
            if listed and lost:
                if len(lost) < len(names):
                    raise ModelError(
                        f"{repo.id} has no {lost[0]}, which its index names",
                        hint=f"another revision: {repo.page}/commits/main",
                    )
                raise _unread(here, listed)
            hub.snapshot(here, names, required=names)
    return folder


def base_of(repo: repo_id.RepoId) -> str | None:
    """The model that a model was made from, by its card; None where the card does not name one."""
    try:
        card = hub.snapshot(repo, [_CARD]) / _CARD
    except ModelError:
        return None
    return base_in(card)


def base_in(card: Path) -> str | None:
    """`base_model` of a model card's header, None where there is none."""
    if not card.is_file():
        return None
    _, header, *_ = [*card.read_text(errors="replace").split("---", 2), "", ""]
    match = _BASE.search(header)
    return match[1] if match else None


def unread_format(name: str, files: Iterable[str], base: str | None) -> ModelError | None:
    """The error of weights in a format that is not read, None where there are no such files."""
    files = sorted(files)
    gguf = _first(files, lambda file: file.lower().endswith(".gguf"))
    if gguf is not None:
        return ModelError(
            f"{name} holds GGUF weights ({gguf}), a format for inference that is not read; the "
            "rule is safetensors",
            hint=f"the model that it was made from: {base}"
            if base
            else "the model that it was made from, in safetensors: its card names it",
        )
    pickled = _first(files, lambda file: re.fullmatch(r"pytorch_model.*\.bin", file))
    if pickled is not None:
        return ModelError(
            f"{name} holds its weights as {pickled}, a pickle, which is never executed; the rule "
            "is safetensors",
            hint=resaved(name),
        )
    return None


def resaved(name: str) -> str:
    """The line that saves a model again as safetensors, with its tokenizer."""
    repo = None if Path(name).expanduser().exists() else repo_id.parse_repo(name)
    source = name if repo is None else repo.id
    to = f"{Path(source.rstrip('/')).name}-safetensors"
    if not re.fullmatch(r"[\w./~-]+", source):
        return "save it again with transformers: model.save_pretrained(DIR)"
    at = "" if repo is None or repo.revision is None else f", revision='{repo.revision}'"
    saved = [f"{c}.from_pretrained('{source}'{at}).save_pretrained('{to}')" for c in "MT"]
    loaded = "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T"
    return f'python -c "{"; ".join([loaded, *saved])}"'


def _first(files: Sequence[str], test: Any) -> str | None:
    return next((file for file in files if test(file)), None)


def _unread(repo: repo_id.RepoId, files: Sequence[str]) -> ModelError:
    found = unread_format(repo.id, files, None)
    if found is not None and "GGUF" in found.message:
        found = unread_format(repo.id, files, base_of(repo))
    if found is not None:
        return found
    some = ", ".join(files[:6]) + (" ..." if len(files) > 6 else "")
    if "config.json" not in files:
        return ModelError(
            f"{repo.id} is not a transformers model: it has no config.json (it has {some})",
            hint=f"look at {repo.page}",
        )
    return ModelError(
        f"{repo.id} has no weights in safetensors (it has {some})",
        hint=f"for random weights its configuration alone: hf download {repo.id} config.json "
        f"--local-dir {repo.id.partition('/')[2]}",
    )
