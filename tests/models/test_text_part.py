"""The command in a rejected multimodal model's hint saves the language model inside."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.models.source import resolve
from hocket.spec.errors import ModelError

pytestmark = pytest.mark.torch

TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 64, "vocab_size": 96,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip


def test_the_hint_saves_the_text_part_of_gemma_3(tmp_path: Path) -> None:
    import torch
    import transformers

    config = transformers.Gemma3Config(text_config=TEXT, vision_config=VISION)
    whole = transformers.Gemma3ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path / "seen")
    with pytest.raises(ModelError, match="not a text-only") as caught:
        resolve(str(tmp_path / "seen"))
    assert caught.value.hint is not None
    _, *arguments = shlex.split(caught.value.hint)
    subprocess.run([sys.executable, *arguments], cwd=tmp_path, check=True, timeout=100)

    made = tmp_path / "seen-text"
    assert resolve(str(made)).weights is not None
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        text = transformers.AutoModelForCausalLM.from_pretrained(made).eval()(ids).logits
        assert torch.equal(text, whole(ids).logits)
