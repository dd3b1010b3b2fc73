"""PyTorch's own parallelism, as its documentation has it: DDP, DTensor, pipelining, all three.

Letters: B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from benchmarks.rank import Step
from benchmarks.workload import Workload, next_token_loss

if TYPE_CHECKING:
    from collections.abc import Callable


def mean_over_ranks(loss: torch.Tensor) -> float:
    """The mean of every rank's loss, as a training loop logs it."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def data_parallel(workload: Workload) -> Step:
    """DistributedDataParallel; gradients are views of its buckets, its recommended setting."""
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(workload.model(), gradient_as_bucket_view=True)
    optimizer = workload.optimizer(model.parameters())

    def step(ids: torch.Tensor) -> float:
        mine = ids.chunk(dist.get_world_size())[dist.get_rank()]
        loss = next_token_loss(model(mine).logits, mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return mean_over_ranks(loss)

    return step


def sharded(workload: Workload, stage: int) -> Step:
    """fully_shard of each layer and of the whole: ZeRO-3, or with parameters kept from forward to
    backward what comes nearest to ZeRO-2."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    model = workload.model()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=stage == 3)
    fully_shard(model, mesh=mesh, reshard_after_forward=stage == 3)
    optimizer = workload.optimizer(model.parameters())

    def step(ids: torch.Tensor) -> float:
        mine = ids.chunk(ranks)[dist.get_rank()]
        loss = next_token_loss(model(mine).logits, mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return mean_over_ranks(loss)

    return step


def _split_layers(layers: nn.ModuleList, mesh: DeviceMesh, slices: bool = False) -> None:
    """Megatron's pairing on each decoder layer: column then row, in attention and in the MLP; with
    `slices` norms and residuals on slices of the sequence, as PyTorch's tutorial has it."""
    row = RowwiseParallel(output_layouts=Shard(1)) if slices else RowwiseParallel()
    plan: dict[str, ParallelStyle] = {
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": row,
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": row,
    }
    if slices:
        plan |= {
            "input_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
        }
    for layer in layers:
        parallelize_module(layer, mesh, plan)


def tensor_parallel(workload: Workload, split_loss: bool = False, slices: bool = False) -> Step:
    """DTensor tensor parallelism; `split_loss` keeps the logits split and uses loss_parallel,
    `slices` adds sequence parallelism."""
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = workload.model()
    between = Shard(1) if slices else Replicate()
    ends: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if split_loss else Replicate(),
            use_local_output=not split_loss,
        ),
    }
    parallelize_module(model, mesh, {**ends, "model.norm": SequenceParallel()} if slices else ends)
    _split_layers(model.model.layers, mesh, slices)
    # On slices the model cannot count its positions by itself.
    positions = {"position_ids": torch.arange(workload.seq_len).unsqueeze(0)} if slices else {}
    optimizer = workload.optimizer(model.parameters())

    def whole_loss(ids: torch.Tensor) -> torch.Tensor:
        loss = next_token_loss(model(ids, **positions).logits, ids)
        loss.backward()
        return loss

    def parallel_loss(ids: torch.Tensor) -> torch.Tensor:
        with loss_parallel():
            logits = model(ids, **positions).logits
            labels = torch.full_like(ids, -100)
            labels[:, :-1] = ids[:, 1:]
            target = distribute_tensor(labels.reshape(-1), mesh, [Replicate()])
            loss = nn.functional.cross_entropy(logits.reshape(-1, logits.size(-1)), target)
            loss.backward()
        assert isinstance(loss, DTensor)
        return loss.full_tensor()

    def step(ids: torch.Tensor) -> float:
        loss = parallel_loss(ids) if split_loss else whole_loss(ids)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


class Stage(nn.Module):
    """Some consecutive decoder layers of a Llama, with the embedding or the head at the ends."""

    def __init__(self, model: Any, index: int, stages: int) -> None:
        super().__init__()
        layers = len(model.model.layers)
        first, last = index * layers // stages, (index + 1) * layers // stages
        self.embedding = model.model.embed_tokens if index == 0 else None
        self.layers = nn.ModuleList(model.model.layers[first:last])
        self.rotary = model.model.rotary_emb
        self.norm = model.model.norm if index == stages - 1 else None
        self.head = model.lm_head if index == stages - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Ids [B, S] on the first stage, else hidden [B, S, H], to hidden or logits [B, S, V]."""
        hidden = x if self.embedding is None else self.embedding(x)
        positions = torch.arange(hidden.size(1)).unsqueeze(0)
        rotation = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(
                hidden,
                attention_mask=None,
                position_ids=positions,
                position_embeddings=rotation,
            )
        return hidden if self.head is None else self.head(self.norm(hidden))


def _pipeline(
    workload: Workload,
    name: str,
    group: dist.ProcessGroup,
    wrap: Callable[[Stage], None],
) -> tuple[list[nn.Module], Callable[[torch.Tensor], torch.Tensor]]:
    """The stages of this rank and one forward and backward of ids [B, S]: its mean loss, or 0."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import (
        PipelineScheduleMulti,
        ScheduleZBVZeroBubble,
        get_schedule_class,
    )

    kind = get_schedule_class(name)
    several = issubclass(kind, PipelineScheduleMulti)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    stages = size * (2 if several else 1)
    if issubclass(kind, ScheduleZBVZeroBubble):
        mine = [rank, stages - 1 - rank]
    else:
        mine = list(range(rank, stages, size))
    whole = workload.model()
    modules = [Stage(whole, index, stages) for index in mine]
    del whole
    for module in modules:
        wrap(module)
    cut = [
        PipelineStage(module, index, stages, torch.device("cpu"), group=group)
        for module, index in zip(modules, mine, strict=True)
    ]
    schedule = kind(
        cut if several else cut[0],
        workload.microbatches,
        loss_fn=next_token_loss,
        scale_grads=True,
    )

    def forward_backward(ids: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        inputs = (ids,) if 0 in mine else ()
        last = {"target": ids, "losses": losses} if stages - 1 in mine else {}
        schedule.step(*inputs, return_outputs=False, **last)
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return list(modules), forward_backward


def pipeline(workload: Workload, schedule: str) -> Step:
    """torch.distributed.pipelining over all ranks."""
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    assert world is not None
    modules, forward_backward = _pipeline(workload, schedule, world, lambda stage: None)
    optimizer = workload.optimizer([p for m in modules for p in m.parameters()])

    def step(ids: torch.Tensor) -> float:
        loss = forward_backward(ids)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        return loss.item()

    return step


def three_axes(
    workload: Workload, schedule: str = "1F1B", dp: int = 2, pp: int = 2, tp: int = 2
) -> Step:
    """fully_shard over dp (its gradients reduced once a step) x DTensor over tp x a pipeline."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))

    def wrap(stage: Stage) -> None:
        _split_layers(stage.layers, mesh["tp"])
        if stage.embedding is not None:
            plan = {"embedding": RowwiseParallel(input_layouts=Replicate())}
            parallelize_module(stage, mesh["tp"], plan)
        if stage.head is not None:
            plan = {"head": ColwiseParallel(output_layouts=Replicate())}
            parallelize_module(stage, mesh["tp"], plan)
        for layer in stage.layers:
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=False)

    modules, forward_backward = _pipeline(workload, schedule, mesh["pp"].get_group(), wrap)
    optimizer = workload.optimizer([p for m in modules for p in m.parameters()])
    data_rank = mesh["dp"].get_local_rank()

    def step(ids: torch.Tensor) -> float:
        loss = forward_backward(ids.chunk(dp)[data_rank])
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        return loss.item() / (dp * tp)

    return step
