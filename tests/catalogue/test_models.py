import pytest

from hocket.catalogue import models
from hocket.spec.errors import ModelError

REQUIRED = (
    "tiny-llama", "tiny-gpt2", "tiny-qwen3", "tiny-mixtral", "gpt2", "gpt3-175b", "llama-3-8b",
    "llama-3-70b", "llama-3.1-405b", "qwen3-32b", "mixtral-8x7b",
)  # fmt: skip


def test_every_promised_name_is_there_with_its_source():
    assert set(REQUIRED) <= set(models.model_names())
    for name in models.model_names():
        entry = models.entry(name)
        assert entry.config["model_type"]
        assert entry.source in models.model_note(name)


def test_laptop_models_come_first():
    first = [name for name in models.model_names() if name.startswith("tiny")]
    assert list(models.model_names()[: len(first)]) == first


def test_config_is_a_copy():
    models.config("gpt2")["vocab_size"] = 1
    assert models.config("gpt2")["vocab_size"] == 50257


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ModelError, match="unknown model 'llama3-8b'") as caught:
        models.config("llama3-8b")
    assert "llama-3-8b" in str(caught.value.hint)
