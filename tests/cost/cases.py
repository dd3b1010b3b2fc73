"""What the ranks of tests/cost do: take a step and hand back what was recorded and expected."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from hocket.cost.communication import communication
from hocket.cost.communication_table import Step, Table, When
from hocket.cost.stage_communication import StageShare
from hocket.models.context import attention_cores
from hocket.models.context_scans import splits_state
from hocket.models.skeleton import build_skeleton
from hocket.runtime.mesh import Mesh
from hocket.schedules import build_schedule
from hocket.spec.expert_dispatch import num_nodes
from hocket.spec.layout import Layout
from hocket.spec.model_shape import Handed
from hocket.spec.run import RunSpec, TrainOptions, Workload
from hocket.training.build import build_model
from tests.runtime import deep_ep_emulated
from tests.support.shares import layers_share

ROWS, S, H, V = 4, 16, 32, 64

LLAMA = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": S,
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": V + 1,
    "n_embd": H,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": S,
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 8}
GEMMA3 = {**LLAMA, "model_type": "gemma3_text", "head_dim": 8, "query_pre_attn_scalar": 8}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
HYBRID = {
    "vocab_size": V, "hidden_size": H, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": S,
    "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
MAMBA2 = {  # whose mixer has the name of its attention
    **HYBRID, "model_type": "nemotron_h", "layers_block_type": ["mamba", "attention"] * 2,
    "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2,
    "conv_kernel": 3, "chunk_size": 4,
}  # fmt: skip
DELTA = {
    **HYBRID, "model_type": "qwen3_5_text", "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4,
}  # fmt: skip
CONV = {
    **HYBRID, "model_type": "lfm2", "conv_L_cache": 3, "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention"] * 2,
}  # fmt: skip
HANDED = {
    "mamba2": Handed(inputs=(64 + 2 * 2 * 16) * 2, state=8 * 8 * 16, width=2),
    "delta": Handed(inputs=(2 * 16 + 48) * 2, state=4 * 8 * 12, width=2),
    "conv": Handed(inputs=32 * 2, width=2),
}
"""What recurrent layers hand on, by hand: channels of the convolution times one less than its 3
taps; heads times the sizes of their state."""
CONFIGS: dict[str, dict[str, Any]] = {
    "mamba2": MAMBA2,
    "delta": DELTA,
    "conv": CONV,
    "llama": LLAMA,
    "gpt2": GPT2,
    "qwen3": QWEN3,
    "mixtral": MIXTRAL,
    "gemma3": GEMMA3,
}


def _built(
    layout: Layout, config: dict[str, Any], mesh: Mesh, bucket_mb: float, dropout: float = 0.0,
    context_parallel: str = "auto", expert_dispatch: str = "direct",
) -> Any:  # fmt: skip
    spec = RunSpec(
        model=config["model_type"],
        config=config,
        layout=layout,
        workload=Workload(seq_len=S, global_batch=ROWS * layout.dp),
        options=TrainOptions(
            device="cpu",
            dropout=dropout,
            bucket_mb=bucket_mb,
            context_parallel=context_parallel,
            expert_dispatch=expert_dispatch,
        ),
    )
    count = layout.microbatches or 1
    schedule = build_schedule(layout, count) if layout.num_stages > 1 else None
    _, _, plan, parallel = build_model(spec, mesh, schedule)
    return plan, parallel


def _microbatches(layout: Layout, config: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, config["vocab_size"], (ROWS, S))
    batch = {
        "input_ids": ids,
        "position_ids": torch.arange(S).expand(ROWS, S).contiguous(),
        "labels": ids.roll(-1, 1),
    }
    count = layout.microbatches or 1
    parts = {key: value.chunk(count) for key, value in batch.items()}
    return [{key: value[m] for key, value in parts.items()} for m in range(count)]


def recorded_and_expected(
    context: Any, layout: str, model: str, bucket_mb: float = 25.0, dropout: float = 0.0,
    context_parallel: str = "auto", expert_dispatch: str = "direct",
) -> Any:  # fmt: skip
    """One step of `model`: (what the recorder counted, what theory says)."""
    split, config = Layout.parse(layout), CONFIGS[model]
    if expert_dispatch == "deepep":
        deep_ep_emulated.install()
    mesh = Mesh(split, context.rank, "cpu")
    plan, parallel = _built(
        split, config, mesh, bucket_mb, dropout, context_parallel, expert_dispatch
    )
    mesh.recorder.clear()
    torch.manual_seed(mesh.axis("dp").index)
    parallel.forward_backward(_microbatches(split, config))
    parallel.clip_grad_norm(1.0)
    parallel.begin_unshard()
    count = split.microbatches or 1
    schedule = parallel.schedule
    expected = communication(
        split,
        context.rank,
        Step(
            seq_len=S // split.cp,
            microbatch_size=ROWS // count,
            num_microbatches=count,
            hidden_size=H,
            bucket_bytes=bucket_mb * 1e6,
            experts_per_token=config.get("num_experts_per_tok", 0),
            expert_nodes=num_nodes(expert_dispatch, split),
            experts_by_library=expert_dispatch == "deepep",
            context_parallel=context_parallel,
        ),
        [
            StageShare.of_plan(
                plan,
                stage.placements,
                split,
                stage=stage.index,
                num_stages=1 if schedule is None else schedule.num_stages,
                experts_per_token=config.get("num_experts_per_tok", 0),
                handed={
                    name: HANDED[model]
                    for name, module in stage.module.named_modules()
                    if splits_state(module)
                },
                cores=attention_cores(build_skeleton(config)) if split.cp > 1 else (),
            )
            for stage in parallel.stages
        ],
        None if schedule is None else schedule.stage_ranks,
    )
    return mesh.recorder.collectives(), expected


def threads_communication(
    *,
    replicas: int,
    num_microbatches: int,
    input_bytes: int,
    output_bytes: int,
    state_bytes: int,
    gradient_bytes: int,
) -> list[dict[str, Any]]:
    """The collectives of `data_parallel=threads`: replicas as threads of one process.

    Args:
        replicas: the degree dp.
        num_microbatches: of the step; everything happens in each.
        input_bytes: of one whole microbatch's inputs, scattered.
        output_bytes: of its outputs (logits), gathered; their gradient is scattered.
        state_bytes: of parameters and buffers, broadcast.
        gradient_bytes: of the parameters' gradients, reduced onto the master.
    """
    table = Table(num_microbatches)
    if replicas > 1:
        for name, nbytes in (
            ("scatter", input_bytes),
            ("broadcast", state_bytes),
            ("gather", output_bytes),
            ("scatter", output_bytes),
            ("reduce", gradient_bytes),
        ):
            table.add(When.FORWARD, name, "dp", 1, nbytes)
    return table.list()


def threads(context: Any, replicas: int, microbatches: int) -> Any:
    """One step of replicas in threads: (recorded, expected)."""
    layout = Layout(dp=replicas, microbatches=microbatches, data_parallel="threads")
    mesh = Mesh(layout, context.rank, "cpu")
    _, parallel = _built(layout, LLAMA, mesh, 25.0)
    mesh.recorder.clear()
    batch = _microbatches(layout, LLAMA)
    parallel.forward_backward(batch)
    module = parallel.stages[0].module
    parameters = sum(p.nbytes for p in module.parameters())
    expected = threads_communication(
        replicas=replicas,
        num_microbatches=microbatches,
        input_bytes=batch[0]["input_ids"].nbytes + batch[0]["position_ids"].nbytes,
        output_bytes=batch[0]["input_ids"].numel() * V * 4,
        state_bytes=parameters + sum(b.nbytes for b in module.buffers()),
        gradient_bytes=parameters,
    )
    return mesh.recorder.collectives(), expected


def of_layers(context: Any) -> Any:
    """dp1.pp2.tp2 of the Llama: (what plan and placements say, what whole layers say)."""
    layout = Layout(pp=2, tp=2, microbatches=2)
    mesh = Mesh(layout, context.rank, "cpu")
    plan, parallel = _built(layout, LLAMA, mesh, 25.0)
    (stage,) = parallel.stages
    share = StageShare.of_plan(plan, stage.placements, layout, stage=stage.index, num_stages=2)
    layers = layers_share(
        parallel.bounds[stage.index],
        stage=stage.index,
        embedding=stage.is_first,
        head=stage.is_last,
        gradient_bytes=share.gradient_bytes,
        blocks=share.blocks,
    )
    return dataclasses.asdict(share), dataclasses.asdict(layers)
