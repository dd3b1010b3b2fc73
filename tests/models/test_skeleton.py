import pytest

from hocket.models import registry
from hocket.models.dimensions import dimensions
from hocket.models.source import resolve_model
from hocket.spec.errors import ModelError
from tests.families import FAMILIES, LLAMA

pytestmark = pytest.mark.torch


@pytest.fixture
def skeleton():
    from hocket.models import skeleton

    return skeleton


def test_a_large_model_takes_no_memory(skeleton):
    model = skeleton.build_skeleton(resolve_model("llama-3.1-405b").config)
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert sum(p.numel() for p in model.parameters()) == 405_853_388_800
    assert model.config.use_cache is False


def test_tied_embeddings_are_one_parameter(skeleton):
    model = skeleton.build_skeleton(resolve_model("gpt2").config)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


def test_attention_is_chosen_here(skeleton):
    foreign = {**LLAMA, "_attn_implementation": "someone/their-kernel"}
    assert skeleton.build_skeleton(foreign).config._attn_implementation == "sdpa"
    assert skeleton.build_skeleton(LLAMA, attention="eager").config._attn_implementation == "eager"
    # BLOOM has no fused attention.
    assert skeleton.build_skeleton(FAMILIES["bloom"]).config._attn_implementation == "eager"
    with pytest.raises(ModelError, match="unknown attention 'flash'"):
        skeleton.build_skeleton(LLAMA, attention="flash")


def test_its_attention_asks_the_modules(skeleton, monkeypatch):
    """Also where no plan was searched for in this process: recompute=selective goes by that."""
    import torch
    import transformers

    interface = transformers.AttentionInterface
    asked = interface.get_interface
    monkeypatch.setattr(interface, "get_interface", getattr(asked, "__wrapped__", asked))
    model = skeleton.build_skeleton(FAMILIES["llama"], device="cpu")
    modules = [layer.self_attn for layer in model.model.layers]
    ran = []
    for module in modules:
        module.recompute_core = lambda core, module, *args, **more: (
            ran.append(module) or core(module, *args, **more)
        )
    model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    assert ran == modules


def test_dropout_is_overridden_everywhere(skeleton):
    from torch import nn

    for family in ("gpt2", "opt", "bloom"):
        model = skeleton.build_skeleton(FAMILIES[family], dropout=0.0)
        drops = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
        drops += [m.dropout for m in model.modules() if isinstance(getattr(m, "dropout", 0), float)]
        assert drops == [0.0] * len(drops)
        assert drops
    model = skeleton.build_skeleton(FAMILIES["gpt2"], dropout=0.3)
    assert model.transformer.drop.p == 0.3


def test_parameters_have_the_dtype_asked_for_whatever_made_them(skeleton):
    """XLNet makes its projections with torch.FloatTensor, which knows no default dtype."""
    import torch

    from hocket.models.samples import sample_config

    for model in ("xlnet", "llama"):
        built = skeleton.build_skeleton(sample_config(model), dtype=torch.bfloat16)
        assert {p.dtype for p in built.parameters()} == {torch.bfloat16}
        assert all(p.is_meta for p in built.parameters())


def test_a_family_with_attention_classes_of_its_own_is_named(skeleton):
    import hocket.serving.engine.attention  # noqa: F401 registers paged attention
    from hocket.models.samples import sample_config

    with pytest.raises(ModelError, match="'falcon' has attention classes of its own"):
        skeleton.build_skeleton(sample_config("falcon"), attention="hocket_paged")


def test_a_configuration_that_cannot_be_built(skeleton):
    with pytest.raises(ModelError, match="transformers"):
        skeleton.build_skeleton({**LLAMA, "num_attention_heads": "four"})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hidden_size": 100, "num_attention_heads": 3}, "The hidden size (100) is not a multiple"),
        ({"hidden_size": "wide"}, "Field 'hidden_size' expected int, got str (value: 'wide')"),
    ],
)
def test_a_configuration_is_refused_for_what_is_wrong_with_it(skeleton, values, said):
    with pytest.raises(ModelError) as error:
        skeleton.config_of({**LLAMA, **values})
    begin = "transformers rejects the model's configuration (llama): "
    assert error.value.message.startswith(begin + said)


def test_a_configuration_of_no_model(skeleton):
    with pytest.raises(ModelError, match=r"\(no model_type\): it has no 'model_type'"):
        skeleton.config_of({"hidden_size": 64})


def test_dimensions_are_those_of_transformers(skeleton):
    """What is read without transformers is what transformers builds."""
    for family, config in FAMILIES.items():
        built, sizes = skeleton.config_of(config), dimensions(config)
        assert sizes.num_layers == built.num_hidden_layers, family
        assert sizes.num_heads == built.num_attention_heads, family
        assert sizes.hidden_size == built.hidden_size, family
        assert sizes.vocab_size == built.vocab_size, family
        assert sizes.tied == built.tie_word_embeddings, family


def test_the_registry_reads_what_transformers_holds():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert registry.causal_classes() == dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert registry.defaults("llama").values["num_hidden_layers"] == 32
    assert registry.defaults("gemma3_text").values["head_dim"] == 256
    assert registry.defaults("bloom").aliases["num_attention_heads"] == "n_head"
