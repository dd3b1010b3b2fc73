"""Megatron-Core on CPU: its GPTModel, with its tensor, data or expert parallelism.

Megatron-Core asks for CUDA in a few places that matter nothing here (current device, streams,
synchronisation); those calls are answered with the CPU. Its attention core is replaced by
PyTorch's fused one, which every other contender uses too, and its weights are the same ones in
its own order: queries, keys and values per group of heads, gate and up projection in one matrix.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.contenders.pytorch import mean_over_ranks
from benchmarks.rank import Step
from benchmarks.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable


class _Stream:
    """A stream where there are none."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, *_: Any) -> _Stream:
        return self

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


def _answer_for_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_: None
    cuda.current_stream = lambda *_: _Stream()
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.default_stream = lambda *_: _Stream()


def _as_read(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Counts of tokens as they are after they were copied from a GPU."""
    return value.tolist() if as_numpy and isinstance(value, torch.Tensor) else value


class _FusedAttention(nn.Module):
    """Causal attention of [S, B, heads, size] by PyTorch's fused kernel, to [S, B, H]."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def _fill(
    model: nn.Module,
    whole: dict[str, torch.Tensor],
    workload: Workload,
    tensor: tuple[int, int],
    experts: range,
) -> None:
    """Copy the reference model's weights into Megatron's names, orders and slices: those of one of
    the tensor ranks (which, of how many) and of its experts."""
    rank, tp = tensor
    size = workload.hidden // workload.heads

    def rows(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(tp, 0)[rank]

    def columns(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(tp, 1)[rank]

    def grouped(prefix: str) -> torch.Tensor:
        parts = [
            rows(whole[f"{prefix}.{name}_proj.weight"]).view(
                workload.kv_heads // tp, -1, workload.hidden
            )
            for name in "qkv"
        ]
        assert parts[1].size(1) == size
        return torch.cat(parts, 1).reshape(-1, workload.hidden)

    values = {
        "embedding.word_embeddings.weight": rows(whole["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": whole["model.norm.weight"],
        "output_layer.weight": rows(whole["lm_head.weight"]),
    }
    for i in range(workload.layers):
        theirs, ours = f"model.layers.{i}", f"decoder.layers.{i}"
        values |= {
            f"{ours}.input_layernorm.weight": whole[f"{theirs}.input_layernorm.weight"],
            f"{ours}.self_attention.linear_qkv.weight": grouped(f"{theirs}.self_attn"),
            f"{ours}.self_attention.linear_proj.weight": columns(
                whole[f"{theirs}.self_attn.o_proj.weight"]
            ),
            f"{ours}.pre_mlp_layernorm.weight": whole[f"{theirs}.post_attention_layernorm.weight"],
        }
        if workload.experts:
            values[f"{ours}.mlp.router.weight"] = whole[f"{theirs}.mlp.gate.weight"]
            for here, expert in enumerate(experts):
                name = f"{ours}.mlp.experts.local_experts.{here}"
                stacked = f"{theirs}.mlp.experts"
                values[f"{name}.linear_fc1.weight"] = whole[f"{stacked}.gate_up_proj"][expert]
                values[f"{name}.linear_fc2.weight"] = whole[f"{stacked}.down_proj"][expert]
            continue
        values |= {
            f"{ours}.mlp.linear_fc1.weight": torch.cat(
                [rows(whole[f"{theirs}.mlp.{n}_proj.weight"]) for n in ("gate", "up")]
            ),
            f"{ours}.mlp.linear_fc2.weight": columns(whole[f"{theirs}.mlp.down_proj.weight"]),
        }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values.pop(name))
    assert not values, sorted(values)


def _experts(workload: Workload, ep: int) -> dict[str, Any]:
    """Settings of a Mixtral's layers: weights of chosen experts are normalized, none dropped."""
    return {
        "num_moe_experts": workload.experts,
        "moe_router_topk": workload.top_k,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_ffn_hidden_size": workload.intermediate,
        "expert_model_parallel_size": ep,
    }


def build(workload: Workload, tp: int, ep: int = 1) -> Step:
    """GPTModel on `tp` tensor ranks, the other ranks data parallel; experts over `ep` of these."""
    weights = workload.model().state_dict()
    _answer_for_cuda()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    # Without Transformer Engine the name is missing, though its users ask whether it is None.
    moe_utils.te_general_gemm = None
    token_dispatcher.maybe_move_tensor_to_cpu = _as_read
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep
    )
    data_ranks = dist.get_world_size() // tp
    theirs = workload.config()
    config = TransformerConfig(
        num_layers=workload.layers,
        hidden_size=workload.hidden,
        ffn_hidden_size=workload.intermediate,
        num_attention_heads=workload.heads,
        num_query_groups=workload.kv_heads,
        tensor_model_parallel_size=tp,
        normalization="RMSNorm",
        layernorm_epsilon=theirs.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **(_experts(workload, ep) if workload.experts else {}),
    )
    spec = get_gpt_layer_local_spec(
        normalization="RMSNorm", num_experts=workload.experts or None, moe_grouped_gemm=False
    )
    spec.submodules.self_attention.submodules.core_attention = ModuleSpec(module=_FusedAttention)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=workload.vocab,
        max_sequence_length=workload.seq_len,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=theirs.rope_parameters["rope_theta"],
    )
    own = workload.experts // ep
    first = own * parallel_state.get_expert_model_parallel_rank()
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    _fill(model, weights, workload, (tensor_rank, tp), range(first, first + own))
    runner: Any = model
    if data_ranks > 1:
        settings = DistributedDataParallelConfig(
            overlap_grad_reduce=True, grad_reduce_in_fp32=True, use_distributed_optimizer=False
        )
        runner = DistributedDataParallel(config, settings, model)
    optimizer = workload.optimizer(model.parameters())
    return _stepper(workload, runner, model, optimizer, data_ranks)


def _stepper(
    workload: Workload,
    runner: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_ranks: int,
) -> Callable[[torch.Tensor], float]:
    positions = torch.arange(workload.seq_len).unsqueeze(0)

    def step(ids: torch.Tensor) -> float:
        mine = ids.chunk(data_ranks)[dist.get_rank() if data_ranks > 1 else 0]
        labels = mine.roll(-1, 1)
        # [B, S]; the last position has no next token.
        losses = runner(mine, positions.expand_as(mine), None, labels=labels)
        loss = losses[:, :-1].mean()
        if data_ranks > 1:
            runner.zero_grad_buffer()
        loss.backward()
        if data_ranks > 1:
            runner.finish_grad_sync()
            for parameter in model.parameters():
                parameter.grad = parameter.main_grad
        optimizer.step()
        if data_ranks > 1:
            for parameter in model.parameters():
                parameter.grad = None
            return mean_over_ranks(loss)
        optimizer.zero_grad()
        return loss.item()

    return step
