"""DeepSpeed on CPU: ZeRO, automatic tensor parallelism, Ulysses, experts, and its pipeline.

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
from benchmarks.workload import IGNORED, Workload, next_token_loss

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


def sequence(workload: Workload) -> Step:
    """DeepSpeed-Ulysses for transformers' models: consecutive shards of sequences, heads inside
    attention; ZeRO-1 over the same ranks, as its engine reduces gradients for these."""
    import torch
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = workload.model()
    places = UlyssesSPAttentionHF.register_with_transformers(
        whole,
        "sdpa",
        sequence_parallel_size=ranks,
        micro_batch_size=workload.global_batch,
        seq_length=workload.seq_len,
        seq_length_is_variable=False,
    )
    engine, *_ = deepspeed.initialize(
        model=whole,
        optimizer=workload.optimizer(whole.parameters()),
        config=_settings(workload, 1) | {"zero_optimization": {"stage": 1}},
        mpu=places,
    )

    def step(ids: torch.Tensor) -> float:
        labels = torch.full_like(ids, IGNORED)
        labels[:, :-1] = ids[:, 1:]
        positions = torch.arange(workload.seq_len).expand_as(ids)
        mine, wanted, at = (t.chunk(ranks, dim=1)[rank] for t in (ids, labels, positions))
        logits = engine(input_ids=mine, position_ids=at).logits
        summed = nn.functional.cross_entropy(
            logits.flatten(0, 1), wanted.flatten(), reduction="sum"
        )
        # The engine averages gradients over ranks.
        loss = summed / (labels != IGNORED).sum() * ranks
        engine.backward(loss)
        engine.step()
        return mean_over_ranks(loss)

    return step


class _Expert(nn.Module):
    """One expert of a Mixtral."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)


class _Experts(nn.Module):
    """DeepSpeed's layer in the place of Mixtral's, which returns the hidden state alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(hidden)[0]
        return out


def experts(workload: Workload) -> Step:
    """DeepSpeed's MoE layers, no token dropped, experts over all ranks; ZeRO-1 of what is dense."""
    import torch
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    deepspeed.init_distributed("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = workload.model()
    for layer in whole.model.layers:
        theirs = layer.mlp
        made = MoE(
            workload.hidden,
            _Expert(workload.hidden, workload.intermediate),
            num_experts=workload.experts,
            ep_size=ranks,
            k=workload.top_k,
            drop_tokens=False,
            top2_2nd_expert_sampling=False,
        )
        own = workload.experts // ranks
        with torch.no_grad():
            made.deepspeed_moe.gate.wg.weight.copy_(theirs.gate.weight)
            for i, expert in enumerate(made.deepspeed_moe.experts.deepspeed_experts):
                expert.gate_up.weight.copy_(theirs.experts.gate_up_proj[rank * own + i])
                expert.down.weight.copy_(theirs.experts.down_proj[rank * own + i])
        layer.mlp = _Experts(made)
    parameters = {"params": list(whole.parameters()), "name": "all"}
    groups = split_params_into_different_moe_groups_for_optimizer(parameters)
    engine, *_ = deepspeed.initialize(
        model=whole,
        optimizer=torch.optim.AdamW(groups, lr=workload.lr, weight_decay=0.0, fused=True),
        config=_settings(workload, ranks) | {"zero_optimization": {"stage": 1}},
    )

    def step(ids: torch.Tensor) -> float:
        mine = ids.chunk(ranks)[rank]
        loss = next_token_loss(engine(input_ids=mine).logits, mine)
        engine.backward(loss)
        engine.step()
        return mean_over_ranks(loss)

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
