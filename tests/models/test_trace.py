"""A model reads itself: counts of the real modules, published formulas, every part of the shape."""

import dataclasses
import math

import pytest

torch = pytest.importorskip("torch")

from hocket.catalogue import models as catalogue  # noqa: E402
from hocket.cost.local import tensor_elements  # noqa: E402
from hocket.cost.state import local_parameters  # noqa: E402
from hocket.cost.terms import terms  # noqa: E402
from hocket.models import skeleton  # noqa: E402
from hocket.models.plans import plan_for  # noqa: E402
from hocket.models.proxy import proxy_of  # noqa: E402
from hocket.models.samples import sample_config  # noqa: E402
from hocket.models.trace import _shape as shape_of_run  # noqa: E402
from hocket.models.trace import positions, record, trace  # noqa: E402
from hocket.models.trace.run import run_trace  # noqa: E402
from hocket.planning.layouts import tensor_degrees  # noqa: E402
from hocket.spec.errors import LayoutError, ModelError  # noqa: E402
from hocket.spec.layout import Layout  # noqa: E402
from hocket.spec.model_shape import SPLITS, VIEWS, ModelShape  # noqa: E402
from hocket.spec.plan import matches  # noqa: E402
from tests.families import FAMILIES, LLAMA  # noqa: E402
from tests.rehearsal.inside import tiny_config  # noqa: E402
from tests.support.columns import layout_columns  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]

GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "vocab_size": 50257,
    "n_positions": 1024,
}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def held(block, *, t=1, sequence_parallel=False, view="fused", sequence=0, selective=False):
    """Bytes per token held for backward, without the small statistics of rows."""
    total = 0.0
    for row in block.saved:
        core = row.view == "core" and view == "core" and not selective
        if not (core or row.view in ("both", "fused")):
            continue
        if "statistics" in row.name or "row sums" in row.name:
            continue
        size = row.bytes * (sequence if row.square else 1)
        total += size / t if row.split != "outside" or sequence_parallel else size
    return total


def test_korthikanti_2022():
    """Equations 1 to 4 and section 5 of Reducing Activation Recomputation, in bytes per token."""
    block = trace(GPT2).blocks["block"]
    h, a, s, t = 768, 12, 2048, 4
    square = 5 * a * s
    assert held(block) == 34 * h
    assert held(block, view="core", sequence=s) == 34 * h + square
    assert held(block, view="core", sequence=s, t=t) == 10 * h + (24 * h + square) / t
    both = {"t": t, "sequence_parallel": True}
    assert held(block, view="core", sequence=s, **both) == (34 * h + square) / t
    assert held(block, view="core", sequence=s, selective=True, **both) == 34 * h / t
    small = [row for row in block.saved if "statistics" in row.name or "row sums" in row.name]
    assert sum(row.bytes for row in small) < 0.01 * 34 * h


def test_korthikanti_2022_outside_the_blocks():
    """Section 4.3: dropout of the embedding, norm and head inputs, logits in fp32."""
    shape = trace(GPT2)
    assert held(shape.blocks["embedding"]) == 768
    assert held(shape.blocks["head"]) == 2 * 768 + 2 * 768 + 4 * 50257


