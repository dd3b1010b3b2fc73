"""States and inputs that chunks hand on over context ranks, against loops over the whole sequence
in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hocket.runtime.context_parallel.state import previous_inputs
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.spec.errors import OptionError
from tests.runtime.state_cases import CHANNELS, KEYS, ROWS, VALUES, WIDTH


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_states_and_gradients(ranks: Any, world: int, backend: str) -> None:
    for matrix in (False, True):
        for off in ranks.run(
            "tests.runtime.state_cases:states", world_size=world, matrix=matrix, backend=backend
        ):
            assert max(off.values()) < 1e-12, off


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_convolution_sees_the_chunk_before(ranks: Any, world: int) -> None:
    for off in ranks.run("tests.runtime.state_cases:inputs", world_size=world):
        assert max(off.values()) < 1e-12, off


@pytest.mark.parametrize("world", [2, 4])
def test_what_chunks_send(ranks: Any, world: int) -> None:
    """A rank inside the line sends 2 states forward and 2 backward, one at an end 1 and 1; of
    inputs the same."""
    state, inputs = ROWS * KEYS * VALUES * 8, ROWS * CHANNELS * WIDTH * 8
    for rank, found in enumerate(ranks.run("tests.runtime.state_cases:sent", world_size=world)):
        neighbours = (rank > 0) + (rank < world - 1)
        each = [4 * neighbours, 2 * neighbours * (state + inputs)]
        assert found == {"send": each, "receive": each}, (rank, found)


def test_chunks_that_are_shorter_than_a_convolution_are_rejected() -> None:
    with pytest.raises(OptionError, match="chunks of 2 tokens") as caught:
        previous_inputs(torch.zeros(1, 1, 4), 3, Axis("cp", 4, 0, (0, 1, 2, 3)), Recorder(0))
    assert caught.value.hint == "--seq-len 24"
