"""Capabilities: what of a layout the runtime can carry out today.

One table. The runtime refuses by it, and the planner marks by it: what is proposed here and what
runs here cannot drift apart. A row is taken out when the runtime learns what it names.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hocket.spec.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capability:
    """One field of a layout that the runtime takes only some values of.

    Attributes:
        field: of `Layout`.
        runs: the values that run; the first one is what to fall back to.
        instead: what the runtime does instead of anything else, to be read after "this release".
    """

    field: str
    runs: tuple[Any, ...]
    instead: str

    def allows(self, layout: Layout) -> bool:
        """Whether the runtime can carry out this field of a layout."""
        return getattr(layout, self.field) in self.runs

    def reason(self, layout: Layout) -> str:
        """Why it cannot: the value, and what happens instead."""
        value = getattr(layout, self.field)
        text = str(value).lower() if isinstance(value, bool) else value
        text = "-".join(value) if isinstance(value, tuple) else text
        return f"{self.field} is {text}: this release {self.instead}"


class _ExpertState(Capability):
    """Hybrid sharding, which a layout with experts over ranks cannot have."""

    def allows(self, layout: Layout) -> bool:
        return not layout.splits_experts or layout.shard in (None, layout.dp)


TABLE = (
    Capability(
        field="etp",
        runs=(None, 1),
        instead="keeps each expert whole (etp1) or shards it over tp",
    ),
    _ExpertState(
        field="shard",
        runs=(None,),
        instead="shards the state of experts over all ranks that hold copies of them",
    ),
)
"""Fields that are not here run with any value that a layout can have."""

SERVING = (
    TABLE[0],
    Capability(field="zero", runs=(0,), instead="has no optimizer in a server"),
    Capability(field="shard", runs=(None,), instead="has no optimizer in a server"),
    Capability(field="offload", runs=("none",), instead="keeps weights of a server on its devices"),
    Capability(field="virtual_stages", runs=(1,), instead="serves with one stage a rank"),
    Capability(
        field="data_parallel", runs=("processes",), instead="serves each replica in processes"
    ),
    Capability(
        field="order", runs=(("tp", "cp", "dp", "pp"),), instead="serves with tp varying fastest"
    ),
    Capability(field="recompute", runs=("none",), instead="recomputes in training alone"),
    Capability(field="recompute_layers", runs=(None,), instead="recomputes in training alone"),
    Capability(
        field="sequence_parallel", runs=(False,), instead="keeps whole sequences between layers"
    ),
)
"""The same for a server. What a schedule says is nothing to it: it has no backward."""

PRECISIONS = ("bf16", "fp32")
"""Precisions that the runtime trains in on every device."""

TRAINED = ("fp32", "bf16", "fp8")
"""What a training run may ask for: fp8 where `refused_precision` finds nothing against it."""

CHECKED = ("fp32", "fp64")
"""What `hocket check` compares in: fp64 shows whether a difference in fp32 is rounding."""

GRADIENTS = ("fp32", "bf16")
"""In which gradients may be kept and summed."""

FP8_CAPABILITY = (8, 9)
"""CUDA compute capability from which on 8-bit float matmuls run (Ada, Hopper, Blackwell)."""


def refused_precision(
    dtype: str,
    *,
    cuda: bool,
    capability: tuple[int, int] | None = None,
    library: bool = True,
    halved: bool = False,
) -> str | None:
    """Why a rank cannot compute in `dtype`; None: it can.

    Args:
        dtype: one of `TRAINED`.
        cuda: whether ranks have CUDA devices. capability: theirs, None where not known yet.
        library: whether torchao is installed, which multiplies in fp8.
        halved: whether the schedule puts weight gradients off (I and W).
    """
    if dtype != "fp8":
        return None
    if not cuda:
        return (
            "dtype is fp8: CPU cores have no 8-bit float matmuls; they need a GPU of compute "
            "capability 8.9 or higher (Ada, Hopper, Blackwell)"
        )
    if capability is not None and capability < FP8_CAPABILITY:
        have, need = (".".join(map(str, pair)) for pair in (capability, FP8_CAPABILITY))
        return (
            f"dtype is fp8: this GPU has the compute capability {have}; 8-bit float matmuls "
            f"take {need} or higher (Ada, Hopper, Blackwell)"
        )
    if not library:
        return "dtype is fp8: its matmuls need torchao, which is not installed"
    if halved:
        return (
            "dtype is fp8: the schedule defers weight gradients, which torchao computes "
            "together with the input's"
        )
    return None


QUANTIZED = ("fp8",)
"""How a server may store the linear layers and the experts of a model's blocks."""

MULTIPLE_OF_8_BITS = 16
"""Both sides of a matrix are divisible by it on a rank, or it keeps its precision (the rule of
`torch.nn.functional.scaled_mm` and of its grouped form on CUDA)."""

