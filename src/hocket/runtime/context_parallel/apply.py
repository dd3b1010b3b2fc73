"""Apply: give the layers of a model their way to the other context ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.context_parallel.attend import Scores, Visible
from hocket.runtime.context_parallel.ring import Ring
from hocket.runtime.context_parallel.state import previous_inputs, previous_states
from hocket.runtime.context_parallel.ulysses import ulysses
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.spec.errors import ModelError

CONTEXT = "context_parallel"
"""Attribute of a module: the `ContextParallel` that its attention, its scan and its convolution go
through. Who gives a module these functions (`models.context`) looks for it."""


class ContextParallel:
    """Attention, and state of recurrent layers, over the context ranks.

    Args:
        axis: the context ranks.
        recorder: of their messages.
        kind: `ring`, `ulysses`, or `auto`: ulysses where the heads of queries and of keys that a
            rank has divide over the axis, else the ring.
    """

    chunks = 2
    """Of a sequence, on each rank (`state`)."""

    def __init__(self, axis: Axis, recorder: Recorder, kind: str = "auto") -> None:
        assert kind in ("ring", "ulysses", "auto"), kind
        self.axis = axis
        self.recorder = recorder
        self.kind = kind

    def __deepcopy__(self, memo: dict[int, object]) -> ContextParallel:
        return self

    def takes_heads(self, heads: int, key_heads: int) -> bool:
        """Whether heads are split (Ulysses), and not blocks of keys passed on (ring).

        Raises:
            ModelError: Ulysses was asked for, and the heads do not divide.
        """
        divide = heads % self.axis.size == 0 and key_heads % self.axis.size == 0
        if self.kind == "ulysses" and not divide:
            raise ModelError(
                f"{heads} query and {key_heads} key/value heads of a rank do not divide over cp "
                f"{self.axis.size}, as ulysses needs",
                hint="--context-parallel ring",
            )
        return divide and self.kind != "ring"

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        visible: Visible | None = None,
    ) -> Tensor:
        """Query [B, A, S/c, D], key [B, K, S/c, D], value [B, K, S/c, E] of this rank's tokens to
        [B, A, S/c, E].

        Args:
            scale: of the products; None: 1 / sqrt(D).
            softcap: of the scores. sinks: [A], a further score of each head that has no value.
            visible: what is seen by place in the whole sequence; None: all before a query.
        """
        scores = Scores(
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            softcap=softcap,
            visible=visible,
        )
        given: tuple[Any, ...] = (query, key, value, sinks, scores, self.axis, self.recorder)
        if self.takes_heads(query.shape[1], key.shape[1]):
            return ulysses(*given)
        out = Ring.apply(*given)  # type: ignore[no-untyped-call]
        assert isinstance(out, Tensor)
        return out

    def previous_inputs(self, inputs: Tensor, width: int) -> Tensor:
        """The last inputs before each of this rank's two chunks (`state.previous_inputs`)."""
        return previous_inputs(inputs, width, self.axis, self.recorder)

    def previous_states(self, ends: Tensor, decay: Tensor, *, matrix: bool = False) -> Tensor:
        """The state before each of this rank's two chunks (`state.previous_states`)."""
        return previous_states(ends, decay, self.axis, self.recorder, matrix=matrix)

    def leave_graphs(self) -> None:
        """Let states be handed on between compiled parts."""
        for method in (ContextParallel.previous_inputs, ContextParallel.previous_states):
            outside = torch.compiler.disable(method.__get__(self))  # type: ignore[no-untyped-call]
            setattr(self, method.__name__, outside)


def apply_context_parallel(module: nn.Module, context: ContextParallel) -> None:
    """Let every attention and recurrence of a model go over the context ranks."""
    for child in module.modules():
        setattr(child, CONTEXT, context)
