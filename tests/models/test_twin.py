import pytest

from hocket.jobs import twin
from hocket.spec.errors import ModelError
from hocket.spec.layout import Layout
from tests.families import LLAMA
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
    return tmp_path / "hocket" / "twins"


@pytest.mark.torch
@pytest.mark.parametrize("family", VARIANTS)
def test_families_that_must_pass_when_cut(family):
    assert twin.verdict(VARIANTS[family]) == twin.Verdict(stages="")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("model_type", "words"),
    [("mamba", "MambaModel keeps a recurrent state"), ("bloom", "computes attention itself")],
)
def test_models_that_pages_cannot_hold(model_type, words):
    from hocket.models.skeleton import config_of

    assert words in twin.try_pages(config_of({"model_type": model_type}))


@pytest.mark.torch
def test_a_model_of_keys_and_values_can_be_served():
    from hocket.models.skeleton import config_of

    assert not twin.try_pages(config_of(LLAMA))


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
    found = twin.verdict({"model_type": model_type})
    assert not found.ok
    assert words in found.reason


@pytest.mark.torch
def test_a_twin_keeps_switches_and_shrinks_sizes():
    from hocket.models.skeleton import config_of
    from hocket.models.source import resolve
    from hocket.models.twin import twin_of

    tiny = twin_of(config_of(resolve("gemma-3-27b").config))
    assert tiny.layers == (0, 1, 5, 11)
    assert tiny.config.layer_types.count("full_attention") == 2
    assert (tiny.config.num_attention_heads, tiny.config.num_key_value_heads) == (4, 2)
    assert tiny.config.tie_word_embeddings
    model = tiny.build()
    assert sum(p.numel() for p in model.parameters()) < 1e6
    tiny = twin_of(config_of({**LLAMA, "num_key_value_heads": 4, "attention_bias": True}))
    assert tiny.config.num_key_value_heads == 4
    assert tiny.config.attention_bias


@pytest.mark.ranks
def test_two_ranks_split_every_family(ranks):
    results = ranks.run("tests.models.cases:tensors", 2, configs=VARIANTS)
    assert results[0] == results[1] == {family: ["", ""] for family in VARIANTS}


@pytest.mark.ranks
@pytest.mark.parametrize("texts", [["", ""], ["", "größer"], ["a longer one", "b"]])
def test_a_verdict_of_any_rank_is_heard_by_all(ranks, texts):
    assert ranks.run("tests.models.cases:said", world_size=2, texts=texts) == [texts, texts]


@pytest.mark.ranks
def test_a_verdict_is_kept_and_refuses_by_name(ranks, cache):
    source = Source(**LLAMA)
    assert twin.require(ranks.launcher, source, Layout(dp=4)) == twin.Verdict()
    assert not cache.exists()
    found = twin.require(ranks.launcher, source, Layout(pp=2, tp=2))
    assert found == twin.Verdict(stages="", tensors="")
    assert len(list(cache.iterdir())) == 1
    assert twin.require(None, source, Layout(pp=2, tp=2)) == found
    # Another vocabulary is the same architecture.
    assert twin.require(None, Source(**{**LLAMA, "vocab_size": 99}), Layout(tp=2)).ok
    sliced = Layout(tp=2, sequence_parallel=True)
    found = twin.require(ranks.launcher, source, sliced)
    assert found == twin.Verdict(stages="", tensors="", slices="")
    broken = Source(model_type="zamba")
    with pytest.raises(ModelError, match=r"mine \(zamba\) cannot be cut") as caught:
        twin.require(ranks.launcher, broken, Layout(dp=2, pp=2))
    assert caught.value.hint == "dp2"


def test_a_broken_cache_is_tried_again(cache):
    cache.mkdir(parents=True)
    twin._cache_file(dict(LLAMA), "sdpa").write_text("{")
    with pytest.raises(AttributeError):  # no launcher: it would have started one
        twin.require(None, Source(**LLAMA), Layout(pp=2))