def test_llama_saves_what_its_gated_block_needs():
    values = {**LLAMA, "hidden_size": 512, "intermediate_size": 1376, "head_dim": 64,
              "num_attention_heads": 8, "num_key_value_heads": 2}  # fmt: skip
    shape = trace(values)
    block = shape.blocks["block"]
    h, q, kv, f = 512, 512, 2 * 128, 1376
    assert held(block) == 8 * h + 4 * q + 2 * kv + 6 * f
    assert held(block, t=2) == 8 * h + (4 * q + 2 * kv + 6 * f) / 2
    products = {p.name: (p.k, p.n, p.split) for p in block.products}
    assert products["self_attn.k_proj"] == (512, 128, "column")
    assert products["mlp.down_proj"] == (1376, 512, "row")
    (core,) = block.attention
    assert (core.heads, core.kv_heads, core.head_dim, core.window) == (8, 2, 64, None)
    fed = [p.input for p in block.products]
    assert fed[0] == fed[1] == fed[2] != fed[3]
    assert fed[4] == fed[5] not in (fed[0], fed[6])
    eager = sum(s.bytes for s in block.saved if s.view == "eager")
    assert eager > held(block)  # norms in fp32 and activations step by step


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_of_the_real_modules(name):
    shape = trace(FAMILIES[name], name=name)
    real = skeleton.build_skeleton(FAMILIES[name])
    assert shape.num_parameters == sum(p.numel() for p in real.parameters())
    assert ModelShape.from_json(shape.to_json()) == shape
    assert len(shape.layers) == real.config.num_hidden_layers
    for block in shape.blocks.values():
        assert all(row.split in SPLITS for row in (*block.weights, *block.products))
        assert all(row.view in VIEWS for row in (*block.saved, *block.unfused))
        assert all(row.view == "fused" for row in block.memory_bound)
    for kind in shape.layers:
        block = shape.blocks[kind]
        assert len(block.attention) == 1
        assert block.products
        assert block.memory_bound
        assert held(block) > 0
        # Every matrix that a token meets is there once.
        matrices = sum(p.n * p.k * p.groups for p in block.products)
        weights = [w.elements for w in block.weights if w.split in ("column", "row", "expert")]
        assert matrices >= 0.95 * sum(weights)


def test_operations_are_what_torch_counts():
    """Products and attention against PyTorch's own counter on a real forward."""
    from torch.utils.flop_counter import FlopCounterMode

    values = {**FAMILIES["qwen3"], "max_position_embeddings": 64}
    model = skeleton.build_skeleton(values, attention="eager", device="cpu")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(2, 32, dtype=torch.long), use_cache=False)
    shape = trace(values)
    counted = counter.get_total_flops() / 64
    assert shape.flops_per_token(32, causal=False, backward=False) == counted
    assert shape.flops_per_token(32) == 3 * shape.flops_per_token(32, backward=False)
    assert shape.flops_per_token(32) < shape.flops_per_token(32, causal=False)


def test_gpt3_175b_and_llama_405b():
    for name, parameters in (("gpt3-175b", 174.6e9), ("llama-3.1-405b", 405.85e9)):
        config = catalogue.config(name)
        shape = trace(config, name=name)
        assert math.isclose(shape.num_parameters, parameters, rel_tol=1e-3)
        assert set(shape.layers) == {"block"}
        assert trace(config, name=name) is shape  # traced once
        # 6 x parameters, and 12 x layers x hidden x sequence (Narayanan et al. 2021, appendix).
        flops = shape.flops_per_token(2048, causal=False)
        about = 6 * parameters + 12 * len(shape.layers) * shape.hidden * 2048
        assert math.isclose(flops, about, rel_tol=0.01)


def test_experts():
    shape = trace(FAMILIES["mixtral"])
    block = shape.blocks["block"]
    experts = [p for p in block.products if p.groups > 1]
    assert [p.split for p in experts] == ["column", "row"]
    assert {(p.groups, p.count) for p in experts} == {(4, 2.0)}
    assert (shape.experts, shape.experts_per_token) == (4, 2)
    stacked = sum(w.elements for w in block.weights if w.split == "expert")
    assert stacked == 4 * 3 * 32 * 48


def test_experts_in_fp32():
    """torch tells the sizes of grouped products in bf16 alone: they are the same in fp32."""
    config = catalogue.config("tiny-mixtral")
    half, whole = (trace(config, dtype=dtype) for dtype in ("bf16", "fp32"))
    for kind, block in half.blocks.items():
        assert whole.blocks[kind].products == block.products
        assert whole.blocks[kind].weights == block.weights
    assert {p.groups for p in whole.blocks["block"].products} > {1}


