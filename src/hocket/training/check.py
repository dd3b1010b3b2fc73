"""The rank side of `hocket check`: a layout's run compared with one process, step by step.

    reference   one rank: the plain Hugging Face model, the whole global batch, plain AdamW;
                writes weights, gradients and optimizer state of every step to a folder
    compare     the layout's ranks: the same steps through hocket; every rank holds its blocks
                against the reference's, then takes over the reference's values

With LoRA the plain model is peft's, and what is compared is what is trained. With documents that
share rows, one process computes each document by itself.

What is realigned after each step: parameters and optimizer state, since Adam amplifies rounding
(an entry whose gradient is all but zero moves by a learning rate in either direction).

Moments in 8 bits are rounded in blocks of 256, which a shard cuts otherwise than the whole tensor:
what that changes in the next step is computed from both moments and allowed, of the entries that
this rank steps. From the first step on, whose moments are zeros, all entries are compared.

FOLDER/
  step-0.safetensors   start/NAME: as made by the seed or read from files; value/NAME: as trained
  step-K.safetensors   gradient/NAME, value/NAME, exp_avg/NAME, exp_avg_sq/NAME after step K
  reference.json       losses, largest gradients
  rank-N.json          what rank N found
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hocket.models.disk_tensor import DiskTensor
from hocket.runtime.checkpoint import CheckpointWorld
from hocket.runtime.device import pick_device
from hocket.runtime.moments_8bit import MEAN, SCALES, SQUARE, moment_values
from hocket.spec.check import CheckReport, merged_report, value_limit
from hocket.spec.files import write_text
from hocket.spec.placement import Placement
from hocket.spec.run import RunSpec, TrainOptions
from hocket.spec.schedule import Schedule
from hocket.spec.tensor_file import TensorFile
from hocket.training.in_fp64 import stay_in_fp64
from hocket.training.optimizer import STATE, Optimizer, in_8bit
from hocket.training.reference import global_batch, num_tokens, rank_microbatches, write_reference

if TYPE_CHECKING:
    from hocket.launch import RankContext

STEPS = 3


def run_reference(context: RankContext, payload: Mapping[str, Any]) -> None:
    """Run the steps in one process and write them down.

    Args:
        context: of a world of one rank.
        payload: `spec` (a RunSpec's JSON), `folder`, and optionally `steps`.
    """
    spec, folder = RunSpec.from_json(payload["spec"]), Path(payload["folder"])
    kind = spec.options.device
    device = pick_device(context.device_kind if kind == "auto" else kind, context.local_rank)
    write_reference(spec, folder, int(payload.get("steps", STEPS)), device)
    context.emit({"event": "reference", "folder": str(folder)})


def compare_steps(context: RankContext, payload: Mapping[str, Any]) -> None:
    """Run the steps on a layout and compare; rank 0 emits `{"event": "check", "report": ...}`.

    Args:
        context: of the layout's world.
        payload: as for `run_reference`, and `schedule` (its text) where there are several stages.
    """
    from hocket.training.build import build_rank_job

    spec = RunSpec.from_json(payload["spec"])
    schedule = Schedule.parse(payload["schedule"]) if "schedule" in payload else None
    job = build_rank_job(spec, context, schedule, labels_shifted=False)
    report = compare_layout(
        spec, job.parallel, job.optimizer, Path(payload["folder"]), int(payload.get("steps", STEPS))
    )
    if report is not None:
        context.emit({"event": "check", "report": json.loads(report.to_json())})


# --- the layout ------------------------------------------------------------------------------


class Reference:
    """One file of the reference, of which only what a rank holds is read from the disk."""

    def __init__(self, path: Path) -> None:
        self._file = TensorFile(path)

    def part(self, kind: str, name: str, placement: Placement) -> Tensor:
        """This rank's part of one tensor."""
        key = f"{kind}/{name}"
        entry = self._file.entries[key]
        assert entry.shape == placement.shape, (key, entry.shape, placement.shape)
        whole = DiskTensor(self._file, key)
        local = torch.empty(placement.local_shape, dtype=whole.dtype)
        if local.numel():
            for in_global, in_local in placement.pairs():
                whole.read(in_global, local[in_local])
        return local


def compare_layout(
    spec: RunSpec, parallel: Any, optimizer: Optimizer, folder: Path, steps: int
) -> CheckReport | None:
    """Run the steps on this rank, compare with the reference, and merge what all ranks found.

    Returns:
        The report on rank 0, None on the others.
    """
    mesh = parallel.mesh
    known = json.loads((folder / "reference.json").read_text())
    rank = _Rank(parallel, optimizer, known["shapes"])
    for stage in parallel.stages if spec.workload.dtype == "fp64" else ():
        stay_in_fp64(stage.module)
    before = Reference(folder / "step-0.safetensors")
    parallel.unshard()
    found: dict[str, Any] = {
        "losses": [],
        "norms": [],
        "gradient": [],
        "value": [],
        "start": rank.differences(before, "start"),
        "owners": rank.owners,
        "blocks": {name: p.to_json()["blocks"] for name, p in rank.placements.items()},
    }
    _realign(rank, before, 0)
    parallel.reshard()
    optimizer.refresh_masters()
    last = before
    data_rank = 0 if spec.layout.data_parallel == "threads" else mesh.coordinate["dp"]
    for step in range(1, steps + 1):
        batch = global_batch(spec, step)
        parts = [
            {key: value.to(mesh.device) for key, value in part.items()}
            for part in rank_microbatches(spec, batch, data_rank)
        ]
        loss = parallel.forward_backward(parts, num_tokens(batch))
        norm = parallel.clip_grad_norm(0.0)
        rank.gradients = parallel.gradients()
        after = Reference(folder / f"step-{step}.safetensors")
        found["losses"].append(float(loss))
        found["norms"].append(float(norm))
        found["gradient"].append(rank.differences(after, "gradient"))
        rounded = rank.rounded_updates(last, after, step, spec.options)
        optimizer.step(spec.options.lr)
        parallel.unshard()
        found["value"].append(rank.value_differences(last, after, step, spec.options, rounded))
        last = after
        _realign(rank, after, step)
        parallel.reshard()
        optimizer.refresh_masters()
    world = CheckpointWorld.of(mesh)
    write_text(folder / f"rank-{mesh.rank}.json", json.dumps(found))
    world.barrier()
    if mesh.rank:
        return None
    ranks = [json.loads((folder / f"rank-{r}.json").read_text()) for r in range(world.size)]
    return merged_report(
        known, ranks, model=spec.model, layout=str(spec.layout), lr=spec.options.lr
    )


class _Rank:
    """What one rank holds, and which parameter of the reference each of its tensors is.

    A tied tensor of another stage is compared with the parameter that owns the values.
    """

    def __init__(self, parallel: Any, optimizer: Optimizer, shapes: Mapping[str, Any]) -> None:
        self.optimizer = optimizer
        self.local_part = parallel.local_part
        self.gradients: dict[str, Tensor] = {}
        self.parameters: dict[str, nn.Parameter] = {
            name: p for name, p in parallel.named_parameters() if p.requires_grad
        }
        self.placements: dict[str, Placement] = {
            name: parallel.placements[name] for name in self.parameters
        }
        self.owners = {
            name: _owner(name, p.tie, parallel.plan.ties, shapes)
            for name, p in self.placements.items()
        }

    def part(self, file: Reference, kind: str, name: str) -> Tensor:
        """This rank's part of the reference's tensor for its parameter `name`."""
        return file.part(kind, self.owners[name], self.placements[name])

    def differences(self, file: Reference, kind: str) -> dict[str, float]:
        """By parameter, the largest difference of its value (or gradient) from the reference's."""
        return {
            name: _difference(
                self.gradient(name) if kind == "gradient" else p, self.part(file, kind, name)
            )
            for name, p in self.parameters.items()
        }

    def gradient(self, name: str) -> Tensor:
        """The whole summed gradient of a parameter; zeros for one that does not train."""
        held = self.gradients.get(name)
        return torch.zeros_like(self.parameters[name]) if held is None else held

    @torch.no_grad()
    def rounded_updates(
        self, before: Reference, after: Reference, step: int, options: TrainOptions
    ) -> dict[str, Tensor]:
        """Of parameters with moments in 8 bits, before `step`: how far the update from this rank's
        moments is from the one by the reference's, of the entries that this rank steps."""
        found: dict[str, Tensor] = {}
        for name, state in self.optimizer.state_tensors().items():
            if step == 1 or MEAN + SCALES not in state:
                continue
            here = self.local_part(name)
            gradient = self.part(after, "gradient", name).reshape(-1)[here]
            theirs = {key: self.part(before, key, name).reshape(-1)[here] for key in STATE}
            ours = {key: _wide(moment_values(state, key)).reshape(-1) for key in STATE}
            one = adam_update(ours, gradient, step, options)
            other = adam_update(theirs, gradient, step, options)
            found[name] = options.lr * (one - other).abs()
        return found

    @torch.no_grad()
    def value_differences(
        self,
        before: Reference,
        file: Reference,
        step: int,
        options: TrainOptions,
        rounded: Mapping[str, Tensor],
    ) -> dict[str, tuple[float, float]]:
        """By parameter, the difference of its value that is largest relative to what is allowed for
        that entry, and what is allowed (`spec.check.value_limit`).

        Args:
            before, file: the reference before and after `step`.
            rounded: what `rounded_updates` returned.
        """
        found = {}
        for name, parameter in self.parameters.items():
            if not parameter.numel():
                found[name] = (0.0, value_limit(options.lr))
                continue
            theirs = self.part(file, "gradient", name)
            rounding = (_wide(self.gradient(name)) - theirs).abs()
            second = (1 - options.beta2) * theirs**2
            if step > 1:
                second += options.beta2 * self.part(before, SQUARE, name)
            second /= 1 - options.beta2**step
            amplified = rounding / (second.sqrt() + options.eps)
            allowed = value_limit(options.lr) + 2 * options.lr * amplified
            difference = (_wide(parameter) - self.part(file, "value", name)).abs()
            if name in rounded:
                here = self.local_part(name)
                allowed = allowed.reshape(-1)[here] + rounded[name]
                difference = difference.reshape(-1)[here]
            elif step > 1 and in_8bit(self.placements[name].shape, options):
                found[name] = (0.0, value_limit(options.lr))  # other ranks step all of it
                continue
            at = int((difference / allowed).argmax())  # the first NaN, if there is one
            found[name] = (float(difference.view(-1)[at]), float(allowed.view(-1)[at]))
        return found


def adam_update(
    moments: Mapping[str, Tensor], gradient: Tensor, step: int, options: TrainOptions
) -> Tensor:
    """What a step at learning rate 1 subtracts, without weight decay, from moments before it."""
    mean = options.beta1 * moments[MEAN] + (1 - options.beta1) * gradient
    square = options.beta2 * moments[SQUARE] + (1 - options.beta2) * gradient**2
    root = (square / (1 - options.beta2**step)).sqrt()
    return mean / (1 - options.beta1**step) / (root + options.eps)


def _wide(tensor: Tensor) -> Tensor:
    """On the CPU, in fp32 or in fp64."""
    held = tensor.detach().cpu()
    return held if held.dtype == torch.float64 else held.float()


def _owner(name: str, tie: str | None, ties: Mapping[str, str], shapes: Mapping[str, Any]) -> str:
    """The name under which the reference knows a parameter: of tied ones it keeps the first."""
    values = ties.get(tie or name, tie or name)
    names = (tie, name, values, *(one for one, other in ties.items() if other == values))
    return next(one for one in names if one is not None and one in shapes)


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of two local tensors; NaN if any entry is NaN."""
    ours = _wide(ours)
    return float((ours - theirs).abs().max()) if ours.numel() else 0.0


@torch.no_grad()
def _realign(rank: _Rank, file: Reference, step: int) -> None:
    """Take over the reference's values and, after the first step, its optimizer state."""
    for name, parameter in rank.parameters.items():
        parameter.copy_(rank.part(file, "value", name))
    if step == 0:
        return
    state: dict[str, dict[str, Tensor]] = {}
    for name, held in rank.optimizer.state_tensors().items():
        state[name] = {"step": torch.tensor(float(step))}
        for key in held.keys() & {*STATE, "master"}:
            part = rank.part(file, "value" if key == "master" else key, name)
            here = rank.local_part(name)
            state[name][key] = part if here == slice(None) else part.reshape(-1)[here]
    rank.optimizer.load_state_tensors(state)
