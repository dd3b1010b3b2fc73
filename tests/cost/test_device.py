"""The three matmuls of a linear layer, as a device is asked for them."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.cost.device import linear_seconds


class Recorded:
    """Multiplies what it is asked for, and takes a second each."""

    def __init__(self) -> None:
        self.results: dict[str, tuple[int, ...]] = {}

    def matmul(self, form: str, m: int, n: int, k: int, batch: int) -> float:
        self.results[form] = (np.ones((m, k)) @ np.ones((k, n))).shape
        return 1.0 * batch

    def optimizer(self, elements: int, tensors: int) -> float:
        return 0.0


@pytest.mark.parametrize("frozen", [False, True])
def test_results_have_the_shapes_of_output_and_gradients(frozen: bool) -> None:
    tokens, columns, inner = 7, 5, 3
    device = Recorded()
    seconds = linear_seconds(device, tokens, columns, inner, 2, frozen=frozen)
    shapes = {"nt": (tokens, columns), "nn": (tokens, inner), "tn": (columns, inner)}
    assert device.results == {form: shapes[form] for form in list(shapes)[: 3 - frozen]}
    assert seconds == (2.0, 2.0, 0.0 if frozen else 2.0)