def test_kinds_of_blocks():
    config = catalogue.config("gemma-3-27b")
    shape = trace(config)
    windows = {kind: shape.blocks[kind].attention[0].window for kind in set(shape.layers)}
    assert windows == {"sliding_attention": 1024, "full_attention": None}
    assert shape.layers.count("full_attention") == len(shape.layers) // 6
    assert shape.tied


def test_dropout_is_as_configured_or_as_specified():
    assert held(trace(GPT2, dropout=0.0).blocks["block"]) == 32 * 768
    names = [s.name for s in trace(GPT2).blocks["block"].saved]
    assert any("dropout mask" in name for name in names)


def test_attention_without_a_fused_kernel_is_recognised():
    values = {"model_type": "gptj", "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8,
              "vocab_size": 96, "n_positions": 2048}  # fmt: skip
    block = trace(values).blocks["block"]
    (core,) = block.attention
    assert (core.heads, core.kv_heads, core.head_dim) == (4, 4, 16)
    assert {row.split for row in block.saved if row.square} == {"inside"}
    assert held(block, view="core", sequence=100) > held(block)


@pytest.mark.parametrize("positions", [48, 100, 200, 600])
def test_a_model_of_few_positions_has_the_blocks_of_one_of_many(positions):
    """Widths are no scores, whichever sequence fits its mask: 128 is one more than a prime."""
    values = {**GPT2, "model_type": "openai-gpt", "n_embd": 128, "n_layer": 1, "n_head": 4}
    few, many = (trace({**values, "n_positions": n}).blocks for n in (positions, 2048))
    for name in ("block", "head"):  # the buffer is the mask, which is as large as it is
        assert dataclasses.replace(few[name], buffers=0) == dataclasses.replace(
            many[name], buffers=0
        )


def test_a_skeleton_will_do():
    shape = trace(skeleton.build_skeleton(LLAMA))
    assert shape.num_parameters == trace(LLAMA).num_parameters


def test_what_cannot_be_read(monkeypatch):
    with pytest.raises(ModelError):
        trace({"model_type": "no-such-model"})
    monkeypatch.setattr(record, "MOST_OPERATIONS", 3)
    with pytest.raises(ModelError, match="more than 18 operations"):
        trace({**LLAMA, "hidden_size": 40})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qwen4_exp_text", r"self_attn.indexer reads them \(aten::nonzero\)"),
        ("xmod", r"layer.0.output reads them \(aten::nonzero\)"),
        ("xlm", "transformer reads them"),
        ("reformer", "sequence length 73 has to be a multiple"),
        (
            "xlnet",
            "fails in bfloat16 on 1009 sequences of 457 tokens: RuntimeError: expected scalar type",
        ),
        ("hrm_text", "no single list"),
    ],
)
def test_why_a_type_has_no_shape(name, reason):
    with pytest.raises(ModelError, match=reason):
        trace(tiny_config(name))


@pytest.mark.parametrize("kind", ["dbrx", "longcat_flash"])
def test_experts_in_a_loop_are_one_grouped_matmul(kind):
    """Of the experts that compute something, as many choices as a token has on average."""
    chosen = {"dbrx": {"moe_top_k": 2}, "longcat_flash": {"moe_topk": 3}}[kind]
    values = tiny_config(kind)
    values = (
        {**values, "ffn_config": {**values["ffn_config"], **chosen}}
        if kind == "dbrx"
        else {**values, **chosen}
    )
    shape = trace(values)
    found = [p for p in shape.blocks["block"].products if p.groups > 1]
    assert {p.count for p in found} == {2.0}  # LongCat: 4 of 6 experts are no identity
    real = skeleton.build_skeleton(values, dtype=torch.bfloat16)
    sizes = {p.numel() for n, p in real.named_parameters() if ".experts." in n}
    assert {p.groups * p.n * p.k for p in found} == sizes


