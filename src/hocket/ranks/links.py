"""Links: each rank measures what it multiplies while all others do."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.launch import RankContext


def measure_links(context: RankContext, payload: dict[str, Any]) -> None:
    """In each rank: emit the rate of products like a layer's, operations/s.

    The ninth decile of single products, so that what else runs on the machine does not count.
    """
    import time

    import torch

    dtype = torch.bfloat16 if payload["dtype"] == "bf16" else torch.float32
    tokens, hidden = payload["tokens"], payload["hidden"]
    width = max(1, 4 * hidden // payload["tp"])
    rows = torch.randn(tokens, hidden, dtype=dtype)
    weight = torch.randn(hidden, width, dtype=dtype)
    rows @ weight
    rates: list[float] = []
    end = time.perf_counter() + payload["seconds"]
    while (begin := time.perf_counter()) < end or not rates:
        rows @ weight
        rates.append(2.0 * tokens * hidden * width / (time.perf_counter() - begin))
    quiet = statistics.quantiles(rates, n=10)[-1] if len(rates) > 1 else rates[0]
    context.emit({"event": "rate", "rate": quiet})
