"""Quantization: how the weights of a checkpoint are stored in few bits, from its configuration.

Torch-free: a method or a variant of it that is not supported is rejected before anything starts.
`models.dequantized` reads the tensors.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hocket.spec.errors import ModelError
from hocket.spec.files import MALFORMED, parse_json

METHODS = (
    "fp8", "fbgemm_fp8", "mxfp4", "gptq", "awq", "bitsandbytes", "compressed-tensors",
)  # fmt: skip
"""Values of `quant_method` whose weights are read."""

_COMPRESSED = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")
_PACKED_BITS = (2, 4, 8)
_LARGEST_CONFIG = 8_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
    """One checkpoint's quantization.

    Attributes:
        method: one of `METHODS`.
        bits: of a packed weight. None: each tensor's dtype says so.
        block: rows and columns that share a scale, of fp8.
        zeros_less_one: zero points are stored less one (GPTQ's first format).
        offset: what is added to a packed value before it is stored (compressed-tensors).
    """

    method: str
    bits: int | None = None
    block: tuple[int, int] = (128, 128)
    zeros_less_one: bool = False
    offset: int = 0


def parse_quantization(
    name: str, config: Mapping[str, Any], base: Callable[[], str | None] = lambda: None
) -> Quantization | None:
    """The quantization of a model's weights; None where they are not quantized.

    Args:
        name: of the model, for messages.
        config: its Hugging Face configuration.
        base: gives the model that it was made from, if its card names one.

    Raises:
        ModelError: a method or a variant of one that is not supported.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else None

    def rejected(what: str) -> ModelError:
        original = base()
        return ModelError(
            f"the weights of {name} are quantized ({what}), which is not supported; read are "
            f"{', '.join(METHODS)}, and weights in fp32, bf16 or fp16",
            hint=f"the model that it was made from: {original}"
            if original
            else "the model that it was made from: its card names it",
        )

    if not isinstance(found, dict) or method not in METHODS:
        raise rejected(str(method) if method else "by no named method")
    if method == "fp8":
        block = found.get("weight_block_size") or [128, 128]
        if not _is_block(block):
            raise rejected(f"fp8 with weight_block_size {block!r:.40}")
        return Quantization(method=method, block=(block[0], block[1]))
    if method in ("gptq", "awq"):
        bits = found.get("bits", found.get("w_bit"))
        if bits not in _PACKED_BITS or (method == "awq" and bits != 4):
            raise rejected(f"{method} with {bits!r:.20} bits")
        if method == "awq":
            version = str(found.get("version", "gemm")).lower()
            if version != "gemm":
                raise rejected(f"awq in the layout {version!r:.20}")
            return Quantization(method=method, bits=bits)
        kind = found.get("checkpoint_format", "gptq")
        if kind not in ("gptq", "gptq_v2"):
            raise rejected(f"gptq in the format {kind!r:.20}")
        return Quantization(method=method, bits=bits, zeros_less_one=kind == "gptq")
    if method == "compressed-tensors":
        return _compressed(found, rejected)
    return Quantization(method=str(method))


def of_directory(directory: Path) -> Quantization | None:
    """The quantization of the weights in a directory; None where they, or it, say none.

    Raises:
        ModelError: as `parse_quantization`.
    """
    config = _config(directory)
    return parse_quantization(str(directory), config) if config else None


def stored_in(directory: Path) -> str:
    """The precision of the quantized weights in a directory: fp8, mxfp4, int8 or int4; empty where
    they are not quantized.

    Raises:
        ModelError: as `parse_quantization`.
    """
    how = of_directory(directory)
    if how is None:
        return ""
    config = _config(directory)
    found = config.get("quantization_config") or config["compression_config"]
    if how.method in ("fp8", "fbgemm_fp8"):
        return "fp8"
    if how.method == "mxfp4":
        return how.method
    if how.method == "bitsandbytes":
        return "int8" if found.get("load_in_8bit") else "int4"
    if how.method == "compressed-tensors" and how.bits is None:
        return "fp8" if '"float"' in json.dumps(found["config_groups"]) else "int8"
    return "int8" if how.bits == 8 else "int4"


def _config(directory: Path) -> dict[str, Any]:
    """A directory's configuration; empty where it cannot be read."""
    file = directory / "config.json"
    try:
        if file.stat().st_size > _LARGEST_CONFIG:
            return {}
        config = parse_json(file.read_text())
    except (OSError, *MALFORMED):
        return {}
    return config if isinstance(config, dict) else {}


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, list)
        and len(block) == 2
        and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in block)
    )


def _compressed(found: dict[str, Any], rejected: Callable[[str], ModelError]) -> Quantization:
    """Of compressed-tensors: one format and one number of bits for all groups of layers."""
    kind = found.get("format")
    if kind not in _COMPRESSED:
        raise rejected(f"compressed-tensors in the format {kind!r:.30}")
    groups = found.get("config_groups")
    weights = [
        group.get("weights") or {}
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict)
    ]
    bits = [w.get("num_bits") for w in weights if isinstance(w, dict)]
    numbers: set[Any] = {number if isinstance(number, int) else str(number) for number in bits}
    if len(numbers) != 1:
        raise rejected(f"compressed-tensors with {len(numbers)} numbers of bits")
    (own,) = numbers
    if kind != "pack-quantized":
        if own != 8:
            raise rejected(f"compressed-tensors, {kind} with {own!r:.20} bits")
        return Quantization(method="compressed-tensors")
    if own not in (4, 8):
        raise rejected(f"compressed-tensors, pack-quantized with {own!r:.20} bits")
    return Quantization(method="compressed-tensors", bits=own, offset=1 << (own - 1))


def storage_text(name: str) -> str:
    """How the weights of a quantized checkpoint are stored, in a line; empty of any other.

    Of a model of the Hub the listing is asked, not the weights.

    Raises:
        ModelError: as `models.source.resolve_model`.
    """
    from hocket.models import hub, repo_id
    from hocket.models.source import resolve_model
    from hocket.spec.units import format_bytes

    found = resolve_model(name, weights=False)
    how = None if found.directory is None else of_directory(found.directory)
    if how is None or found.directory is None:
        return ""
    sizes = [file.stat().st_size for file in found.directory.glob("*.safetensors")]
    repo = None if found.repo is None else repo_id.parse_repo(found.repo)
    if not sizes and repo is not None:
        listed = hub.listed(repo)
        sizes = [size for file, size in listed.items() if file.endswith(".safetensors")]
    bits = "" if how.bits is None else f" in {how.bits} bits"
    text = f"the weights are stored by {how.method}{bits}"
    if sizes:
        text += f", {format_bytes(sum(sizes))}"
    return text
