"""Adapters: what `--lora-targets` and `--quantize-base` ask of the model, compared with the layers
of each pipeline rank before ranks start; and how much of a model they leave to train, in words.

Names need the model, and so torch: one process of the warm server looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hocket.spec.units import format_count

if TYPE_CHECKING:
    from hocket.launch import Launcher
    from hocket.spec.model_shape import ModelShape
    from hocket.spec.run import RunSpec


def adapted_layers(launcher: Launcher, spec: RunSpec, schedule: str) -> int:
    """How many layers a run with LoRA adapts; 0 of any other.

    Args:
        schedule: its text.

    Raises:
        OptionError, ModelError: targets that name nothing, or no linear layers.
        LayoutError: a stage without any of them; a shard that cannot be stored in 4 bits.
    """
    if spec.options.lora_rank is None:
        return 0
    found: list[int] = []
    payload = {"spec": spec.to_json(), "schedule": schedule}

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "adapters":
            found.append(int(event["layers"]))

    launcher.run("hocket.ranks.adapters:main", 1, payload, hear)
    return found[-1]


def adapter_text(shape: ModelShape) -> tuple[str, ...]:
    """How much of an adapted model is trained, in words; nothing of a whole one."""
    if not any(w.frozen for w in shape.blocks["head"].weights):
        return ()
    trained, whole = format_count(shape.num_trained), format_count(shape.num_parameters)
    return (f"LoRA: {trained} parameters are trained; {whole} are frozen.",)
