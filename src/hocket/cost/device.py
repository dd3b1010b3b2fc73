"""Device: seconds of one operation on one rank. A catalogue GPU answers by fitted constants
(`FittedDevice`), a probed machine by its nearest measurements (`measured_rates.Rates`).

    forward          x W^T    nt    [T, k] x [k, n]
    input gradient   g W      nn    [T, n] x [n, k]
    weight gradient  g^T x    tn    [n, T] x [T, k]

Fitted, a matmul takes the best tile shape:  waves = ceil(tiles / SMs),
    T = waves x 2 tile (K + K0) / (rate of an SM x relative rate of the tile),
not below its bytes over the memory bandwidth.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

from hocket.cost.constants import Constants, Platform
from hocket.cost.terms import Floats
from hocket.spec.precision import moment_bytes

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))

OPTIMIZER_BYTES = 45.0
"""Moved per parameter by an Adam step in mixed precision: gradient read twice (norm, update), a
32-bit copy, master and two moments read and written, weight written."""

ATTENTION_BACKWARD = 2.5
"""Seconds of a fused attention's backward over those of its forward: five products, for two."""

FULL_WIDTH_BYTES = 32.0
"""The same without a master copy: gradient read twice, weight and two moments read and written."""


class Device(Protocol):
    """Numbers in, seconds out; arrays [r] in, arrays out where the device is fitted."""

    def matmul(self, form: str, m: Any, n: Any, k: Any, batch: Any) -> Any:
        """Seconds of `batch` matmuls [m, n] over k of a linear layer. `form`: nt, nn or tn."""

    def optimizer(self, elements: Any, tensors: Any) -> Any:
        """Seconds of the update of so many parameters."""


@dataclasses.dataclass(frozen=True)
class FittedDevice:
    """A GPU of the catalogue, by constants fitted to published runs."""

    platform: Platform

    def matmul(self, form: str, m: Floats, n: Floats, k: Floats, batch: Floats | float) -> Floats:
        """As `Device.matmul`; a weight gradient is added to the sum where the software fuses it."""
        if form != "tn":
            return matmul_seconds(m, n, k, self.platform, batch)
        constants = self.platform.constants
        twice = 2 * np.asarray(constants.gradient_bytes)  # read and written
        result = np.where(fuses_gradients(constants), twice, constants.element_bytes)
        return matmul_seconds(m, n, k, self.platform, batch, result=result)

    def optimizer(self, elements: Floats, tensors: Any = None) -> Floats:
        """As `Device.optimizer`; by its bytes, however many tensors."""
        constants = self.platform.constants
        rate = self.platform.machine.bandwidth * constants.memory_rate
        held = np.asarray(constants.optimizer_bytes)
        mixed = np.asarray(constants.weight_bytes) < 4
        smaller = moment_bytes("adamw") - (held - np.where(mixed, 4.0, 0.0))
        moved = np.where(mixed, OPTIMIZER_BYTES, FULL_WIDTH_BYTES) - 2 * smaller
        found: Floats = moved * elements / rate
        return found


def linear_seconds(
    device: Device, m: Any, n: Any, k: Any, batch: Any, *, frozen: bool
) -> tuple[Any, Any, Any]:
    """Seconds of a linear layer's forward, input gradient and weight gradient (none of a frozen
    one) on its local sizes: m tokens, n columns, k inner elements, `batch` of them."""
    return (
        device.matmul("nt", m, n, k, batch),
        device.matmul("nn", m, k, n, batch),
        0.0 if frozen else device.matmul("tn", n, k, m, batch),
    )


def fuses_gradients(constants: Constants) -> Any:
    """Whether matmuls of weight gradients add to the sum themselves."""
    wide = np.asarray(constants.gradient_bytes) > 2
    return np.asarray(constants.fused_gradients) > np.where(wide, 0, 1)


def matmul_seconds(
    rows: Floats,
    columns: Floats,
    inner: Floats,
    platform: Platform,
    batch: Floats | float = 1.0,
    *,
    result: Floats | float | None = None,
) -> Floats:
    """Seconds of `batch` products [rows, inner] x [inner, columns]; `result`: bytes moved for each
    element of theirs, None: written once."""
    machine, constants = platform.machine, platform.constants
    element = constants.element_bytes
    result = element if result is None else result
    unit = machine.sms / (machine.flops * constants.matrix_rate)
    best: Floats | None = None
    for height, width in TILES:
        relative = constants.small_tile ** np.log2(32768 / (height * width))
        tiles = np.ceil(rows / height) * np.ceil(columns / width) * batch
        waves = np.ceil(tiles / machine.sms)
        time = waves * (2.0 * height * width) * unit / relative
        best = time if best is None else np.minimum(best, time)
    assert best is not None
    moved = batch * (element * inner * (rows + columns) + result * rows * columns)
    by_memory = moved / (machine.bandwidth * constants.memory_rate)
    return np.maximum(best * (inner + constants.inner_overhead), by_memory)
