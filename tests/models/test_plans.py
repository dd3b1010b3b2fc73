import errno
import unittest.mock

import pytest

from hocket.spec.errors import LayoutError
from hocket.spec.plan import matches
from tests.families import FAMILIES, LLAMA
from tests.models.variants import VARIANTS

pytestmark = pytest.mark.torch


def plan_of(config):
    from hocket.models import skeleton
    from hocket.models.plans import plan_for

    model = skeleton.build_skeleton(config)
    return model, plan_for(model)


def find(patterns, name):
    return next((v for p, v in patterns.items() if matches(p, name)), None)


@pytest.mark.parametrize("family", VARIANTS)
def test_every_family_has_a_whole_plan(family):
    model, plan = plan_of(VARIANTS[family])
    assert plan.reasons == {}
    assert plan.tensor is not None
    assert plan.stages is not None
    names = [name for name, _ in model.named_modules()]
    for pattern in (*plan.tensor.splits, *plan.tensor.patches, *plan.tensor.inputs):
        assert any(matches(pattern, name) for name in names), pattern
    # Every parameter of two dims is split, but positions, routers and OPT's projections.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module, _, key = name.rpartition(".")
        split = find(plan.tensor.splits, module)
        whole = ("wpe", "embed_positions", "project_in", "project_out", "mlp.gate")
        if parameter.ndim >= 2 and not module.endswith(whole):
            assert split is not None, name
            assert key in split.dims, name
    # Each rank of two holds an equal share, and the shares tile the whole.
    for degree in (2, 4):
        for name, parameter in model.named_parameters(remove_duplicate=False):
            module, _, key = name.rpartition(".")
            split = find(plan.tensor.splits, module)
            if split is None:
                continue
            shape = tuple(parameter.shape)
            parts = [split.place(name, key, shape, i, degree) for i in range(degree)]
            if key in split.dims and not any(p.has_copies for p in parts):
                held = sum(p.local_shape[split.dims[key]] for p in parts)
                assert held == shape[split.dims[key]], name


@pytest.mark.parametrize("family", VARIANTS)
def test_ends_of_the_model_belong_to_first_and_last_stage(family):
    model, plan = plan_of(VARIANTS[family])
    stages = plan.stages
    assert stages.num_layers == 4
    owned = (stages.layers, *stages.before, *stages.after, *stages.head)
    for name, _ in model.named_parameters(remove_duplicate=False):
        assert any(name.startswith(f"{part}.") for part in owned), name
    assert stages.head == ("lm_head",)
    tied = model.config.tie_word_embeddings
    assert len(plan.ties) == int(tied)
    if tied:
        (owner,) = plan.ties.values()
        assert owner.removesuffix(".weight") == stages.before[0]


def test_stages_are_read_from_the_order_of_execution():
    def stages(family):
        return plan_of(VARIANTS[family])[1].stages

    gpt2 = stages("gpt2")
    assert gpt2.before == ("transformer.wte", "transformer.wpe", "transformer.drop")
    assert gpt2.positions == ("transformer.wpe",)
    assert gpt2.after == ("transformer.ln_f",)
    bloom = stages("bloom")
    assert bloom.before[1] == "transformer.word_embeddings_layernorm"
    assert bloom.returns_tuple == 2
    opt = stages("opt_projected")
    assert opt.decoder == "model.decoder"
    assert "model.decoder.project_in" in opt.before
    assert opt.after == ("model.decoder.project_out",)
    assert stages("gpt_neox").before == ("gpt_neox.embed_in", "gpt_neox.emb_dropout")
    assert stages("llama").returns_tuple == 0


def test_fused_projections_are_split_head_by_head():
    def segments(family, module):
        split = find(plan_of(VARIANTS[family])[1].tensor.splits, module)
        return [(s.units, s.size, s.copies) for s in split.segments]

    assert segments("gpt2", "transformer.h.0.attn.c_attn") == [(4, 8, False)] * 3
    assert segments("gpt_neox", "gpt_neox.layers.0.attention.query_key_value") == [(4, 24, False)]
    assert segments("bloom", "transformer.h.0.self_attention.query_key_value") == [(4, 24, False)]
    assert segments("phi3", "model.layers.1.self_attn.qkv_proj") == [
        (4, 8, False),
        (2, 8, True),
        (2, 8, True),
    ]
    assert segments("phi3", "model.layers.1.mlp.gate_up_proj") == [(48, 1, False)] * 2


def test_local_counts_are_patched():
    def local(family, module, degree):
        _, plan = plan_of(VARIANTS[family])
        found = find(plan.tensor.patches, module) or ()
        return {(p.attribute, p.on_config): p.local(degree) for p in found}

    assert local("gpt2", "transformer.h.0.attn", 2) == {
        ("num_heads", False): 2,
        ("split_size", False): 16,
    }
    assert local("opt", "model.decoder.layers.3.self_attn", 4) == {("num_heads", False): 1}
    assert local("llama", "model.layers.0.self_attn", 4) == {("num_key_value_groups", False): 1}
    assert local("multi_query", "model.layers.0.self_attn", 2) == {
        ("num_key_value_groups", False): 2
    }
    assert local("phi3", "model.layers.0.self_attn", 2) == {
        ("num_key_value_heads", False): 1,
        ("num_key_value_groups", False): 2,
        ("num_attention_heads", True): 2,
        ("num_key_value_heads", True): 1,
    }
    assert local("gpt_neox", "gpt_neox.layers.0.attention", 2) == {}


