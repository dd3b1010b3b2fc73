"""What is asked of generation, and what is refused before any rank starts. Never imports torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hocket.spec.errors import LayoutError, OptionError
from hocket.spec.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: tokens per prompt.
        temperature: 0 takes the likeliest token; above, logits are divided by it.
        top_k: draw among the k likeliest tokens. None: among all.
        top_p: draw among the likeliest tokens that together reach this probability (nucleus
            sampling, Holtzman et al. 2020). None: among all.
        seed: of the draws.
        stop: token ids that end a row.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise OptionError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise OptionError(f"temperature is {self.temperature}; it must be 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise OptionError(f"top_k is {self.top_k}; it must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise OptionError(f"top_p is {self.top_p}; it must be above 0 and at most 1")


def refuse_replicas(layout: Layout) -> None:
    """Raise LayoutError for a layout that generation has no use for."""
    if layout.dp > 1 or layout.cp > 1:
        rest = [f"{a}{layout.degree(a)}" for a in ("pp", "tp") if layout.degree(a) > 1]
        raise LayoutError(
            f"generate splits one model over tp and pp; the layout is {layout.axes_text()}, "
            "and replicas would only repeat the same tokens",
            hint=f"--layout {'.'.join(rest) or 'dp1'}",
        )


def check_prompts(
    prompts: Sequence[Sequence[int]], options: Sampling, vocab_size: int, positions: int | None
) -> None:
    """Raise OptionError for prompts that cannot be continued."""
    if not prompts:
        raise OptionError("there is no prompt", hint='--prompt "def add(a, b):"')
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise OptionError(f"prompt {row} is empty: the model needs at least one token")
        for token in prompt:
            if not 0 <= token < vocab_size:
                raise OptionError(
                    f"prompt {row} holds token {token}; the model's vocabulary has {vocab_size}"
                )
    longest = max(map(len, prompts))
    if positions is not None and longest + options.max_new_tokens > positions:
        room = positions - longest
        raise OptionError(
            f"a prompt of {longest} tokens and {options.max_new_tokens} new ones need "
            f"{longest + options.max_new_tokens} positions; the model has {positions}",
            hint=f"--max-new-tokens {room}" if room > 0 else "a shorter prompt",
        )
