"""Weights in 8 bits, before ranks start: which a model has, and where a check computes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hocket.spec.capabilities import CACHED, QUANTIZED, refused_cache
from hocket.spec.errors import ModelError, OptionError, unknown
from hocket.spec.layout import Layout
from hocket.spec.run import TrainOptions

if TYPE_CHECKING:
    from hocket.launch import Launcher
    from hocket.models.source import ModelSource


def require_known(quantization: str) -> None:
    """Raise OptionError for a quantization that there is not."""
    if quantization not in QUANTIZED:
        message, hint = unknown("quantization", str(quantization), QUANTIZED)
        raise OptionError(message, hint=f"--quantization fp8; {hint}" if hint else None)


def require_cached(
    kv_cache_dtype: str, dtype: str, config: Mapping[str, Any], *, cuda: bool,
    capability: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Raise OptionError for a cache that there is not, or that ranks of these devices cannot have.

    `capability`: of the GPU. None: this machine's, where it has one.
    """
    if kv_cache_dtype not in CACHED:
        message, hint = unknown("kv_cache_dtype", str(kv_cache_dtype), CACHED)
        raise OptionError(message, hint=f"--kv-cache-dtype fp8; {hint}" if hint else None)
    if cuda and capability is None and kv_cache_dtype == "fp8":
        from hocket.probing.devices import compute_capability

        capability = compute_capability()
    latent = config.get("kv_lora_rank") is not None
    why = refused_cache(
        kv_cache_dtype, cuda=cuda, dtype=dtype, latent=latent, capability=capability
    )
    if why is not None:
        raise OptionError(why, hint="--kv-cache-dtype auto")


def emulated_on_cpu(quantization: str, options: TrainOptions) -> TrainOptions:
    """The options of a check of this quantization, whose matmuls a CPU emulates.

    Raises:
        OptionError: a quantization that there is not, or a check on GPUs.
    """
    require_known(quantization)
    if options.device == "cuda":
        raise OptionError(
            "--quantization is checked in fp32, and matmuls of GPUs in 8 bits give bf16",
            hint="--device cpu, and hocket doctor --gpu for the kernels",
        )
    return dataclasses.replace(options, device="cpu")


def require_eight_bits(
    launcher: Launcher, source: ModelSource, layout: Layout
) -> dict[str, list[list[int]]]:
    """What the ranks of a replica store in 8 bits (`ranks.eight_bits`).

    Raises:
        ModelError: they cannot, with the reason and a layout in which they can, if there is one.
    """
    heard: list[dict[str, Any]] = []
    payload = {
        "config": source.config, "layout": str(layout),
        "code": None if source.code is None else str(source.code),
    }  # fmt: skip
    launcher.run("hocket.ranks.eight_bits:main", 1, payload, heard.append, startup_timeout=600.0)
    (found,) = (event for event in heard if event["event"] == "eight_bits")
    if "rejected" in found:
        raise ModelError(f"{source.name}: {found['rejected']}", hint=found["hint"])
    columns: dict[str, list[list[int]]] = found["columns"]
    return columns
