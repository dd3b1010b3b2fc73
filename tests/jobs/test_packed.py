"""Documents that share a row do not see each other: shown on a family's proxy model, or refused."""

from __future__ import annotations

import pytest

from hocket.doctor.families import FLEXIBLE
from tests.families import FAMILIES

pytestmark = pytest.mark.torch

SEEING = {"bloom": "differ", "mamba": "differ", "opt": "differ", "gpt_oss": "differ"}
OTHERS = {
    "mamba": {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64},
    "gemma2": {"model_type": "gemma2", "num_hidden_layers": 2},
    # Its model passes no positions to its masks.
    "gpt_oss": FLEXIBLE["gpt_oss"],
    "qwen2_moe": {"model_type": "qwen2_moe", "num_hidden_layers": 2},
}


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_a_row_of_documents_is_its_documents_or_is_refused(family: str) -> None:
    from hocket.models.skeleton import config_of
    from hocket.ranks.proxy.packed import try_packed

    config = config_of({**FAMILIES, **OTHERS}[family], dropout=0.0)
    reason = try_packed(config, "sdpa")
    assert bool(reason) == (family in SEEING), reason
    assert SEEING.get(family, "") in reason


def test_an_eager_attention_keeps_them_apart_too() -> None:
    from hocket.models.skeleton import config_of
    from hocket.ranks.proxy.packed import try_packed

    assert try_packed(config_of(FAMILIES["gemma3"], dropout=0.0), "eager") == ""


def test_attention_across_documents_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    from hocket.models.skeleton import config_of
    from hocket.ranks.proxy.packed import try_packed

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)
    reason = try_packed(config_of(FAMILIES["llama"], dropout=0.0), "sdpa")
    assert "logits of its tiny proxy model differ" in reason
