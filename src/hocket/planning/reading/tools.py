"""Readers: the key map of each tool, from its file to a layout's fields."""

from __future__ import annotations

from collections.abc import Callable

from hocket.planning.reading import deepspeed, huggingface, megatron, servers, torchtitan
from hocket.planning.reading.configuration import ToolConfiguration

READERS: dict[str, Callable[[str], ToolConfiguration]] = {
    "megatron": megatron.megatron,
    "megatron-bridge": megatron.megatron_bridge,
    "torchtitan": torchtitan.torchtitan,
    "torchtitan-0.2.2": torchtitan.torchtitan_toml,
    "torchtitan-python": torchtitan.torchtitan_python,
    "deepspeed": deepspeed.deepspeed,
    "accelerate": huggingface.accelerate,
    "automodel": huggingface.automodel,
    "vllm": servers.vllm,
    "sglang": servers.sglang,
}
"""By the names that `--emit` takes; `torchtitan-python` is the same tool as `torchtitan`."""
