"""The shape of a model under LoRA: what is trained, and what a step no longer computes or holds."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.catalogue import hardware
from hocket.catalogue.shapes import shape
from hocket.cost.adapters import adapted
from hocket.planning.problem import Problem
from hocket.spec.errors import OptionError
from hocket.spec.layout import Layout
from hocket.spec.model_shape import ModelShape

LLAMA = shape("llama-3-8b")
QKV_O, MLP = (4096 + 4096) * 2 + (4096 + 1024) * 2, (4096 + 14336) * 3


@pytest.mark.parametrize(
    ("targets", "width"),
    [
        ((), QKV_O + MLP),
        (("q_proj", "v_proj"), 4096 + 4096 + 4096 + 1024),
        (("mlp.up_proj",), 18432),
    ],
)
def test_so_many_parameters_are_trained(targets: tuple[str, ...], width: int) -> None:
    """As peft counts them: r (in + out) of each; 41,943,040 for a whole Llama 3 8B at 16."""
    found = adapted(LLAMA, 16, targets)
    assert found.num_trained == 32 * 16 * width
    assert found.num_parameters == LLAMA.num_parameters == LLAMA.num_trained


def test_a_head_and_stacked_experts_have_none() -> None:
    found = adapted(shape("mixtral-8x7b"), 8)
    names = [w.name for b in found.blocks.values() for w in b.weights if not w.frozen]
    assert names
    assert not any("experts" in name or name.startswith("lm_head") for name in names)
    assert not any(name.startswith("mlp.gate.") for name in names)  # a bare parameter, as peft sees


def test_a_step_computes_no_gradient_of_frozen_matrices() -> None:
    """Two of three products remain, but of attention, and the adapters' own are few."""
    whole, thin = LLAMA.flops_per_token(2048), adapted(LLAMA, 16).flops_per_token(2048)
    forward = LLAMA.flops_per_token(2048, backward=False)
    products = 2 * (LLAMA.num_parameters - 128256 * 4096)
    assert thin == pytest.approx(whole - products + 6 * 32 * 16 * (QKV_O + MLP), rel=1e-3)
    assert 2 * forward < thin < 2.2 * forward


def problem(of: ModelShape) -> Problem:
    cluster = hardware.cluster("8xA100-80")
    return Problem(shape=of, cluster=cluster, seq_len=2048, global_batch=64)


def held(of: ModelShape, layout: str) -> tuple[float, float, float, float]:
    from tests.support.columns import layout_columns

    asked = problem(of)
    at = layout_columns([Layout.parse(layout)], asked.global_batch)
    found, times = asked.memory(at), asked.times(at)
    parts = (found.weights, found.gradients, found.optimizer, times.step)
    return tuple(float(np.asarray(part)[0]) for part in parts)  # type: ignore[return-value]


@pytest.mark.parametrize("layout", ["dp8:microbatches=8", "pp4.tp2:microbatches=8", "dp8:zero=1"])
def test_what_is_frozen_has_no_gradient_and_no_state(layout: str) -> None:
    weights, gradients, optimizer, step = held(LLAMA, layout)
    thin = held(adapted(LLAMA, 16), layout)
    share = 32 * 16 * (QKV_O + MLP) / LLAMA.num_parameters
    assert weights < thin[0] < 1.02 * weights
    assert thin[1] < 3 * share * gradients
    assert thin[2] < 3 * share * optimizer
    assert 0.6 * step < thin[3] < 0.95 * step


def test_zero_3_gathers_what_is_frozen_and_reduces_what_is_not() -> None:
    weights, gradients, _, _ = held(LLAMA, "dp8:zero=3")
    thin = held(adapted(LLAMA, 16), "dp8:zero=3")
    assert thin[0] > 0.99 * weights
    assert thin[1] < 0.05 * gradients


def test_what_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(OptionError, match="no linear layer 'q_prj'") as error:
        adapted(LLAMA, 8, ("q_prj",))
    assert error.value.hint == "--lora-targets q_proj"
    with pytest.raises(OptionError, match="the rank of LoRA is 0"):
        adapted(LLAMA, 0)


@pytest.mark.torch
@pytest.mark.timeout(60)
def test_what_adapters_keep_is_in_the_order_of_the_forward() -> None:
    """Between the two halves of a backward, saved tensors are freed in the reverse of it."""
    from hocket.catalogue.models import config
    from hocket.models.trace import trace

    found = adapted(trace(config("tiny-llama"), dtype="fp32", frozen=True), 4, element_bytes=4)
    block = found.blocks[found.layers[1]]
    names = [row.name for row in block.saved if row.view in ("eager", "both")]
    wanted = [
        "input_layernorm:rsqrt", "input_layernorm:mul", "self_attn.q_proj.lora_A",
        "self_attn.k_proj.lora_A", "self_attn.v_proj.lora_A", "self_attn:attention",
        "self_attn.o_proj.lora_A", "post_attention_layernorm:rsqrt", "mlp.gate_proj.lora_A",
        "mlp.up_proj.lora_A", "mlp.act_fn:silu", "mlp:mul", "mlp.down_proj.lora_A",
    ]  # fmt: skip
    assert [name for name in names if name in wanted] == wanted


@pytest.mark.torch
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["tiny-gemma3", "tiny-llama"])
def test_adapters_keep_what_autograd_keeps(name: str) -> None:
    """Saved bytes of a block in plain transformers under peft, as its hooks see them."""
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.autograd.graph import saved_tensors_hooks

    from hocket.catalogue.models import config
    from hocket.models import skeleton
    from hocket.models.trace import trace

    found = adapted(trace(config(name), dtype="fp32", frozen=True), 4, element_bytes=4)
    predicted = {
        kind: sum(row.bytes for row in found.blocks[kind].saved if row.view in ("eager", "both"))
        for kind in found.layers
    }
    batch, length = 2, 16
    model = skeleton.build_skeleton(
        skeleton.config_of(config(name)), attention="sdpa", device="cpu"
    ).train()
    layers = model.model.layers
    peft = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    own = {p.untyped_storage()._cdata for p in peft.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and tensor.numel() % (batch * length) == 0:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    layer = layers[1]
    hidden = torch.randn(batch, length, model.config.hidden_size, requires_grad=True)
    places = torch.arange(length)[None]
    rotary = model.model.rotary_emb
    kind = found.layers[1]
    args = (hidden, places, kind) if name == "tiny-gemma3" else (hidden, places)
    with torch.no_grad():
        tables = rotary(*args)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(hidden, position_embeddings=tables, attention_mask=None)
    assert out is not None
    counted = sum(sizes.values()) / (batch * length)
    assert predicted[kind] == pytest.approx(counted, rel=0.05), (predicted[kind], counted)
