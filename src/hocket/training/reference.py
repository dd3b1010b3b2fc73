"""The reference of a check: the plain Hugging Face model in one process, on seeded tokens.

Nothing of hocket's own engine takes part: transformers' forward, torch's cross-entropy over the
whole logits, torch's AdamW, the whole global batch at once. Adapters are peft's; documents that
share a row are each computed by themselves, in rows of their own.

Legend: B batch, S sequence.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.models import skeleton as skeletons
from hocket.models import weights
from hocket.models.dimensions import dimensions
from hocket.models.disk_tensor import DiskTensor
from hocket.models.lora import peft_model, plain_name
from hocket.models.source import of_run
from hocket.runtime.checkpoint import DTYPES
from hocket.runtime.lora import initial
from hocket.spec.check import gradient_limit
from hocket.spec.placement import Placement
from hocket.spec.run import RunSpec, write_text
from hocket.spec.tensor_file import Entry, TensorFile, write_tensors
from hocket.training.optimizer import STATE, decays
from hocket.training.packing import DOCUMENTS

_NOISE = 0.02
_IGNORED = 0.1
_ROUNDINGS = 4


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
    positions = torch.arange(length).expand(rows, length).contiguous()
    if spec.options.packing == DOCUMENTS:
        for row in positions:
            cuts = torch.randperm(length - 1, generator=generator)[: max(1, length // 8)] + 1
            for cut in cuts.sort().values.tolist():
                row[cut:] = torch.arange(length - cut)
        labels[:, :-1][positions[:, 1:] == 0] = -100  # nothing predicts the next document
        labels[:, 0] = torch.where(positions[:, 1] == 0, -100, tokens[:, 1])
    return {
        "input_ids": tokens[:, :-1].contiguous(),
        "position_ids": positions,
        "labels": labels,
    }


def documents_of(batch: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The documents of a packed batch, each as a batch of one row, [1, tokens]."""
    for row, positions in enumerate(batch["position_ids"]):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        for first, last in itertools.pairwise(starts):
            yield {key: value[row : row + 1, first:last] for key, value in batch.items()}


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
    model = _plain(spec, device)
    known = inspect.signature(model.forward).parameters  # BLOOM takes no positions
    from_seed = of_run(spec).weights is None
    if spec.options.lora_rank is not None:
        model = _with_adapters(model, spec)
    parameters: dict[str, nn.Parameter] = {
        plain_name(n): p for n, p in model.named_parameters() if p.requires_grad
    }
    folder.mkdir(parents=True, exist_ok=True)
    start = {f"start/{n}": p.detach().clone() for n, p in parameters.items()}
    if from_seed or spec.options.lora_rank is not None:
        _disturb(parameters, spec.options.seed)
    write(folder / "step-0.safetensors", {**start, **_values(parameters)})
    optimizer = _plain_adamw(parameters, spec)
    found: dict[str, Any] = {"losses": [], "norms": [], "largest": [], "shapes": {}}
    found["shapes"] = {n: list(p.shape) for n, p in parameters.items()}
    for step in range(1, steps + 1):
        batch = {key: value.to(device) for key, value in global_batch(spec, step).items()}
        optimizer.zero_grad(set_to_none=True)
        loss = _backward(model, batch, known, packed=spec.options.packing == DOCUMENTS)
        for parameter in parameters.values():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        gradients = {f"gradient/{n}": gradient(p).clone() for n, p in parameters.items()}
        optimizer.step()
        state = {
            # A parameter that does not train (an expert's bias, which a rule sets) has no state.
            f"{key}/{name}": optimizer.state[parameter].get(key, torch.zeros_like(parameter))
            for name, parameter in parameters.items()
            for key in STATE
        }
        write(folder / f"step-{step}.safetensors", {**gradients, **_values(parameters), **state})
        norms = torch.stack([g.double().norm() for g in gradients.values()])
        found["norms"].append(float(norms.norm()))
        found["losses"].append(float(loss.detach()))
        found["largest"].append({n: _largest(gradient(p)) for n, p in parameters.items()})
    write_text(folder / "reference.json", json.dumps(found))


