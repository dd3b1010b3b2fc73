"""Weights in 8 bits, compared with linear layers that round as the format says."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hocket.models import skeleton
from hocket.models.plans import plan_for
from hocket.models.rounded import rounded_to_e4m3
from hocket.runtime.fp8_experts import MULTIPLE, StackedWeight
from hocket.runtime.fp8_weights import store_in_fp8
from hocket.runtime.mesh import Mesh
from hocket.runtime.parallelize import parallelize
from hocket.runtime.triton.quantize_rows import LARGEST, quantize_rows
from hocket.serving.engine import attention
from hocket.serving.engine.families import _Served
from hocket.serving.engine.projections import MergedLinear, merge_projections
from hocket.serving.engine.runner import StageRunner
from hocket.spec.errors import ModelError
from hocket.spec.layout import Layout
from hocket.training.build import group_experts

pytestmark = pytest.mark.torch

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
FAMILIES = ("llama", "qwen2", "gemma3_text", "olmo2", "gpt2")
_FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": _FOUR,
    "qwen3_moe": {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16,
        "mlp_only_layers": [1],
    },
    "gpt_oss": {**_FOUR, "head_dim": 16, "sliding_window": 8, "intermediate_size": 48},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "n_routed_experts": 8,
        "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 1,
        "moe_intermediate_size": 32,
    },
}  # fmt: skip
"""Experts with a dense layer between, with biases and weights stored [E, in, out], with shared
experts and latent attention."""


class Rounding(nn.Module):
    """A linear layer whose weight and inputs are rounded so, summed in fp64."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        weight = layer.weight.detach()
        self.weight = rounded_to_e4m3(
            weight if isinstance(layer, nn.Linear) else weight.t()
        )  # GPT-2's
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        y = multiplied(x, self.weight)
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class RoundingExperts(nn.Module):
    """Experts one after the other, each matmul of which rounds so."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.experts = experts
        turned = experts.is_transposed
        self.up, self.down = (
            rounded_to_e4m3(w.detach().transpose(1, 2) if turned else w.detach())
            for w in (experts.gate_up_proj, experts.down_proj)
        )

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros(*index.shape, hidden.shape[-1])
        for token, of_token in enumerate(index.tolist()):
            for place, e in enumerate(of_token):
                y = self._expert(hidden[token : token + 1], e)
                out[token, place] = (y * weights[token, place])[0]
        return out.sum(1).to(hidden.dtype)

    def _expert(self, x: Tensor, e: int) -> Tensor:
        own = self.experts
        up = multiplied(x, self.up[e])
        up = up + own.gate_up_proj_bias[e] if own.has_bias else up
        down = multiplied(own._apply_gate(up), self.down[e])
        return down + own.down_proj_bias[e] if own.has_bias else down


def multiplied(x: Tensor, weight: Tensor) -> Tensor:
    """`x` [S, in] times a rounded `weight` [out, in]."""
    return (rounded_to_e4m3(x) @ weight.t()).to(torch.bfloat16)


def plain_of(family: str) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {**SIZES, **MIXTURES.get(family, {})}
    config = transformers.AutoConfig.for_model(family, **sizes, pad_token_id=0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.to(torch.bfloat16).eval()


def stored(plain: Any) -> Any:
    """The same values in 8 bits, as a server's rank has them."""
    own = skeleton.build_skeleton(
        plain.config, attention=attention.NAME, dtype=torch.bfloat16, dropout=0.0
    )
    parallel = parallelize(own, Layout(), plan_for(own), mesh=Mesh.single())
    (stage,) = parallel.stages
    stage.module.to_empty(device="cpu")
    stage.module.load_state_dict(plain.state_dict())
    buffers = dict(stage.module.named_buffers())
    for name, buffer in plain.named_buffers():
        buffers[name].copy_(buffer)
    names = store_in_fp8(parallel)
    return stage, names


def logits_of(models: tuple[Any, ...], sequences: list[list[int]]) -> list[list[Tensor]]:
    with torch.no_grad():
        return [
            [
                model(input_ids=torch.tensor([s]), use_cache=False).logits[0].float()
                for s in sequences
            ]
            for model in models
        ]


