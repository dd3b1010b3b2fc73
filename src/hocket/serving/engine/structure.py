"""Structure: which tokens may come next, so that an answer obeys a schema or a pattern."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StructureState(Protocol):
    """One answer under a structure."""

    def mask(self, vocab_size: int) -> bytearray | str:
        """One bit per token that may come, lowest first; a text says why there is none."""

    def take(self, token: int) -> None:
        """The answer goes on with `token`."""


class Structures(Protocol):
    """Makes states from the text of `Sampling.structure`."""

    def start(self, text: str, ends: Sequence[int], generated: Sequence[int]) -> StructureState:
        """The state after `generated`; `ends` are the tokens that end the answer."""
