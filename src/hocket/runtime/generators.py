"""States of the generators that code outside the keyed streams may draw from."""

from __future__ import annotations

import random

import torch
from torch import Tensor


def random_states() -> dict[str, Tensor]:
    """The states of the generators that code outside the keyed streams may draw from."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    version, internal, _ = random.getstate()
    states["python"] = torch.tensor([version, *internal], dtype=torch.int64)
    return states


def set_random_state(name: str, state: Tensor) -> None:
    """Set one of `random_states`; that of a device which is not in use is passed over."""
    if name == "torch":
        torch.set_rng_state(state)
    elif name == "python":
        version, *internal = state.tolist()
        random.setstate((version, tuple(internal), None))
    elif name == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(state)