def drawn_sequences(draw: random.Random) -> list[list[int]]:
    sequences = [[draw.randrange(3, 96) for _ in range(n)] for n in (30, 21, 1)]
    return [*sequences, sequences[0][:12] + [draw.randrange(3, 96) for _ in range(9)]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_as_the_format_says(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 64, dtype=dtype) * torch.logspace(-6, 6, 40)[:, None].to(dtype)
    x[3] = 0.0
    few, scale = quantize_rows(x)
    assert (few.dtype, few.shape, scale.shape) == (torch.float8_e4m3fn, x.shape, (40, 1))
    found = few.double() * scale
    assert torch.equal(found, rounded_to_e4m3(x))
    assert not found[3].any()
    assert torch.equal(few.float().abs().amax(-1)[:3], torch.full((3,), LARGEST))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_computes_what_rounding_plain_transformers_computes(family: str) -> None:
    """Every matmul as it is served: chunks of prompts and decoding, merged projections."""
    exact, plain = plain_of(family), plain_of(family)
    stage, names = stored(plain)
    of_layer, together = (4, 0) if family == "gpt2" else (7, 5)
    assert len(names) == of_layer * SIZES["num_hidden_layers"]
    runner = StageRunner(
        stage, Mesh.single(), plain.config, block_size=4, max_num_seqs=4, max_num_batched_tokens=64,
        max_model_len=40,
    )  # fmt: skip
    assert runner.dtype == torch.bfloat16
    merged = [m for m in stage.module.modules() if isinstance(m, MergedLinear)]
    assert len(merged) == together * SIZES["num_hidden_layers"]
    errors = []

    def compared(expected: Rounding) -> Any:
        def hook(layer: Any, inputs: tuple[Tensor], output: Tensor) -> None:
            own = expected(inputs[0])
            errors.append(float((output - own).abs().max() / own.abs().max()))

        return hook

    for name in names:
        parent, _, last = name.rpartition(".")
        rounding = Rounding(plain.get_submodule(name))
        setattr(plain.get_submodule(parent), last, rounding)
        stage.module.get_submodule(name).register_forward_hook(compared(rounding))
    runner.num_snapshots = 1
    runner.allocate(48)
    draw = random.Random(5)
    sequences = drawn_sequences(draw)
    logits = logits_of((plain, exact), sequences)
    with torch.no_grad():
        worst = _Served(runner, sequences, draw).compare(logits[0])
    assert len(errors) > 10 * len(names)
    assert max(errors) < 2**-8  # a unit of bf16
    # Between layers, rounding to bf16 moves entries over such borders: the logits are as near as
    # those of 8 bits are to those of 16.
    far = max(float((a - b).abs().max()) for a, b in zip(*logits, strict=True))
    assert worst < far


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_compute_what_rounding_ones_of_plain_transformers_compute(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every grouped matmul as it is served, those of chunks whose rows miss an expert too."""
    exact, plain = plain_of(family), plain_of(family)
    stage, names = stored(plain)
    stacked = [name for name in names if ".experts." in name]
    dense = 0 if family in ("mixtral", "gpt_oss") else 1
    assert len(stacked) == 2 * (SIZES["num_hidden_layers"] - dense)
    known = {}
    for parent, _, last in (name.rpartition(".") for name in stacked):
        own = plain.get_submodule(parent)
        weight = own._parameters[last].detach()
        kept = stage.module.get_submodule(parent)._parameters[last]
        known[kept.untyped_storage().data_ptr()] = rounded_to_e4m3(
            weight.transpose(1, 2) if own.is_transposed else weight
        )
    given, errors = StackedWeight.grouped_product, []

    def compared(self: Any, x: Tensor, offsets: Tensor) -> Tensor:
        y, begin = given(self, x, offsets), 0
        weight = known[self.weight.untyped_storage().data_ptr()]
        for group, end in enumerate(offsets.tolist()):
            if end > begin:
                own = multiplied(x[begin:end], weight[group])
                errors.append(float((y[begin:end] - own).abs().max() / own.abs().max()))
            begin = end
        return y

    monkeypatch.setattr(StackedWeight, "grouped_product", compared)
    group_experts()
    runner = StageRunner(
        stage, Mesh.single(), plain.config, block_size=4, max_num_seqs=4, max_num_batched_tokens=64,
        max_model_len=40,
    )  # fmt: skip
    for name in names:
        parent, _, last = name.rpartition(".")
        if name.endswith(".experts.down_proj"):
            block = plain.get_submodule(parent.removesuffix(".experts"))
            block.experts = RoundingExperts(block.experts)
        elif name not in stacked:
            setattr(plain.get_submodule(parent), last, Rounding(plain.get_submodule(name)))
    runner.allocate(48)
    draw = random.Random(5)
    sequences = drawn_sequences(draw)
    logits = logits_of((plain, exact), sequences)
    with torch.no_grad():
        worst = _Served(runner, sequences, draw).compare(logits[0])
    assert len(errors) > 50
    assert max(errors) < 2**-7  # a unit of bf16 is up to that of the largest entry
    far = max(float((a - b).abs().max()) for a, b in zip(*logits, strict=True))
    # Of DeepSeek's groups of experts, nearly equal scores let a router choose another in bf16.
    assert worst < far or family == "deepseek_v3"


def test_weights_and_their_scales_take_half() -> None:
    plain = plain_of("llama")
    before = sum(p.nbytes for p in plain.parameters())
    stage, names = stored(plain)
    linear = sum(plain.get_submodule(name).weight.numel() for name in names)
    scales = sum(plain.get_submodule(name).weight.shape[0] * 4 for name in names)
    held = sum(p.nbytes for p in stage.module.parameters())
    assert held == before - linear
    assert scales == sum(b.nbytes for n, b in stage.module.named_buffers() if "scales" in n)


def test_merged_projections_are_those_of_their_parts() -> None:
    stage, _ = stored(plain_of("qwen2"))
    layer = stage.module.model.layers[0].self_attn
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    alone = [getattr(layer, f"{n}_proj")(x) for n in "qkv"]
    merge_projections(stage.module)
    together = [getattr(layer, f"{n}_proj")(x) for n in "qkv"]
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


def test_odd_sizes_and_routers_keep_their_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "intermediate_size", 8 * MULTIPLE + 1)
    stage, names = stored(plain_of("llama"))
    assert all("mlp" not in name for name in names)
    assert stage.module.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    for name, value in (
        ("hidden_size", 40),
        ("num_attention_heads", 5),
        ("num_key_value_heads", 5),
    ):
        monkeypatch.setitem(SIZES, name, value)
    with pytest.raises(ModelError, match="multiples of 16"):
        stored(plain_of("llama"))


@pytest.mark.parametrize(
    ("model", "options", "match"),
    [
        ("tiny-llama", {"quantization": "fp8"}, "CPU cores have no 8-bit float matmuls"),
        ("tiny-llama", {"quantization": "int4"}, "unknown quantization 'int4'"),
    ],
)
def test_what_cannot_be_served_so_is_rejected_before_ranks_start(
    model: str, options: dict[str, str], match: str
) -> None:
    from hocket.jobs.serving.request import server
    from hocket.spec.errors import OptionError

    with pytest.raises(OptionError, match=match):
        server({"model": model, "device": "cpu", **options})


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"cuda": True, "dtype": "fp32"}, "dtype is fp32"),
        ({"cuda": True, "dtype": "bf16", "capability": (8, 0)}, "capability 8.0"),
        ({"cuda": True, "dtype": "bf16", "capability": (8, 9)}, None),
    ],
)
def test_devices_that_multiply_in_8_bits(asked: dict[str, Any], match: str | None) -> None:
    from hocket.spec.capabilities import refused_quantization

    why = refused_quantization("fp8", **asked)
    assert (why is None) if match is None else (match in (why or ""))
    assert refused_quantization(None, **asked) is None


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_rehearsed_replica_streams_half_the_bytes(layout: str, tmp_path: Path) -> None:
    """No host read, graphs captured, one launch more a matmul, bytes as predicted."""
    from hocket.jobs.serving.rehearse import rehearse_replica, replica_spec

    found = {}
    for quantization in (None, "fp8"):
        spec = replica_spec(
            "llama-3.2-1b", Layout.parse(layout), layers=2, quantization=quantization
        )
        found[quantization] = rehearse_replica(spec)
    few, plain = found["fp8"], found[None]
    assert few.ends
    assert not few.host_reads()
    for rank, one in few.ranks.items():
        other = plain.ranks[rank]
        assert not one["graphs"]["reason"]
        layers = 2 // Layout.parse(layout).pp
        assert one["graphs"]["launches"] == other["graphs"]["launches"] + 4 * layers
        assert one["memory"]["weights"] < other["memory"]["weights"]
        predicted = few.predicted_peak(rank)
        assert few.held(one) == pytest.approx(predicted, rel=0.02)
    assert json.loads(few.to_json())["eager"]["ends"]
