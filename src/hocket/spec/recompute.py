"""Recompute: which activations are made again in backward, as text, as modules and as a number.

    none         nothing
    full         each layer runs again, from its input
    A+B+...      modules of each layer, any of `MODULES`
    selective    `core_attn` alone: frees scores and probabilities, which only exist where attention
                 is no fused kernel
    modules      `norm+activation+mla_up`, by its old name

The modules are of those of Megatron-Core's --recompute-modules; its `layernorm` and `moe_act` are
`norm` and `activation` here, which go for dense layers as well. Its `moe` and `shared_experts` are
not among them: of a mixture of experts `mlp` runs nothing again, as there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hocket.spec.errors import LayoutError, unknown

MODULES = ("core_attn", "norm", "activation", "mla_up", "mlp")
"""core_attn   scores and probabilities (Korthikanti et al. 2022, section 5)
norm          norms: of each its input stays, not its output nor what it saves
activation    activation functions and gates of feed-forward layers and experts: what matmuls
              returned stays
mla_up        queries, keys and values projected up from latent vectors (MLA), which stay
mlp           feed-forward layers that are no mixture of experts: of each its input stays;
              `activation` is then left to the experts
"""

MADE_AGAIN = MODULES[1:]
"""Those outside the attention core."""

RECIPES = ("norm", "activation", "mla_up")
"""Those whose results are saved by others, too, which get a recipe in place of them."""

MEGATRON = {
    "core_attn": "core_attn", "norm": "layernorm", "activation": "moe_act",
    "mla_up": "mla_up_proj", "mlp": "mlp",
}  # fmt: skip
"""Each module's name in Megatron-Core's --recompute-modules."""

BITS = {"core_attn": 1, "full": 2, "norm": 4, "activation": 8, "mla_up": 16, "mlp": 32}
"""Of the number that stands for a value in arrays of layouts."""

CHEAP = "norm+activation+mla_up"
"""What is made again by operations bound by memory, and MLA's up-projections."""

NAMES = {"none": (), "selective": ("core_attn",), "modules": tuple(CHEAP.split("+"))}

CHOICES = ("none", "selective", "full", CHEAP)
"""What the planner evaluates, unless another value is pinned."""

FEED_FORWARD_CLASS = re.compile(r".*(mlp|ffn|feedforward|moe|moeblock|experts?)", re.IGNORECASE)
"""How the classes of feed-forward layers and layers of experts are named."""

NO_FEED_FORWARD = (
    "no layer of the model has a feed-forward module (mlp) that is not a mixture of experts"
)

_EXPERTS = re.compile(r".*(moe|moeblock|experts?)", re.IGNORECASE)


def is_dense(classes: Sequence[str]) -> bool:
    """Whether a module is a feed-forward layer and no mixture of experts, by the names of its own
    class, which is the first, and of those of the modules in it."""
    feeds = FEED_FORWARD_CLASS.fullmatch(classes[0]) is not None
    return feeds and not any(_EXPERTS.fullmatch(name) for name in classes)


def choices(latent: bool) -> tuple[str, ...]:
    """`CHOICES` of a model with latent attention (MLA), or without it."""
    return CHOICES if latent else (*CHOICES[:-1], "norm+activation")


def parse(text: str) -> str:
    """The one text of a value. Raises LayoutError."""
    if text == "full":
        return text
    asked = NAMES.get(text, tuple(text.split("+")))
    for one in asked:
        if one not in MODULES:
            words = ("none", "selective", "full", *MODULES)
            message, hint = unknown("recompute", text if "+" not in text else one, words)
            raise LayoutError(message, hint=hint)
    return name(sum(BITS[one] for one in dict.fromkeys(asked)))


def modules(text: str) -> tuple[str, ...]:
    """The modules of a value, in the order of `MODULES`; of none and full: none."""
    return () if text in ("none", "full") else NAMES.get(text, tuple(text.split("+")))


def rejected(
    text: str, *, cores: bool, feed_forward: bool, why: str = "its attention is code of its own"
) -> str:
    """Why the layers of a model cannot be recomputed so; empty: they can.

    Args:
        cores: whether it has attention cores that can run by themselves; why: the reason if not.
        feed_forward: whether it has feed-forward layers that are no mixtures of experts.
    """
    asked = modules(text)
    if "core_attn" in asked and not cores:
        return f"attention cores cannot be recomputed by themselves: {why}"
    return NO_FEED_FORWARD if "mlp" in asked and not feed_forward else ""


def repeats_sums(text: str) -> bool:
    """Whether backward repeats matmuls whose inputs or outputs tensor ranks gather or sum."""
    return text == "full" or "mlp" in modules(text)


def code(text: str) -> int:
    """The number of a value."""
    return BITS["full"] if text == "full" else sum(BITS[one] for one in modules(text))


def name(number: float) -> str:
    """The inverse of `code`."""
    bits = int(number)
    if bits == BITS["full"]:
        return "full"
    found = tuple(one for one in MODULES if bits & BITS[one])
    return {(): "none", NAMES["selective"]: "selective"}.get(found, "+".join(found))
