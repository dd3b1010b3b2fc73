"""LoRA's targets: those that an adapter has are those that peft adapts when it loads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("peft")
torch = pytest.importorskip("torch")

from hocket.models.lora import peft_config, targets_of  # noqa: E402
from hocket.models.skeleton import build_skeleton  # noqa: E402
from hocket.spec.errors import ModelError  # noqa: E402
from hocket.spec.run import TrainOptions  # noqa: E402
from tests.families import EXPERTS  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("kind", EXPERTS)
def test_an_adapter_of_a_mixture_is_what_peft_adapts_or_rejected(kind: str) -> None:
    from peft import get_peft_model

    model = build_skeleton(EXPERTS[kind])
    options = TrainOptions(lora_rank=2)
    dense = any(name.endswith(".down_proj") for name, _ in model.named_modules())
    if dense:  # shared experts, or layers without a router
        with pytest.raises(ModelError, match="gate_proj, up_proj, down_proj of") as error:
            targets_of(model, None)
        options = TrainOptions(lora_rank=2, lora_targets=str(error.value.hint).split()[1])
    names = targets_of(model, options.lora_targets)
    adapted = get_peft_model(model, peft_config(model, options))
    thin = [name for name, _ in adapted.named_parameters() if ".lora_A" in name]
    found = {name.partition(".lora_A")[0] for name in thin}
    assert found == {f"base_model.model.{name}" for name in names}
    assert dense == (kind in ("qwen3_moe", "deepseek_v3"))


def test_peft_brings_no_kernel_of_the_hub_and_no_warning(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text("print('imported')")
    code = "from hocket.models import lora; lora.peft_model"
    code += "\nwith lora.plain_bitsandbytes():\n    import peft"
    search = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    assert "kernels" not in done.stderr
