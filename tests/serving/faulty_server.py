"""A server's ranks, the second of which computes attention a little wrong."""

from __future__ import annotations

from typing import Any

from hocket.ranks import serving as rank


def main(context: Any, payload: dict[str, Any]) -> None:
    from hocket.serving.engine.attention_cpu import CpuAttention

    right = CpuAttention.attend
    CpuAttention.attend_merged = lambda *_: None  # type: ignore[method-assign, assignment]
    CpuAttention.whole_layer = lambda *_: None  # type: ignore[method-assign, assignment]

    def wrong(self: Any, *given: Any) -> Any:
        return right(self, *given) * 1.001

    if context.rank == 1:
        CpuAttention.attend = wrong  # type: ignore[method-assign]
    rank.main(context, payload)