def test_bloom_slices_its_alibi():
    _, plan = plan_of(FAMILIES["bloom"])
    (cut,) = find(plan.tensor.inputs, "transformer.h.2.self_attention")
    assert (cut.argument, cut.dim, cut.units) == ("alibi", 0, 4)


def test_norms_of_single_heads_sum_their_gradients():
    for family in ("qwen3", "gemma3"):
        _, plan = plan_of(FAMILIES[family])
        for norm in ("q_norm", "k_norm"):
            assert find(plan.tensor.splits, f"model.layers.1.self_attn.{norm}").style == "sum_grad"


def test_heads_that_do_not_divide_are_named():
    _, plan = plan_of({**LLAMA, "num_attention_heads": 4})
    split = find(plan.tensor.splits, "model.layers.0.self_attn.q_proj")
    with pytest.raises(LayoutError, match="4 attention heads do not divide over tp 3") as caught:
        split.place("q", "weight", (32, 32), 0, 3)
    assert "tp2" in str(caught.value.hint)


def test_what_cannot_be_split_says_why():
    _, plan = plan_of({**FAMILIES["bloom"], "slow_but_exact": True, "pretraining_tp": 2})
    assert plan.tensor is None
    assert "slow_but_exact" in plan.reasons["tensor"]
    _, plan = plan_of({"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2,
                       "vocab_size": 64, "state_size": 4})  # fmt: skip
    assert plan.tensor is None
    assert "'mamba' has no tensor plan" in plan.reasons["tensor"]
    assert "projected from different tensors" in plan.reasons["tensor"]


def test_a_block_that_cannot_be_split_is_held_whole():
    tiny = {**LLAMA, "model_type": "deepseek_v3", "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "q_lora_rank": 8,
            "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
            "first_k_dense_replace": 1, "num_key_value_heads": 4}  # fmt: skip
    _, plan = plan_of(tiny)
    assert find(plan.tensor.splits, "model.layers.0.mlp.gate_proj").style == "column"
    assert find(plan.tensor.splits, "model.layers.2.mlp.experts").style == "experts"
    assert find(plan.tensor.splits, "model.layers.2.self_attn.o_proj") is None


def test_a_plan_is_kept_for_later_starts(monkeypatch, tmp_path):
    from hocket.models import plan_cache, skeleton

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    searched = []
    plan_for = plan_cache.plan_for

    def counted(model, **kwargs):
        searched.append(model.config.model_type)
        return plan_for(model, **kwargs)

    monkeypatch.setattr(plan_cache, "plan_for", counted)
    for family in ("llama", "gpt2", "bloom"):
        model, plan = plan_of(VARIANTS[family])
        sequence = plan_for(model, sequence=True)
        searched.clear()
        for _ in range(2):  # found, then read
            assert plan_cache.built_plan(model) == plan
            assert plan_cache.built_plan(model, sequence=True) == sequence
        missing = sequence.sequence is None
        assert len(searched) == 2 + missing, family

    model, plan = plan_of(VARIANTS["llama"])
    searched.clear()
    changed = skeleton.build_skeleton({**VARIANTS["llama"], "num_hidden_layers": 2})
    assert plan_cache.built_plan(changed).stages.num_layers == 2
    assert len(searched) == 1
    for file in (tmp_path / "hocket" / "plans").iterdir():
        text = file.read_text()
        assert '\\"dims\\": {\\"weight\\": 0}' in text
        file.write_text(
            text.replace('\\"dims\\": {\\"weight\\": 0}', '\\"dims\\": {\\"weight\\": 1}')
        )
        assert plan_cache.read_plan(file) is None, "a file that was altered"
        file.write_text("[]")
        assert plan_cache.read_plan(file) is None
    assert plan_cache.built_plan(model) == plan
    assert len(searched) == 2

    model.__class__ = type("Mine", (type(model),), {"__module__": "transformers_modules.mine"})
    assert plan_cache.built_plan(model) == plan_cache.built_plan(model) == plan
    assert len(searched) == 4


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.EMFILE, "Too many open files"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
)
def test_what_an_exhausted_process_raises_is_no_property_of_the_model(monkeypatch, tmp_path, error):
    from hocket.models import plan_cache, skeleton
    from hocket.models.proxy import ProxyModel

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = skeleton.build_skeleton(VARIANTS["llama"])
    build, trials = ProxyModel.build, 0

    def fails_at(last):
        def build_or_fail(proxy, *args, **kwargs):
            nonlocal trials
            trials += 1
            if trials == last:
                raise error
            return build(proxy, *args, **kwargs)

        return unittest.mock.patch.object(ProxyModel, "build", build_or_fail)

    with fails_at(0):
        plan_cache.plan_for(model, sequence=True)
    number, trials = trials, 0
    assert number > 2
    for last in range(1, number + 1):  # each trial of the search in turn
        trials = 0
        with fails_at(last), pytest.raises(type(error)) as raised:
            plan_cache.built_plan(model, sequence=True)
        assert raised.value is error
    assert not (tmp_path / "hocket").exists()
    assert plan_cache.built_plan(model, sequence=True).sequence is not None