@pytest.mark.parametrize("kind", ["mamba", "rwkv"])
def test_a_recurrence_by_position_is_traced_at_short_sequences(monkeypatch, kind):
    """Every figure is that of the long trace, which takes minutes at a real length."""
    config = skeleton.config_of(tiny_config(kind), router_loss=False)

    def shape_of(tokens):
        size = record.TracedSize(2, tokens)
        return shape_of_run(run_trace(config, torch.bfloat16, traced=size), kind)

    long = shape_of(43)
    monkeypatch.setattr(positions, "SHORT", (13, 17, 37))
    short = positions.lengthened(shape_of, 43)
    for name, block in long.blocks.items():
        found = short.blocks[name]
        assert found.products == block.products
        for rows, others in (
            (found.memory_bound, block.memory_bound),
            (found.unfused, block.unfused),
        ):
            assert [(r.name, r.kernels, r.backward_kernels) for r in rows] == [
                (r.name, r.kernels, r.backward_kernels) for r in others
            ]
            for row, other in zip(rows, others, strict=True):
                assert row.forward == pytest.approx(other.forward, rel=1e-12)
                assert row.backward == pytest.approx(other.backward, rel=1e-12)
        for view in VIEWS:
            sums = [sum(r.bytes for r in b.saved if r.view == view) for b in (found, block)]
            assert sums[0] == pytest.approx(sums[1], rel=1e-12), (name, view)
    assert any(len(b.saved) > len(short.blocks[n].saved) for n, b in long.blocks.items())


def test_a_recurrence_by_position_has_the_figures_of_its_tokens(monkeypatch):
    """Its gradients are as large as the sequence, for each position."""
    monkeypatch.setattr(record, "MOST_OPERATIONS", 400)
    monkeypatch.setattr(positions, "SHORT", (13, 17, 37))
    config = tiny_config("mamba")
    rows = [trace(config, size=(1, tokens)).blocks["block"].unfused[-1] for tokens in (512, 2048)]
    assert rows[1].kernels / rows[0].kernels == pytest.approx(4, rel=0.1)
    assert rows[1].backward / rows[0].backward == pytest.approx(4, rel=0.1)


def test_a_recurrence_by_position_has_the_figures_of_few_tokens_too(monkeypatch):
    """Fewer than were traced, and no prime number of them: of one polynomial with longer ones."""
    monkeypatch.setattr(record, "MOST_OPERATIONS", 400)
    monkeypatch.setattr(positions, "SHORT", (13, 17, 37))
    config = tiny_config("mamba")

    def moved(tokens):
        return trace(config, size=(1, tokens)).blocks["block"].unfused[-1].backward * tokens

    few, more, most, longer = (moved(tokens) for tokens in (8, 16, 32, 64))
    assert 0 < few < more < most
    # Of second degree through the first three, at twice the third.
    assert longer == pytest.approx(7 * most - 14 * more + 8 * few, rel=1e-9)


LARGE = {
    "deepseek_v3": {},  # latent attention, dense then expert blocks
    "gemma3n_text": {},  # key/value heads shared between layers
    "gpt_oss": {},  # sinks, biased experts
    "llama4": {},  # configuration of a model of text and images
    "falcon": {},
}


@pytest.mark.parametrize("name", LARGE)
def test_families_that_are_built_otherwise_at_real_size(name):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(name, **LARGE[name])
    shape = trace(config)
    real = skeleton.build_skeleton(config.to_dict(), dtype=torch.bfloat16)
    assert shape.num_parameters == sum(p.numel() for p in real.parameters())
    for kind in set(shape.layers):
        block = shape.blocks[kind]
        assert block.attention
        # Six operations for each parameter that a token meets, at the least.
        met = sum(p.n * p.k * p.count for p in block.products)
        assert 0 < met <= block.num_parameters


