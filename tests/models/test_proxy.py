import pytest

from hocket.jobs.proxy import require_equal
from hocket.ranks.proxy import numbers
from hocket.ranks.proxy import trial as proxy
from hocket.spec.errors import ModelError
from hocket.spec.layout import Layout
from hocket.spec.proxy_verdict import ProxyVerdict, verdict_file
from tests.families import LLAMA
from tests.models.cases import stages_verdict
from tests.models.variants import VARIANTS


class Source:
    """A stand-in for a ModelSource: only these are read."""

    name = "mine"
    code = None

    def __init__(self, **config):
        self.config = config


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hocket" / "proxy-checks"


@pytest.mark.torch
@pytest.mark.parametrize("family", VARIANTS)
def test_families_that_must_pass_when_cut(family):
    assert stages_verdict(VARIANTS[family]) == ProxyVerdict(stages="")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("model_type", "words"),
    [("bloom", "computes attention itself")],
)
def test_models_that_pages_cannot_hold(model_type, words):
    from hocket.models.skeleton import config_of

    assert words in proxy.try_pages(config_of({"model_type": model_type}))


@pytest.mark.torch
def test_a_model_of_keys_and_values_can_be_served():
    from hocket.models.skeleton import config_of

    assert not proxy.try_pages(config_of(LLAMA))


@pytest.mark.torch
@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("zamba", "share"),  # one block that many layers share
        ("zaya", "hand on more"),  # its routers tell each other what they chose
        ("bert", "not causal"),
    ],
)
def test_families_that_break_in_silence_are_refused(model_type, words):
    found = stages_verdict({"model_type": model_type})
    assert not found.ok
    assert words in found.reason


@pytest.mark.torch
@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("llama", {}),
        ("deepseek_v3", {}),  # its first layers are dense
        ("mixtral", {"feed_forward": "not a mixture of experts"}),
        ("opt", {"feed_forward": "feed-forward module"}),  # linear layers of the layer itself
        ("bloom", {"cores": "cannot be recomputed by themselves"}),
    ],
)
def test_what_a_model_cannot_recompute(model_type, words):
    from hocket.models.skeleton import config_of

    found = proxy.try_recompute(config_of({"model_type": model_type}), "sdpa")
    assert {part for part, reason in found.items() if reason} == words.keys()
    for part, said in words.items():
        assert said in found[part]


@pytest.mark.torch
def test_a_proxy_keeps_switches_and_shrinks_sizes():
    from hocket.models.proxy import proxy_of
    from hocket.models.skeleton import config_of
    from hocket.models.source import resolve_model

    tiny = proxy_of(config_of(resolve_model("gemma-3-27b").config))
    assert tiny.layers == (0, 1, 5, 11)
    assert tiny.config.layer_types.count("full_attention") == 2
    assert (tiny.config.num_attention_heads, tiny.config.num_key_value_heads) == (4, 2)
    assert tiny.config.tie_word_embeddings
    model = tiny.build()
    assert sum(p.numel() for p in model.parameters()) < 1e6
    tiny = proxy_of(config_of({**LLAMA, "num_key_value_heads": 4, "attention_bias": True}))
    assert tiny.config.num_key_value_heads == 4
    assert tiny.config.attention_bias


@pytest.mark.torch
def test_streams_that_lie_side_by_side_are_handed_on():
    from hocket.models.plans import plan_for
    from hocket.models.samples import sample_config
    from hocket.models.skeleton import build_skeleton

    config = sample_config("qwen4_exp_text")
    assert stages_verdict(config) == ProxyVerdict(stages="")
    stages = plan_for(build_skeleton(config)).stages
    assert (stages.streams, stages.flat_streams) == (4, True)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("kind", "layers", "sizes"),
    [
        # Two layers of each kind, of which the second takes keys and values from earlier ones.
        ("gemma3n_text", (0, 4, 20, 24), {"num_kv_shared_layers": 2}),
        # Chunks that 16 tokens fill.
        ("bamba", (0, 1, 2, 3), {"mamba_chunk_size": 8, "mamba_n_heads": 8, "mamba_d_head": 16}),
        ("mamba2", (0, 1, 2, 3), {"chunk_size": 8, "num_heads": 8, "head_dim": 16}),
        # A list that says how many layers there are, where no number does.
        ("nemotron_h", (0, 1, 2, 3), {"num_hidden_layers": 4}),
    ],
)
def test_proxies_of_what_counts_in_its_own_way(kind, layers, sizes):
    from hocket.models.proxy import proxy_of
    from hocket.models.samples import sample_config
    from hocket.models.skeleton import config_of

    tiny = proxy_of(config_of(sample_config(kind)))
    assert tiny.layers == layers
    assert {name: getattr(tiny.config, name) for name in sizes} == sizes


@pytest.mark.torch
def test_a_proxy_keeps_what_differs_by_layer():
    from hocket.models.proxy import proxy_of
    from hocket.models.samples import sample_config
    from hocket.models.skeleton import config_of

    tiny = proxy_of(config_of(sample_config("dots3_note_text")))
    assert tiny.config.layer_types == ["indexed_attention"] * 2 + ["sliding_attention"] * 2
    heads, ranks = (
        [getattr(tiny.config.per_layer_config[i], name) for i in range(4)]
        for name in ("num_attention_heads", "kv_lora_rank")
    )
    assert heads == [4, 4, 2, 2]  # 128 and 64 in the real one
    assert ranks == [16, 16, 32, 32]  # 512 and 1024


