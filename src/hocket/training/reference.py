"""The reference of a check: the plain Hugging Face model in one process, on seeded tokens.

Nothing of hocket's own engine takes part: transformers' forward, torch's cross-entropy over the
whole logits, torch's AdamW, the whole global batch at once.

Legend: B batch, S sequence.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.models import skeleton as skeletons
from hocket.models import weights
from hocket.models.dimensions import dimensions
from hocket.models.source import of_run
from hocket.runtime.checkpoint import DTYPES
from hocket.spec.placement import Placement
from hocket.spec.run import RunSpec, write_text
from hocket.spec.tensor_file import Entry, write_tensors
from hocket.training.optimizer import STATE, decays

_NOISE = 0.02
_IGNORED = 0.1


def global_batch(spec: RunSpec, step: int) -> dict[str, Tensor]:
    """Seeded tokens of one step: `input_ids`, `position_ids`, `labels`, each [B, S].

    Some labels are ignored, more of them in later rows, so that data ranks and microbatches do
    not count equally many tokens.
    """
    rows, length = spec.workload.global_batch, spec.workload.seq_len
    generator = torch.Generator().manual_seed(1000 * spec.options.seed + step)
    vocab_size = int(_vocab_size(spec))
    tokens = torch.randint(vocab_size, (rows, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    share = _IGNORED + 0.5 * torch.arange(rows).unsqueeze(1) / rows
    labels[torch.rand(rows, length, generator=generator) < share] = -100
    labels[:, 0] = tokens[:, 1]  # never a row without a label
    return {
        "input_ids": tokens[:, :-1].contiguous(),
        "position_ids": torch.arange(length).expand(rows, length).contiguous(),
        "labels": labels,
    }


def _vocab_size(spec: RunSpec) -> int:

    return dimensions(spec.config).vocab_size


def microbatches(spec: RunSpec, batch: Mapping[str, Tensor], data_rank: int) -> list[Any]:
    """The rows of one data rank, in microbatches; under threads, of the whole batch."""
    layout = spec.layout
    replicas = 1 if layout.data_parallel == "threads" else layout.dp
    rows = spec.workload.global_batch // replicas
    count = layout.microbatches or 1
    mine = {key: value[data_rank * rows : (data_rank + 1) * rows] for key, value in batch.items()}
    parts = {key: value.chunk(count) for key, value in mine.items()}
    return [{key: value[m] for key, value in parts.items()} for m in range(count)]


# --- one process -----------------------------------------------------------------------------


def write_reference(
    spec: RunSpec, folder: Path, steps: int, device: torch.device | str = "cpu"
) -> None:
    """The plain model in one process: every step's gradients, values and losses, into files."""

    source = of_run(spec)
    whole = skeletons.build(
        spec.config, attention=spec.options.attention, dropout=0.0, code=source.code
    )
    model: Any = skeletons.build(
        spec.config, attention=spec.options.attention, dropout=0.0, code=source.code
    )
    placements = {
        n: Placement.whole(n, tuple(p.shape))
        for n, p in model.named_parameters(remove_duplicate=False)
    }
    weights.materialize(model, placements, whole, source, device=device, seed=spec.options.seed)
    model.train()
    parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
    folder.mkdir(parents=True, exist_ok=True)
    start = {f"start/{n}": p.detach().clone() for n, p in parameters.items()}
    if source.weights is None:
        _disturb(parameters, spec.options.seed)
    _write(folder / "step-0.safetensors", {**start, **_values(parameters)})
    optimizer = _plain_adamw(parameters, spec)
    known = inspect.signature(model.forward).parameters  # BLOOM takes no positions
    found: dict[str, Any] = {"losses": [], "norms": [], "largest": [], "shapes": {}}
    found["shapes"] = {n: list(p.shape) for n, p in parameters.items()}
    for step in range(1, steps + 1):
        batch = {key: value.to(device) for key, value in global_batch(spec, step).items()}
        optimizer.zero_grad(set_to_none=True)
        labels = batch.pop("labels")
        logits = model(**{k: v for k, v in batch.items() if k in known}, use_cache=False).logits
        total = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float(),
            labels.reshape(-1),
            ignore_index=-100,
            reduction="sum",
        )
        loss = total / (labels != -100).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = {f"gradient/{n}": gradient(p).clone() for n, p in parameters.items()}
        optimizer.step()
        state = {
            f"{key}/{name}": optimizer.state[parameter][key]
            for name, parameter in parameters.items()
            for key in STATE
        }
        _write(folder / f"step-{step}.safetensors", {**gradients, **_values(parameters), **state})
        norms = torch.stack([g.double().norm() for g in gradients.values()])
        found["norms"].append(float(norms.norm()))
        found["losses"].append(float(loss.detach()))
        found["largest"].append({n: _largest(gradient(p)) for n, p in parameters.items()})
    write_text(folder / "reference.json", json.dumps(found))


def _disturb(parameters: Mapping[str, nn.Parameter], seed: int) -> None:
    """Move every entry a little: norms at one and biases at zero would hide what is left out."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters.values():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter.device), alpha=_NOISE)


def _plain_adamw(parameters: Mapping[str, nn.Parameter], spec: RunSpec) -> torch.optim.AdamW:
    options = spec.options
    groups = [
        {
            "params": [p for n, p in parameters.items() if decays(n, p.ndim) == decayed],
            "weight_decay": options.weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        foreach=False,
    )


def _values(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {f"value/{name}": parameter.detach() for name, parameter in parameters.items()}


def gradient(parameter: Tensor) -> Tensor:
    """A parameter's gradient; zeros where no use of it reaches the loss."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    entries = [
        Entry(name=n, dtype=DTYPES[t.dtype], shape=tuple(t.shape)) for n, t in tensors.items()
    ]
    buffers: Iterator[Any] = (
        t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for t in tensors.values()
    )
    write_tensors(path, entries, buffers)
