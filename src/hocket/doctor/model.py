"""Models of checks: a small or a catalogue's one on one device, built and stepped as in training.

Not executed on a GPU yet.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hocket.doctor.families import BASE
from hocket.doctor.place import Place

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.spec.run import RunSpec

WIDE = {**BASE, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 512, "max_position_embeddings": 512}  # fmt: skip
"""A Llama whose kernels are those of real sizes, 100M parameters."""


def catalogue(name: str, layers: int | None = None) -> dict[str, Any]:
    """A configuration of the catalogue, with its first `layers` layers."""
    from hocket.catalogue import models

    config = dict(models.config(name))
    if layers is not None:
        config["num_hidden_layers"] = layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
    return config


def spec(
    config: dict[str, Any],
    *,
    layout: str = "dp1",
    dtype: str = "bf16",
    seq_len: int = 32,
    rows: int = 4,
    **options: Any,
) -> RunSpec:
    """A job of `rows` sequences of `seq_len` tokens a step."""
    from hocket.spec.layout import Layout
    from hocket.spec.run import RunSpec, TrainOptions, Workload

    found = Layout.parse(layout)
    if found.microbatches is None:
        found = dataclasses.replace(found, microbatches=1 if found.pp == 1 else 2 * found.pp)
    return RunSpec(
        model=str(config["model_type"]), config=config, layout=found,
        workload=Workload(seq_len=seq_len, global_batch=rows, dtype=dtype),
        options=TrainOptions(**{"dropout": 0.0, **options}), command="check",
    )  # fmt: skip


def batches(job: RunSpec, device: Any, seed: int = 0) -> list[dict[str, Tensor]]:
    """The microbatches of one step of one data rank, of seeded tokens."""
    import torch

    rows, length = job.workload.global_batch, job.workload.seq_len
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(job.config["vocab_size"], (rows, length + 1), generator=generator)
    ids = ids.to(device)
    positions = torch.arange(length, device=device).expand(rows, -1).contiguous()
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous(),
             "position_ids": positions}  # fmt: skip
    count = job.layout.microbatches or 1
    parts = {key: value.chunk(count) for key, value in batch.items()}
    return [{key: value[m] for key, value in parts.items()} for m in range(count)]


class TrainedModel:
    """One model with its optimizer on the device of a place.

    Args:
        place: where.
        job: of a layout of one rank.
        labels_shifted: as for `training.build.build_model`.
    """

    def __init__(self, place: Place, job: RunSpec, labels_shifted: bool = True) -> None:
        import torch

        from hocket.runtime.mesh import Mesh
        from hocket.runtime.record import Recorder
        from hocket.training.build import build_model, build_optimizer

        assert job.layout.world_size == 1, job.layout
        self.place, self.job = place, job
        exact = job.workload.dtype == "fp32"
        torch.set_float32_matmul_precision("highest" if exact else "high")
        mesh = Mesh.single(place.device, Recorder(0, place.device))
        mesh.layout = job.layout
        _, self.skeleton, _, self.parallel = build_model(
            job, mesh, None, labels_shifted=labels_shifted
        )
        self.optimizer = build_optimizer(self.parallel, job.options)

    def batches(self, seed: int = 0) -> list[dict[str, Tensor]]:
        """The microbatches of one step, of seeded tokens."""
        return batches(self.job, self.place.device, seed)

    def step(self, batches: list[dict[str, Tensor]]) -> Tensor:
        """One optimizer step; the loss, which is not read."""
        tokens = self.job.workload.global_batch * self.job.workload.seq_len
        loss: Tensor = self.parallel.forward_backward(batches, tokens)
        self.parallel.clip_grad_norm(self.job.options.max_grad_norm)
        self.optimizer.step(self.job.options.lr)
        return loss


def gradients_of(
    place: Place, fields: str = "", layers: int | None = None, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one fp32 step of a small Llama on one rank of a layout `dp1:fields`."""
    config = dict(place.size(WIDE, BASE))
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    job = spec(
        config, layout=f"dp1:{fields}" if fields else "dp1", dtype="fp32",
        seq_len=place.size(256, 16), **options,
    )  # fmt: skip
    trained = TrainedModel(place, job)
    loss = trained.parallel.forward_backward(trained.batches())
    return loss.detach(), {n: g.clone() for n, g in trained.parallel.gradients().items()}
