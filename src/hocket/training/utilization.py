"""Utilization: the share of a GPU's peak that a model's arithmetic uses (MFU).

Floating-point operations of one trained token, as in PaLM (Chowdhery et al. 2022, appendix B):
6 N + 12 L H S, where N counts the parameters that a token is multiplied with (no embedding table,
of experts only those that are active), L layers of hidden size H attend over S tokens. Nothing is
added for recomputation, and nothing taken off for the causal half.
"""

from __future__ import annotations

import itertools
import re

from torch import nn

PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    ("B200", 2250e12),  # NVIDIA Blackwell architecture brief, HGX B200, dense
    ("GH200", 989.4e12),  # NVIDIA GH200 data sheet
    ("H200", 989.4e12),  # NVIDIA H200 data sheet (SXM)
    ("H100 NVL", 835.5e12),  # NVIDIA H100 data sheet, NVL
    ("H100 PCIE", 756.0e12),  # NVIDIA H100 data sheet, PCIe
    ("H100", 989.4e12),  # NVIDIA H100 data sheet, SXM
    ("H800", 989.4e12),  # as H100 SXM
    ("A100", 312e12),  # NVIDIA A100 data sheet
    ("A800", 312e12),  # as A100
    ("L40S", 362.05e12),  # NVIDIA L40S data sheet
    ("L4", 121e12),  # NVIDIA L4 data sheet
    ("A10", 125e12),  # NVIDIA A10 data sheet
    ("A40", 149.7e12),  # NVIDIA A40 data sheet
    ("RTX 4090", 165.2e12),  # NVIDIA Ada architecture paper, FP32 accumulate
    ("RTX 3090", 71e12),  # NVIDIA GA102 architecture paper, FP32 accumulate
)
"""GPU name to dense bf16 operations a second; the first whose words the device's name all has."""


def peak_flops(device_name: str) -> float | None:
    """Peak dense bf16 operations a second of a GPU by its name, None where it is not known."""
    words = set(re.findall(r"[A-Z0-9]+", device_name.upper()))
    return next((peak for name, peak in PEAK_FLOPS if words >= set(name.split())), None)


def flops_per_token(skeleton: nn.Module, seq_len: int) -> float:
    """Operations of one trained token of a whole model (it may lie on the meta device)."""
    config = getattr(skeleton, "config", None)
    layers = int(getattr(config, "num_hidden_layers", 0) or getattr(config, "n_layer", 0))
    hidden = int(getattr(config, "hidden_size", 0) or getattr(config, "n_embd", 0))
    heads = int(getattr(config, "num_attention_heads", 0) or getattr(config, "n_head", 0))
    head_dim = getattr(config, "head_dim", None)
    width = heads * int(head_dim) if heads and head_dim else hidden
    return 6.0 * multiplied_parameters(skeleton) + 12.0 * layers * width * seq_len


def multiplied_parameters(skeleton: nn.Module) -> float:
    """Parameters that one token is multiplied with."""
    config = getattr(skeleton, "config", None)
    experts = 0
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        experts = experts or int(getattr(config, name, 0) or 0)
    active = int(getattr(config, "num_experts_per_tok", 0) or 0)
    tables = {
        id(module.weight) for module in skeleton.modules() if isinstance(module, nn.Embedding)
    }
    heads = {id(m.weight) for m in skeleton.modules() if isinstance(m, nn.Linear)}
    total = 0.0
    for name, parameter in skeleton.named_parameters():
        if id(parameter) in tables and id(parameter) not in heads:
            continue
        share = 1.0
        stacked = parameter.ndim == 3 and parameter.shape[0] == experts
        if experts and active and (stacked or _is_one_expert(name)):
            share = active / experts
        total += share * parameter.numel()
    return total


def _is_one_expert(name: str) -> bool:
    """`...experts.7.w1.weight` is one of many experts; `shared_experts` are always active."""
    parts = name.split(".")
    return any(a == "experts" and b.isdigit() for a, b in itertools.pairwise(parts))
