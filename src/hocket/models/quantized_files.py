"""Quantized files: which tensors of a checkpoint make up which weight of the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import torch

from hocket.models.dequantized import BlockScaled, Dequantized, FourBit, Mxfp4
from hocket.models.disk_tensor import QUANTIZED_DTYPES, DiskTensor
from hocket.models.packed_words import Grouped, Packed
from hocket.models.quantization import Quantization
from hocket.models.weight_headers import printable_key
from hocket.spec.errors import WeightsError
from hocket.spec.tensor_file import TensorFile

# Scales of activations and of key/value caches in few bits: nothing here computes in those.
_UNUSED = (
    ".input_scale", ".activation_scale", ".input_zero_point", ".output_scale", ".k_scale",
    ".v_scale", ".input_scale_ub", ".weight_format", ".input_global_scale",
)  # fmt: skip


# What may be stored with a weight, and says nothing that its values need.
_DESCRIBE = ("_shape", "_zero_point", "_g_idx", "_scale")


def tensors(
    where: Mapping[str, TensorFile], quantization: Quantization
) -> tuple[dict[str, Dequantized], set[str]]:
    """The quantized weights of a checkpoint by the names the model has them under, and the files'
    names that they, and nothing else, are made of.

    Raises:
        WeightsError: a weight whose tensors do not fit each other, or one of them is absent.
    """
    made: dict[str, Dequantized] = {}
    used = {key for key in where if key.endswith(_UNUSED)}

    def disk(key: str) -> DiskTensor:
        if key not in where:
            raise WeightsError(f"the weights are quantized, and {printable_key(key)} is absent")
        if where[key].entries[key].dtype not in QUANTIZED_DTYPES:
            raise WeightsError(f"{printable_key(key)} has dtype {where[key].entries[key].dtype}")
        return DiskTensor(where[key], key)

    def optional(key: str) -> DiskTensor | None:
        return disk(key) if key in where else None

    for key in where:
        found = _one(key, quantization, disk, optional)
        if found is not None:
            name, tensor = found
            made[name] = tensor
            used.update((key, *tensor.keys))
            used.update(one for suffix in _DESCRIBE if (one := f"{name}{suffix}") in where)
    return made, used


def _one(
    key: str,
    quantization: Quantization,
    disk: Callable[[str], DiskTensor],
    optional: Callable[[str], DiskTensor | None],
) -> tuple[str, Dequantized] | None:
    """The weight that begins with the tensor of that name, if one does."""
    stem, _, last = key.rpartition(".")
    method, bits = quantization.method, quantization.bits
    if method in ("gptq", "awq"):
        if last != "qweight":
            return None
        assert bits is not None
        return f"{stem}.weight", Grouped(
            stem, bits, disk(key), qzeros=disk(f"{stem}.qzeros"), scales=disk(f"{stem}.scales"),
            g_idx=optional(f"{stem}.g_idx"), awq=method == "awq",
            zeros_less_one=quantization.zeros_less_one,
        )  # fmt: skip
    if method == "mxfp4":
        if not key.endswith("_blocks"):
            return None
        name = key.removesuffix("_blocks")
        return name, Mxfp4(disk(key), disk(f"{name}_scales"))
    if method == "bitsandbytes":
        return _of_bitsandbytes(key, disk, optional)
    if last == "weight_packed" and bits is not None:
        shape = tuple(int(n) for n in disk(f"{stem}.weight_shape").whole().flatten()[:2].tolist())
        return f"{stem}.weight", Packed(
            bits, quantization.offset, shape, disk(key), scale=disk(f"{stem}.weight_scale"),
            zero=optional(f"{stem}.weight_zero_point"), g_idx=optional(f"{stem}.weight_g_idx"),
        )  # fmt: skip
    scale = optional(f"{key}_scale_inv") or optional(f"{key}_scale")
    if scale is None:
        return None
    weight = disk(key)
    if weight.dtype.itemsize != 1:
        return None
    return key, BlockScaled(weight, scale, quantization.block, zero=optional(f"{key}_zero_point"))


def _of_bitsandbytes(
    key: str, disk: Callable[[str], DiskTensor], optional: Callable[[str], DiskTensor | None]
) -> tuple[str, Dequantized] | None:
    stem, _, last = key.rpartition(".")
    if last == "SCB":
        return f"{stem}.weight", BlockScaled(disk(f"{stem}.weight"), disk(key), factor=1 / 127)
    name, marked, _ = key.partition(".quant_state.bitsandbytes__")
    if not marked:
        return None
    try:
        state = json.loads(bytes(disk(key).whole().to(torch.uint8).tolist()))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise WeightsError(f"{printable_key(key)} does not hold a JSON object")
    most = optional(f"{name}.nested_absmax")
    nested = None if most is None else (most, disk(f"{name}.nested_quant_map"))
    return name, FourBit(
        state, disk(name), disk(f"{name}.absmax"), disk(f"{name}.quant_map"), nested
    )
