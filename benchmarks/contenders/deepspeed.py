"""DeepSpeed on CPU: ZeRO-1, its automatic tensor parallelism, and its pipeline.

Started with DS_ACCELERATOR=cpu and DS_BUILD_OPS=0. Its default gradient clipping of 1.0 is turned
off, since no other contender clips.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import deepspeed
import torch.distributed as dist
from torch import nn

from benchmarks.contenders.pytorch import mean_over_ranks
from benchmarks.rank import Step
from benchmarks.workload import Workload, next_token_loss

if TYPE_CHECKING:
    import torch


def _settings(workload: Workload, data_ranks: int, microbatches: int = 1) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": workload.global_batch // data_ranks // microbatches,
        "gradient_accumulation_steps": microbatches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def zero(workload: Workload, stage: int = 1) -> Step:
    """ZeRO over all ranks: optimizer state (and from stage 2 gradients) in shards."""
    deepspeed.init_distributed("gloo")
    whole = workload.model()
    engine, *_ = deepspeed.initialize(
        model=whole,
        optimizer=workload.optimizer(whole.parameters()),
        config=_settings(workload, dist.get_world_size()) | {"zero_optimization": {"stage": stage}},
    )

    def step(ids: torch.Tensor) -> float:
        mine = ids.chunk(dist.get_world_size())[dist.get_rank()]
        loss = next_token_loss(engine(input_ids=mine).logits, mine)
        engine.backward(loss)
        engine.step()
        return mean_over_ranks(loss)

    return step


def tensor_parallel(workload: Workload) -> Step:
    """AutoTP: linear layers replaced by column- and row-parallel ones, found by name."""
    import torch

    deepspeed.init_distributed("gloo")
    ranks = dist.get_world_size()
    split = deepspeed.tp_model_init(workload.model(), tp_size=ranks, dtype=torch.float32)
    engine, *_ = deepspeed.initialize(
        model=split,
        optimizer=workload.optimizer(split.parameters()),
        config=_settings(workload, 1)
        | {"tensor_parallel": {"autotp_size": ranks}, "zero_optimization": {"stage": 0}},
    )

    def step(ids: torch.Tensor) -> float:
        loss = next_token_loss(engine(input_ids=ids).logits, ids)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


class _Layer(nn.Module):
    """A decoder layer that finds positions by itself, as a list of layers needs."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        import torch

        positions = torch.arange(hidden.size(1)).unsqueeze(0)
        return self.layer(
            hidden,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=self.rotary(hidden, positions),
        )


def pipeline(workload: Workload) -> Step:
    """PipelineModule: the model as a list of layers, its 1F1B engine."""
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo")
    model = workload.model()
    layers = [
        model.model.embed_tokens,
        *(_Layer(layer, model.model.rotary_emb) for layer in model.model.layers),
        nn.Sequential(model.model.norm, model.lm_head),
    ]
    module = PipelineModule(
        layers,
        num_stages=dist.get_world_size(),
        loss_fn=next_token_loss,
        partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=workload.optimizer(list(module.parameters())),
        config=_settings(workload, 1, workload.microbatches)
        | {"pipeline": {"activation_checkpoint_interval": 0}},
    )

    def step(ids: torch.Tensor) -> float:
        return float(engine.train_batch(iter([(m, m) for m in ids.chunk(workload.microbatches)])))

    return step