STACKED = ("gate_up_proj", "up_proj", "down_proj")
"""The matrices of stacked experts, as transformers' own computation of them names them."""

NOT_QUANTIZED = ("gate", "router", "shared_expert_gate", "kv_b_proj")
"""Linear layers that keep their precision: a router's small errors change which expert is asked,
and up-projections of latent attention are read as they are."""


def refused_quantization(
    quantization: str | None,
    *,
    cuda: bool,
    dtype: str,
    capability: tuple[int, int] | None = None,
) -> str | None:
    """Why ranks cannot serve weights that are stored so; None: they can.

    Args:
        quantization: one of `QUANTIZED`, or None.
        cuda: whether ranks have CUDA devices. capability: theirs, None where not known yet.
        dtype: of all that is not quantized.
    """
    if quantization is None:
        return None
    if not cuda:
        return (
            "quantization is fp8: CPU cores have no 8-bit float matmuls; they need a GPU of "
            "compute capability 8.9 or higher (Ada, Hopper, Blackwell)"
        )
    if dtype != "bf16":
        return f"quantization is fp8: its matmuls give bf16, and dtype is {dtype}"
    if capability is not None and capability < FP8_CAPABILITY:
        have, need = (".".join(map(str, pair)) for pair in (capability, FP8_CAPABILITY))
        return (
            f"quantization is fp8: this GPU has the compute capability {have}; 8-bit float "
            f"matmuls take {need} or higher (Ada, Hopper, Blackwell)"
        )
    return None


CACHED = ("auto", "bf16", "fp8")
"""In which a server may keep keys and values; auto: in the precision that it computes in."""


def refused_cache(
    kv_cache_dtype: str,
    *,
    cuda: bool,
    dtype: str,
    latent: bool = False,
    capability: tuple[int, int] | None = None,
) -> str | None:
    """Why ranks cannot keep keys and values so; None: they can.

    Args:
        kv_cache_dtype: one of `CACHED`.
        cuda: whether ranks have CUDA devices. capability: theirs, None where not known yet.
        dtype: of the server. latent: whether layers keep latent vectors (MLA).
    """
    if kv_cache_dtype == "bf16" and (dtype != "bf16" or not cuda):
        return (
            "kv_cache_dtype is bf16: keys and values are cached in the precision that attention "
            f"computes in, which is fp32 {'with --dtype fp32' if cuda else 'on a CPU'}, or in fp8"
        )
    if kv_cache_dtype != "fp8":
        return None
    if latent:
        return (
            "kv_cache_dtype is fp8: layers of this model cache latent vectors (MLA), which matmuls "
            "in the model's precision read, and which take less than a tenth of keys and values"
        )
    if cuda and dtype == "fp32":
        return "kv_cache_dtype is fp8: the attention kernel converts it to bf16, and dtype is fp32"
    if cuda and capability is not None and capability < FP8_CAPABILITY:
        have, need = (".".join(map(str, pair)) for pair in (capability, FP8_CAPABILITY))
        return (
            f"kv_cache_dtype is fp8: this GPU has the compute capability {have}; the attention "
            f"kernel converts 8-bit floats from {need} on (Ada, Hopper, Blackwell)"
        )
    return None


PINNED_SHARE = 0.5
"""Share of a machine's memory that offloaded activations may take, of all its GPUs together; what
goes beyond it stays on the device."""

OFFLOADED_BYTES = 1 << 16
"""Tensors smaller than this stay on the device where activations are offloaded: a copy has a cost
of its own."""


def refused_offload(layout: Layout, *, cuda: bool) -> str | None:
    """Why ranks cannot keep in host memory what a layout says; None: they can."""
    if not layout.offloads("activations"):
        return None
    if not cuda:
        return "offload is activations: the activations of CPU ranks are already in host memory"
    if layout.recompute == "full":
        return (
            "offload is activations, recompute is full: a recomputed layer saves its input alone, "
            "which stays on the device"
        )
    return None


def absent(layout: Layout, *, serving: bool = False) -> list[Capability]:
    """The rows of the table that keep a layout from running here; empty if it runs.

    `serving`: from being served, instead of trained in.
    """
    return [row for row in (SERVING if serving else TABLE) if not row.allows(layout)]


def runs(layout: Layout) -> bool:
    """Whether the runtime can carry out a layout."""
    return not absent(layout)


def runnable(layout: Layout) -> Layout:
    """The layout with every field that the runtime lacks set to what it falls back to."""
    fields = {row.field: row.runs[0] for row in absent(layout)}
    if "etp" in fields:
        fields["etp"] = 1  # divides whatever ep x etp divides, as tp may not
    return dataclasses.replace(layout, **fields)
