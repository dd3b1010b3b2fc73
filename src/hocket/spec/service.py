"""Service: the requests that a model is asked to answer, and how soon: a Workload of serving.

TTFT   time to first token: from a request's arrival to its first token, waiting included
TPOT   time per output token: from the first token to the last, over the tokens between
"""

from __future__ import annotations

import dataclasses
import math

from hocket.spec.errors import OptionError

MOST_REQUESTS = 10**6
"""A second: what is more is a slip of the pen."""

PERCENTILES = (50, 90, 99)
"""Percentiles of latency that are simulated and that a goal can be set for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
    """Requests and their goals.

    Attributes:
        prompt_len: tokens of a prompt.
        output_len: tokens of an answer.
        requests_per_second: mean rate of requests, which arrive independently (Poisson).
        ttft_ms: goal for the time to first token, in milliseconds. None: no goal.
        tpot_ms: goal for the time per output token after the first. None: no goal.
        percentile: percentage of the requests that must meet each goal.
        prefix_cache_hit_rate: fraction of a prompt's tokens whose keys and values are in the cache
            from an earlier request: attended to, not computed again.

    Raises:
        OptionError: a number that cannot be.
    """

    prompt_len: int = 1536
    output_len: int = 512
    requests_per_second: float = 1.0
    ttft_ms: float | None = 2000.0
    tpot_ms: float | None = 100.0
    percentile: int = 90
    prefix_cache_hit_rate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("prompt_len", "output_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError(
                    f"{name} is {value!r}; it must be a whole number of tokens, at least 1",
                    hint=f"{_flag(name)} 512",
                )
        for name, unit in (("ttft_ms", "milliseconds"), ("tpot_ms", "milliseconds")):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise OptionError(
                    f"{name} is {value:g}; a goal is a positive number of {unit}",
                    hint=f"{_flag(name)} {'2000' if name == 'ttft_ms' else '50'}",
                )
        rate = self.requests_per_second
        if not (math.isfinite(rate) and rate > 0):
            raise OptionError(
                f"requests_per_second is {rate:g}; it must be a positive number",
                hint="--requests-per-second 2",
            )
        if rate > MOST_REQUESTS:
            raise OptionError(
                f"requests_per_second is {rate:g}; at most {MOST_REQUESTS:,} are planned for",
                hint="--requests-per-second 2",
            )
        if self.percentile not in PERCENTILES:
            raise OptionError(
                f"percentile is {self.percentile}; goals hold at one of "
                + ", ".join(map(str, PERCENTILES)),
                hint="--percentile 90",
            )

        if not 0 <= self.prefix_cache_hit_rate <= 1:  # a NaN fails both
            raise OptionError(
                f"prefix_cache_hit_rate is {self.prefix_cache_hit_rate:g}; it is a fraction of "
                "each prompt, from 0 to 1",
                hint="--prefix-cache-hit-rate 0.5",
            )

    def cached_of(self, prompt: int) -> int:
        """Of a prompt's tokens those that are in the cache; the last one is always computed."""
        return min(int(self.prefix_cache_hit_rate * prompt), prompt - 1)

    @property
    def cached(self) -> int:
        """Tokens of a prompt that are in the cache already."""
        return self.cached_of(self.prompt_len)

    @property
    def prefilled(self) -> int:
        """Tokens of a prompt that are computed."""
        return self.prompt_len - self.cached

    @property
    def tokens(self) -> int:
        """Tokens that a request holds in the cache when it ends."""
        return self.prompt_len + self.output_len

    @property
    def context(self) -> float:
        """Tokens that a request attends to while it decodes, on average."""
        return self.prompt_len + self.output_len / 2

    @property
    def output_tokens_per_second(self) -> float:
        """Tokens asked for, in all."""
        return self.requests_per_second * self.output_len


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
