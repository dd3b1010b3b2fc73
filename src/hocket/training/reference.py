"""The reference of a check: the plain Hugging Face model in one process, on seeded tokens.

Nothing of hocket's own engine takes part: `model(input_ids, labels=labels).loss` of transformers
with the configuration as it is, torch's AdamW, the whole global batch at once. Adapters are peft's;
documents that share a row are each computed by themselves, in rows of their own.

A router's auxiliary loss is not linear in the batch. It is defined by what transformers computes
for one microbatch of all data ranks, and the step has the mean over microbatches. That is gradient
accumulation with `model(**microbatch, num_items_in_batch=tokens / count).loss / count`, where
`tokens / count` is the mean number of valid tokens of a microbatch. With one microbatch it is the
loss over the global batch, whatever the number of data ranks. Where the model has another such
loss than transformers' usual one, each data rank's part of a microbatch counts as one.

Legend: B batch, S sequence.
"""

from __future__ import annotations

import inspect
import itertools
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
from hocket.models.lora import peft_model, plain_name
from hocket.models.own_loss import shifts_labels, takes_labels
from hocket.models.plans.router import router_loss
from hocket.models.source import run_source
from hocket.runtime.base_4bit import load_library
from hocket.runtime.lora import initial
from hocket.runtime.rank_state import DTYPES
from hocket.spec.errors import OptionError
from hocket.spec.files import write_text
from hocket.spec.placement import Placement
from hocket.spec.run import RunSpec
from hocket.spec.tensor_file import TensorEntry, write_tensors
from hocket.training.build import dtype_of
from hocket.training.in_fp64 import stay_in_fp64
from hocket.training.optimizer import STATE, decays
from hocket.training.packing import DOCUMENTS

_NOISE = 0.02
_IGNORED = 0.1