@pytest.mark.parametrize("kind", ["zamba", "zamba2"])
def test_parameters_that_several_layers_share_are_counted_once(kind):
    """Their attention is one module: layers behind the first one hold the rest alone."""
    config = proxy_of(skeleton.config_of(sample_config(kind))).config
    shape = trace(config)
    real = skeleton.build_skeleton(config.to_dict())
    assert shape.layers == ("linear_attention", "linear_attention", "hybrid", "hybrid-3")
    assert shape.num_parameters == sum(p.numel() for p in real.parameters())


def test_a_mask_counts_where_transformers_is_not_asked_for_attention():
    """Falcon's own code hands PyTorch one; what BART is given for a CPU, a GPU does without."""
    for kind, masked in (("falcon", True), ("bart", False)):
        config = proxy_of(skeleton.config_of(sample_config(kind))).config
        shape = trace(config)
        assert {core.masked for core in shape.blocks[shape.layers[0]].attention} == {masked}


FUSED = {
    "falcon of one key/value head": {
        "model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128,
        "num_attention_heads": 8, "multi_query": True, "new_decoder_architecture": False,
        "bias": True,
    },
    "falcon of groups": {
        "model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128,
        "num_attention_heads": 8, "num_kv_heads": 2, "new_decoder_architecture": True,
    },
    "gpt_bigcode": {
        "model_type": "gpt_bigcode", "n_embd": 64, "n_layer": 2, "n_head": 8, "vocab_size": 128,
        "n_positions": 64, "multi_query": True,
    },
    "phi3": FAMILIES["phi3"],
    "bloom": FAMILIES["bloom"],
    "llama": LLAMA,
}  # fmt: skip


@pytest.mark.parametrize("kind", FUSED)
def test_a_weight_is_divided_as_the_runtime_holds_it(kind):
    """Fused queries, keys and values too: which degrees are legal, and each rank's elements, by
    the trace, by the terms that the planner sums, and by the placements of the runtime's plan."""
    shape = trace(FUSED[kind])
    model = skeleton.build_skeleton(FUSED[kind])
    plan = plan_for(model)
    legal = tensor_degrees(shape)
    assert {1, 2} <= set(legal)
    assert (4 in legal) == (kind != "falcon of groups")
    layers = f"{plan.stages.layers}.0."
    names = [(n, p) for n, p in model.named_parameters() if n.startswith(layers)]
    block = next(iter(terms(shape).kinds))[1]
    for tp in (1, 2, 4, 8):
        try:
            held = {
                name.removeprefix(layers): _held_by(plan.tensor, name, parameter, tp)
                for name, parameter in names
            }
        except LayoutError:
            assert tp not in legal
            continue
        assert tp in legal or shape.heads % tp
        traced = {w.name: tensor_elements(w, tp) for w in shape.blocks[shape.layers[0]].weights}
        assert traced == held
        at = layout_columns([Layout(tp=tp)], 1)
        assert local_parameters(block, at).total[0] == sum(held.values())


def _held_by(plan, name, parameter, tp):
    """Elements of a parameter on the rank with the most."""
    module, _, own = name.rpartition(".")
    split = next((s for pattern, s in plan.splits.items() if matches(pattern, module)), None)
    if split is None:
        return parameter.numel()
    places = [split.place(name, own, tuple(parameter.shape), i, tp) for i in range(tp)]
    return max(math.prod(place.local_shape) for place in places)


def test_scores_with_an_attention_sink_are_not_saved_per_token():
    """A sink is one more column of the scores: they counted as activations of a token, 9 times as
    many bytes as query, key, value and output."""
    config = {
        "model_type": "gpt_oss", "hidden_size": 128, "intermediate_size": 64, "head_dim": 16,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
        "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 256,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    shape = trace(config, name="sinks")
    for kind in shape.layers:
        fused = [s for s in shape.blocks[kind].saved if s.view == "fused"]
        (core,) = (s for s in fused if s.name == "self_attn core")
        assert core.bytes == 2 * 16 * (8 + 2 + 2 + 8)
        assert not any(s.name == "self_attn" for s in fused)