def _plain(spec: RunSpec, device: torch.device | str = "cpu") -> Any:
    """The plain model in training mode, with the values that the job begins with."""
    source = of_run(spec)
    whole, model = (
        skeletons.build(
            spec.config, attention=spec.options.attention, dropout=0.0, code=source.code
        )
        for _ in range(2)
    )
    placements = {
        n: Placement.whole(n, tuple(p.shape))
        for n, p in model.named_parameters(remove_duplicate=False)
    }
    weights.materialize(model, placements, whole, source, device=device, seed=spec.options.seed)
    return model.train()


def _backward(
    model: nn.Module, batch: Mapping[str, Tensor], known: Collection[str], *, packed: bool
) -> Tensor:
    """The loss of a batch, its gradient added to the parameters'. `known`: what `model` takes."""
    tokens = (batch["labels"] != -100).sum()
    loss = torch.zeros((), device=tokens.device)
    for part in documents_of(batch) if packed else [batch]:
        given = {k: v for k, v in part.items() if k in known and k != "labels"}
        logits = model(**given, use_cache=False).logits
        total = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float(),
            part["labels"].reshape(-1),
            ignore_index=-100,
            reduction="sum",
        )
        share = total / tokens
        torch.autograd.backward(share)
        loss += share.detach()
    return loss


def own_rounding(spec: RunSpec, folder: Path) -> tuple[float, str]:
    """How far rounding alone takes a gradient of the first step of a reference in `folder`:
    (relative to what is allowed, the parameter's name).

    Every weight is moved by one unit in its last place, a few times over. A sum that is taken in
    another order loses as much: where this is above 1, nothing can be held against one process.
    """
    values = _read(folder / "step-0.safetensors", "value")
    wanted = _read(folder / "step-1.safetensors", "gradient")
    batch = global_batch(spec, 1)
    generator = torch.Generator().manual_seed(0)
    model_largest = max(_largest(g) for g in wanted.values())
    worst = (0.0, "")
    for _ in range(_ROUNDINGS):
        model = _plain(spec)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                up = torch.randint(2, parameter.shape, generator=generator) * 2.0 - 1.0
                parameter.copy_(torch.nextafter(values[name], up * torch.inf))
        _backward(model, batch, inspect.signature(model.forward).parameters, packed=False)
        for name, parameter in model.named_parameters():
            limit = gradient_limit(_largest(wanted[name]), model_largest)
            if limit:
                off = _largest(gradient(parameter) - wanted[name]) / limit
                worst = max(worst, (off, name))
    return worst


def _read(path: Path, kind: str) -> dict[str, Tensor]:
    """The whole tensors of one kind, by parameter."""
    file = TensorFile(path)
    found = {}
    for key, entry in file.entries.items():
        if key.startswith(f"{kind}/"):
            found[key[len(kind) + 1 :]] = whole = torch.empty(entry.shape)
            DiskTensor(file, key).read([slice(0, size) for size in entry.shape], whole)
    return found


def _with_adapters(model: Any, spec: RunSpec) -> Any:
    """The model inside peft's, its adapters begun with the values that a layout begins with."""
    adapted = peft_model(model, spec.options)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_A." in name:
                place = Placement.whole(plain_name(name), tuple(parameter.shape))
                parameter.copy_(initial(place, spec.options.seed))
    adapted.train()
    return adapted


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
            "params": [
                p for n, p in parameters.items() if p.requires_grad and decays(n, p.ndim) == decayed
            ],
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


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write whole tensors by name into one safetensors file."""
    entries = [
        Entry(name=n, dtype=DTYPES[t.dtype], shape=tuple(t.shape)) for n, t in tensors.items()
    ]
    buffers: Iterator[Any] = (
        t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for t in tensors.values()
    )
    write_tensors(path, entries, buffers)