def global_batch(spec: RunSpec, step: int) -> dict[str, Tensor]:
    """Seeded tokens of one step: `input_ids`, `position_ids`, `labels`, each [B, S].

    Labels are as transformers takes them, at the positions of their tokens. Some are ignored, more
    of them in later rows, so that data ranks and microbatches do not count equally many tokens.
    """
    rows, length = spec.workload.global_batch, spec.workload.seq_len
    generator = torch.Generator().manual_seed(1000 * spec.options.seed + step)
    vocab_size = int(dimensions(spec.config).vocab_size)
    tokens = torch.randint(vocab_size, (rows, length), generator=generator)
    labels = tokens.clone()
    share = _IGNORED + 0.5 * torch.arange(rows).unsqueeze(1) / rows
    labels[torch.rand(rows, length, generator=generator) < share] = -100
    labels[:, 1] = tokens[:, 1]  # never a row without a label
    positions = torch.arange(length).expand(rows, length).contiguous()
    if spec.options.packing == DOCUMENTS:
        for row in positions:
            cuts = torch.randperm(length - 1, generator=generator)[: max(1, length // 8)] + 1
            for cut in cuts.sort().values.tolist():
                row[cut:] = torch.arange(length - cut)
        labels[positions == 0] = -100  # nothing predicts the next document
    return {"input_ids": tokens, "position_ids": positions, "labels": labels}


def num_tokens(batch: Mapping[str, Tensor]) -> int:
    """Labels of a batch that some position predicts."""
    return int((batch["labels"][:, 1:] != -100).sum())


def _row_documents(batch: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The documents of a packed batch, each as a batch of one row, [1, tokens]."""
    for row, positions in enumerate(batch["position_ids"]):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        for first, last in itertools.pairwise(starts):
            yield {key: value[row : row + 1, first:last] for key, value in batch.items()}


def rank_microbatches(spec: RunSpec, batch: Mapping[str, Tensor], data_rank: int) -> list[Any]:
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
    loss = _OwnLoss(model, spec, device)
    from_seed = run_source(spec).weights is None
    if spec.options.quantize_base is not None:
        _in_4bit(model)
    if spec.options.lora_rank is not None:
        model = _with_adapters(model, spec)
    parameters: dict[str, nn.Parameter] = {
        plain_name(n): p for n, p in model.named_parameters() if p.requires_grad
    }
    if spec.workload.dtype == "fp64":
        stay_in_fp64(model)
    folder.mkdir(parents=True, exist_ok=True)
    start = {f"start/{n}": p.detach().clone() for n, p in parameters.items()}
    if from_seed or spec.options.lora_rank is not None:
        _disturb(parameters, spec.options.seed)
    save_reference(folder / "step-0.safetensors", {**start, **_values(parameters)})
    optimizer = _plain_adamw(parameters, spec)
    found: dict[str, Any] = {"losses": [], "norms": [], "largest": [], "shapes": {}}
    found["shapes"] = {n: list(p.shape) for n, p in parameters.items()}
    for step in range(1, steps + 1):
        batch = {key: value.to(device) for key, value in global_batch(spec, step).items()}
        optimizer.zero_grad(set_to_none=True)
        total = loss.backward(model, batch)
        for parameter in parameters.values():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        gradients = {f"gradient/{n}": gradient(p).clone() for n, p in parameters.items()}
        optimizer.step()
        state = {
            # A parameter that does not train (an expert's bias, which a rule sets) has no state.
            f"{key}/{name}": _moment(optimizer, parameter, key)
            for name, parameter in parameters.items()
            for key in STATE
        }
        save_reference(
            folder / f"step-{step}.safetensors", {**gradients, **_values(parameters), **state}
        )
        norms = torch.stack([g.double().norm() for g in gradients.values()])
        found["norms"].append(float(norms.norm()))
        found["losses"].append(float(total))
        found["largest"].append({n: _largest(gradient(p)) for n, p in parameters.items()})
    write_text(folder / "reference.json", json.dumps(found))


def _plain(spec: RunSpec, device: torch.device | str = "cpu") -> Any:
    """The plain model in training mode, with the values that the job begins with."""
    source = run_source(spec)
    dtype = dtype_of(spec.workload.dtype)
    whole, model = (
        skeletons.build_skeleton(
            spec.config,
            attention=spec.options.attention,
            dtype=dtype,
            dropout=0.0,
            code=source.code,
        )
        for _ in range(2)
    )
    placements = {
        n: Placement.whole(n, tuple(p.shape))
        for n, p in model.named_parameters(remove_duplicate=False)
    }
    weights.materialize(
        model, placements, whole, source, device=device, dtype=dtype, seed=spec.options.seed
    )
    return model.train()


class _OwnLoss:
    """What plain transformers trains on: the loss that its forward returns.

    Args:
        model: plain, before adapters.
        spec: the job; its layout says how many microbatches there are.
        device: of the model.

    Raises:
        ModelError: the model's own loss is not one that hocket computes.
    """

    def __init__(self, model: nn.Module, spec: RunSpec, device: torch.device | str) -> None:
        self.known = inspect.signature(model.forward).parameters  # BLOOM takes no positions
        self.packed = spec.options.packing == DOCUMENTS
        first = global_batch(spec, 1)["input_ids"][:2].to(device)
        self.own = takes_labels(model)
        self.shifts = shifts_labels(model, first)
        self.count = self.ranks = 1
        router = router_loss(model)
        if router is not None:
            if self.packed:
                raise OptionError(
                    "a router's auxiliary loss is over all tokens of a row, and the reference "
                    "computes each document by itself",
                    hint="--packing none",
                )
            self.count = spec.layout.microbatches or 1
            self.ranks = spec.layout.dp
            if not router.of_all_ranks:
                self.count, self.ranks = self.count * self.ranks, 1

    def backward(self, model: nn.Module, batch: Mapping[str, Tensor]) -> float:
        """The loss of a global batch, its gradient added to the parameters'."""
        tokens = num_tokens(batch)
        if self.packed:
            parts = [(part, num_tokens(part) / tokens) for part in _row_documents(batch)]
        else:
            # Data ranks have consecutive rows, and each divides its own into microbatches.
            chunks = {key: value.chunk(self.count * self.ranks) for key, value in batch.items()}
            rows = (
                {key: torch.cat(value[m :: self.count]) for key, value in chunks.items()}
                for m in range(self.count)
            )
            parts = [(part, 1 / self.count) for part in rows]
        total = 0.0
        for part, weight in parts:
            if weight:
                loss = weight * self._of(model, part, tokens)
                torch.autograd.backward(loss)
                total += float(loss.detach())
        return total

    def _of(self, model: nn.Module, part: Mapping[str, Tensor], tokens: int) -> Tensor:
        given = {k: v for k, v in part.items() if k in self.known and k != "labels"}
        labels = part["labels"]
        shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
        if not self.own:
            logits = model(**given, use_cache=False).logits
            return F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100)
        # Of one batch the model counts its labels itself.
        more = {} if self.count == 1 else {"num_items_in_batch": tokens / self.count}
        own: Tensor = model(
            **given, labels=labels if self.shifts else shifted, use_cache=False, **more
        ).loss
        return own


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


def _in_4bit(model: Any) -> None:
    """Every linear layer but the head as bitsandbytes' own, which rounds its weight to NF4."""
    load_library()
    from bitsandbytes.nn.modules import Linear4bit, Params4bit
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    places = [
        (parent, key, child)
        for parent in model.modules()
        for key, child in parent.named_children()
        if type(child) in {nn.Linear, Conv1D} and child is not head
    ]
    for parent, key, child in places:
        weight = child.weight.detach()
        if isinstance(child, Conv1D):
            weight = weight.t().contiguous()
        options: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": False}
        bias, dtype = child.bias is not None, weight.dtype
        layer: Any = Linear4bit(  # type: ignore[no-untyped-call]
            weight.shape[1], weight.shape[0], bias, dtype, device="meta", **options
        )
        rounded: Any = Params4bit(weight, requires_grad=False, **options)
        layer.weight = rounded.to(weight.device)
        layer.bias = child.bias
        setattr(parent, key, layer)


def _disturb(parameters: Mapping[str, nn.Parameter], seed: int) -> None:
    """Move every entry a little: norms at one and biases at zero would hide what is left out."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters.values():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter.device), alpha=_NOISE)


def _plain_adamw(parameters: Mapping[str, nn.Parameter], spec: RunSpec) -> torch.optim.Optimizer:
    """torch's own AdamW, or bitsandbytes' own in 8 bits."""
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
    groups = [g for g in groups if g["params"]]
    more: dict[str, Any] = {
        "lr": options.lr, "betas": (options.beta1, options.beta2), "eps": options.eps,
    }  # fmt: skip
    if options.optimizer == "adamw_8bit":
        load_library()
        from bitsandbytes.optim import adamw

        found: torch.optim.Optimizer = adamw.AdamW8bit(groups, **more)  # type: ignore[no-untyped-call]
        return found
    return torch.optim.AdamW(groups, foreach=False, **more)


def _moment(optimizer: torch.optim.Optimizer, parameter: Tensor, key: str) -> Tensor:
    """A moment of a parameter in fp32, under torch's name: `exp_avg` or `exp_avg_sq`."""
    state = optimizer.state[parameter]
    number = 1 + STATE.index(key)
    held: Tensor = state.get(key, state.get(f"state{number}", torch.zeros_like(parameter)))
    if held.dtype != torch.uint8:
        return held
    found: Tensor = load_library().dequantize_blockwise(
        held, absmax=state[f"absmax{number}"], code=state[f"qmap{number}"], blocksize=256
    )
    return found


def _values(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {f"value/{name}": parameter.detach() for name, parameter in parameters.items()}


def gradient(parameter: Tensor) -> Tensor:
    """A parameter's gradient; zeros where no use of it reaches the loss."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def save_reference(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write whole tensors by name into one safetensors file."""
    entries = [
        TensorEntry(name=n, dtype=DTYPES[t.dtype], shape=tuple(t.shape)) for n, t in tensors.items()
    ]
    buffers: Iterator[Any] = (
        t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for t in tensors.values()
    )
    write_tensors(path, entries, buffers)