def test_a_gradient_that_differs_is_drawn_once_more(monkeypatch):
    said = {}

    def trial(reasons):
        drawn = []

        def one(tiny, attention, *, index, degree, slices, draw, group):
            drawn.append(draw)
            return reasons[draw], ""

        monkeypatch.setattr(proxy, "_try_tensors", one)
        monkeypatch.setattr("hocket.models.proxy.proxy_of", lambda config: None)
        said[reasons], _ = proxy.try_tensors(None, "sdpa", index=0, degree=2)
        return drawn

    gradient = f"{numbers.GRADIENT} of w differs"
    assert trial(("", "")) == [0]
    assert trial(("the logits differ", "")) == [0]
    assert trial((gradient, "")) == [0, 1]
    assert trial((gradient, gradient)) == [0, 1]
    assert [*said.values()] == ["", "the logits differ", "", gradient]


SAMPLES = ("llama4_text", "inkling_text", "gemma3n_text", "gemma4_unified_text")
"""Experts that are given sorted tokens; a fused gate and up that no plan calls so; an MLP whose
units know of each other; heads that vary by layer."""


@pytest.mark.ranks
def test_two_ranks_split_every_family(ranks):
    from hocket.models.samples import sample_config

    samples = {kind: sample_config(kind) for kind in SAMPLES}
    results = ranks.run("tests.models.cases:tensors", 2, configs={**VARIANTS, **samples})
    assert results[0] == results[1]
    assert {name: reason for name, (reason, _) in results[0].items() if reason} == {}
    assert all(not results[0][family][1] for family in VARIANTS)


@pytest.mark.ranks
@pytest.mark.parametrize("texts", [["", ""], ["", "größer"], ["a longer one", "b"]])
def test_a_verdict_of_any_rank_is_heard_by_all(ranks, texts):
    assert ranks.run("tests.models.cases:said", world_size=2, texts=texts) == [texts, texts]


@pytest.mark.ranks
def test_a_head_that_gathers_what_is_whole_is_named(ranks):
    rembert = {
        "model_type": "rembert", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 320,
        "num_attention_heads": 4, "intermediate_size": 64, "input_embedding_size": 32,
        "output_embedding_size": 48, "is_decoder": True,
    }  # fmt: skip
    run = {"configs": {"rembert": rembert}, "slices": True}
    for reason, _ in (one["rembert"] for one in ranks.run("tests.models.cases:tensors", 2, **run)):
        assert reason == (
            "cls.predictions.decoder makes logits of 32 positions for 16 tokens: it gathers "
            "sequence shards, and is given whole sequences"
        )


@pytest.mark.ranks
def test_a_verdict_is_kept_and_refuses_by_name(ranks, cache):
    source = Source(**LLAMA)
    assert require_equal(ranks.launcher, source, Layout(dp=4), loss=False) == ProxyVerdict()
    assert not cache.exists()
    found = require_equal(ranks.launcher, source, Layout(pp=2, tp=2))
    assert found == ProxyVerdict(stages="", tensors="", loss="", shifts=True)
    assert len(list(cache.iterdir())) == 1
    assert require_equal(None, source, Layout(pp=2, tp=2)) == found
    # Another vocabulary is the same architecture.
    assert require_equal(None, Source(**{**LLAMA, "vocab_size": 99}), Layout(tp=2)).ok
    sliced = Layout(tp=2, sequence_parallel=True)
    found = require_equal(ranks.launcher, source, sliced)
    assert found == ProxyVerdict(stages="", tensors="", slices="", loss="", shifts=True)
    broken = Source(model_type="zamba")
    with pytest.raises(ModelError, match=r"mine \(zamba\) cannot be cut") as caught:
        require_equal(ranks.launcher, broken, Layout(dp=2, pp=2))
    assert caught.value.hint == "--layout dp2"


def test_a_broken_cache_is_tried_again(cache):
    cache.mkdir(parents=True)
    verdict_file(dict(LLAMA), "sdpa").write_text("{")
    with pytest.raises(AttributeError):  # no launcher: it would have started one
        require_equal(None, Source(**LLAMA), Layout(pp=2))


def test_a_loss_without_a_backward_is_rejected():
    from hocket.models.proxy import proxy_of
    from hocket.models.samples import sample_config
    from hocket.models.skeleton import config_of
    from hocket.ranks.proxy.loss import try_loss

    kind = "doge"  # a mixture's router scores are changed in place after they were used
    config = proxy_of(
        config_of(sample_config(kind) | {"is_moe": True, "norm_topk_prob": True})
    ).config
    reason, _ = try_loss(config, "sdpa")
    assert (
        "plain transformers cannot train its proxy model: it fails in its backward pass" in reason
    )


def test_a_tensor_outside_parameters_and_buffers_is_rejected():
    from hocket.models.proxy import proxy_of
    from hocket.models.samples import sample_config
    from hocket.models.skeleton import build_skeleton, config_of

    config = proxy_of(config_of(sample_config("trocr"))).config
    build_skeleton(config)
    config.use_learned_position_embeddings = False
    with pytest.raises(ModelError, match=r"embed_positions\.weights when it is built"):
        build_skeleton(config)
