"""Stacks: software whose constants estimate a step, each with its version, year and features.

The constants are `cost.constants`; here is which software they were fitted to, so that a plan made
with `--stack` never ranks a layout that this software does not have.
"""

from __future__ import annotations

import dataclasses

from hocket.planning.tools.deepspeed import LIMITS as DEEPSPEED
from hocket.planning.tools.limits import ToolLimits
from hocket.planning.tools.megatron import BRIDGE, MEGATRON_RULES
from hocket.planning.tools.megatron import LIMITS as MEGATRON
from hocket.planning.tools.torchtitan import OLD_LIMITS as TORCHTITAN
from hocket.spec.errors import OptionError, unknown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """A software stack.

    Attributes:
        name: of its constants, and as `--stack` takes it.
        software: what the constants were fitted to. years: of the published runs.
        limits: what it can run.
        tool: name of the tool that runs its layouts today; empty where this package writes none.
    """

    name: str
    software: str
    years: str
    limits: ToolLimits
    tool: str = ""

    @property
    def title(self) -> str:
        """For a person: `deepspeed: Megatron-DeepSpeed with DeepSpeed before 0.7 (2021-2022)`."""
        return f"{self.name}: {self.software} ({self.years})"


_DENSE = ("dp", "pp", "tp")

_MEGATRON_2021 = ToolLimits(
    software="Megatron-LM of 2021",
    axes=_DENSE,
    schedules=("1f1b", "interleaved"),
    zero=(0,),
    recompute=("none", "full"),
    sequence_parallel=(False,),
    any_split=False,
    rules=MEGATRON_RULES,
)
_MEGATRON_2022 = dataclasses.replace(
    _MEGATRON_2021,
    software="Megatron-LM of 2022",
    zero=(0, 1),
    recompute=("none", "selective", "full"),
    sequence_parallel=(False, True),
    shard=False,
)
_DEEPSPEED = dataclasses.replace(DEEPSPEED, software="DeepSpeed of 2022", axes=_DENSE, shard=False)
_FSDP = dataclasses.replace(TORCHTITAN, axes=("dp", "pp", "cp", "tp"))
_FSDP_ALONE = ToolLimits(
    software="llm-foundry",
    axes=("dp",),
    zero=(0, 2, 3),
    recompute=("none", "full"),
    sequence_parallel=(False,),
    precisions=("bf16", "fp32"),
    shard=False,
)
_MAXTEXT = ToolLimits(
    software="MaxText",
    axes=("dp", "cp", "tp", "ep"),
    zero=(0, 3),
    recompute=("none", "full"),
    precisions=("bf16", "fp32"),
)
_INTERNEVO = ToolLimits(
    software="InternEvo",
    axes=_DENSE,
    schedules=("1f1b", "interleaved"),
    zero=(0, 1),
    recompute=("none", "full"),
    precisions=("bf16", "fp16", "fp32"),
    any_split=False,
    rules=MEGATRON_RULES,
)
_MEGASCALE = dataclasses.replace(
    MEGATRON, software="MegaScale", axes=_DENSE, zero=(0, 1, 2), any_split=False,
    offload=("none",), precisions=("bf16", "fp16"), predictions=False,
)  # fmt: skip

STACKS: dict[str, Stack] = {
    stack.name: stack
    for stack in (
        Stack(
            name="megatron-core", software="Megatron-Core", years="2024-2026",
            limits=MEGATRON, tool="megatron",
        ),
        Stack(
            name="nemo", software="NeMo and Megatron-Bridge", years="2024-2026",
            limits=BRIDGE, tool="megatron-bridge",
        ),
        Stack(
            name="megatron", software="Megatron-LM of Narayanan et al. 2021", years="2021",
            limits=_MEGATRON_2021, tool="megatron",
        ),
        Stack(
            name="megatron-2022", software="Megatron-LM of Korthikanti et al. 2022", years="2022",
            limits=_MEGATRON_2022, tool="megatron",
        ),
        Stack(
            name="megascale", software="MegaScale (Jiang et al. 2024)", years="2024",
            limits=_MEGASCALE,
        ),
        Stack(
            name="deepspeed", software="Megatron-DeepSpeed, DeepSpeed before 0.7",
            years="2021-2022", limits=_DEEPSPEED, tool="deepspeed",
        ),
        Stack(
            name="fsdp", software="torchtitan and PyTorch FSDP2, eager", years="2024-2025",
            limits=_FSDP, tool="torchtitan-0.2.2",
        ),
        Stack(
            name="fsdp-compiled", software="torchtitan and PyTorch FSDP2 under torch.compile",
            years="2024-2025", limits=_FSDP, tool="torchtitan-0.2.2",
        ),
        Stack(
            name="fsdp-triton", software="llm-foundry: PyTorch FSDP, Triton attention",
            years="2023", limits=_FSDP_ALONE, tool="accelerate",
        ),
        Stack(name="jax", software="MaxText and Pax on JAX", years="2023-2025", limits=_MAXTEXT),
        Stack(name="internevo", software="InternEvo (Chen et al. 2024)", years="2024",
              limits=_INTERNEVO),
    )
}  # fmt: skip


ALIASES = {
    "torchtitan": "fsdp", "torchtitan-0.2.2": "fsdp", "automodel": "fsdp", "fsdp2": "fsdp",
    "megatron-bridge": "nemo", "megatron-lm": "megatron-core", "llm-foundry": "fsdp-triton",
    "maxtext": "jax",
}  # fmt: skip
"""Names of tools, to the stack whose constants were fitted to runs of them."""


def named_stack(name: str) -> Stack:
    """A stack by its name, or by that of a tool. Raises OptionError for an unknown one, with the
    nearest."""
    name = ALIASES.get(name.lower(), name)
    if name not in STACKS:
        message, hint = unknown("stack", name, STACKS)
        raise OptionError(f"--stack: {message}", hint=hint)
    return STACKS[name]
