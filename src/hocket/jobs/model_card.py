"""The model card of a run: what is known of it, for the page of its repository on the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hocket
from hocket.spec.files import MALFORMED, parse_json
from hocket.spec.run import RunFolder, RunSpec


def card(folder: RunFolder, spec: RunSpec, name: str, *, adapter: bool) -> str:
    """The card as Markdown, with the header that the Hub reads.

    Files of this machine are named without their folders.

    Args:
        name: of the repository. adapter: it holds an adapter of PEFT alone.
    """
    from hocket.models import repo_id
    from hocket.training import hub_data, mixture

    given = [mixture.unweighted(path) for path in spec.data]
    base = None if Path(spec.model).exists() else repo_id.parse_repo(spec.model)
    sets = [None if Path(path).exists() else hub_data.parse_data(path) for path, _ in given]
    header: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["hocket"],
    }
    if base is not None:
        header["base_model"] = base.id
    named = sorted({one.repo.id for one in sets if one is not None})
    if named:
        header["datasets"] = named
    data = [
        (f"`{one}`" if one is not None else f"`{Path(path).name}` (a local file)")
        + (f" with weight {weight}" if weight else "")
        for one, (path, weight) in zip(sets, given, strict=True)
    ]
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in header.items()),
        "---",
        "",
        f"# {name.partition('/')[2]}",
        "",
        f"{_what(spec, base)} with hocket {hocket.__version__}.",
        "The licence is not stated here: it follows from those of the base model and the data.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in _facts(folder, spec, data).items()),
        "",
    ]
    return "\n".join(lines)


def _what(spec: RunSpec, base: Any) -> str:
    kind = f"`{spec.config.get('model_type', 'model')}`"
    if spec.weights is None:
        return f"A {kind} model, trained from random weights"
    origin = f"`{base}`" if base is not None else f"`{Path(spec.model).name}`"
    rank = spec.options.lora_rank
    how = "fine-tuned" if rank is None else f"fine-tuned by LoRA of rank {rank}"
    return f"{origin}, a {kind} model, {how}"


FIGURES = {
    "loss": "Loss of the last step",
    "held_out_loss": "Held-out loss",
    "held_out_perplexity": "Held-out perplexity",
}
"""Keys of metrics.jsonl in the card, and their titles."""


def _facts(folder: RunFolder, spec: RunSpec, data: list[str]) -> dict[str, str]:
    work, options = spec.workload, spec.options
    rows = _last_rows(folder)
    found = {
        "Steps": f"{rows.get('step', options.steps):,}",
        "Tokens of a step": f"{work.global_batch} x {work.seq_len:,}",
        "Data": ", ".join(data) or "not recorded",
        "Layout": f"`{spec.layout}`",
        "Number format": work.dtype,
        "Learning rate": f"{options.lr:g}, {options.lr_schedule} to {options.min_lr:g}",
        "Seed": str(options.seed),
    }
    for key, title in FIGURES.items():
        if key in rows:
            found[title] = f"{rows[key]:.4f}"
    return found


def _last_rows(folder: RunFolder) -> dict[str, Any]:
    """The last value of each figure in metrics.jsonl."""
    found: dict[str, Any] = {}
    try:
        for line in folder.metrics_file.read_text().splitlines():
            row = parse_json(line)
            found |= {k: row[k] for k in ("step", *FIGURES) if row.get(k) is not None}
    except (OSError, *MALFORMED):
        pass
    return found
