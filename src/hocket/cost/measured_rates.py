"""Rates: what one operation takes on a machine that was measured, at sizes that were not.

    product     the rate of the nearest measured products of the same form, weighted by how near
                their m, n and k are in doublings
    memory      the time of the nearest measured working sets, straight between them in doublings;
                what a forward keeps for its backward goes to memory that no cache holds
    kernels     time for each unit of work (attention: B heads S^2 d; loss: tokens x vocabulary),
                between the nearest shapes

Everything is in a processor's seconds of a rank that is alone on its machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from hocket.spec.errors import OptionError
from hocket.spec.measured import MachineMeasurements, MeasuredKernel, MeasuredMatmul

NEAREST = 6
STEEPNESS = 4
"""Neighbours that a product's rate is taken from, and the power of their nearness."""

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}


class Rates:
    """Seconds of operations, from what was measured.

    Args:
        measured: of the machine.
        dtype: `fp32` or `bf16`, of weights and activations.

    Raises:
        OptionError: not even products were measured.
    """

    def __init__(self, measured: MachineMeasurements, dtype: str = "fp32") -> None:
        self.measured = measured
        self.dtype = dtype
        self.notes: list[str] = []
        self._products: dict[str, list[MeasuredMatmul]] = {}
        known = {p.dtype for p in measured.products}
        if not known:
            raise OptionError("no matmul was measured", hint="hocket probe")
        taken = dtype if dtype in known else ("fp32" if "fp32" in known else sorted(known)[0])
        if taken != dtype:
            self.notes.append(f"{dtype} matmuls were not measured; estimated as {taken}")
        for product in measured.products:
            if product.dtype == taken:
                self._products.setdefault(product.form, []).append(product)
        self._streams = _points(measured, "add") or _points(measured, "copy")
        self._layer = {way: _points(measured, way) for way in ("forward", "backward")}
        self._dispatch = {d.operation: d for d in measured.dispatch}
        self._seconds: dict[tuple[str, int, int, int], float] = {}

    # --- products --------------------------------------------------------------------------

    def product(self, form: str, m: int, n: int, k: int) -> float:
        """Seconds of one product [m, n] over k."""
        key = (form, m, n, k)
        if key not in self._seconds:
            self._seconds[key] = self._product(*key)
        return self._seconds[key]

    def _product(self, form: str, m: int, n: int, k: int) -> float:
        if min(m, n, k) <= 0:
            return 0.0
        known = self._products.get(form) or next(iter(self._products.values()))
        wanted = _doublings((m, n, k))
        near = sorted((math.dist(wanted, _doublings((p.m, p.n, p.k))), p.rate) for p in known)
        if near[0][0] < 1e-9:
            return 2.0 * m * n * k / near[0][1]
        weights = [(1 / distance**STEEPNESS, rate) for distance, rate in near[:NEAREST]]
        total = sum(weight for weight, _ in weights)
        rate = math.exp(sum(w * math.log(r) for w, r in weights) / total)
        return 2.0 * m * n * k / rate

    def matmul(self, form: str, m: int, n: int, k: int, batch: int) -> float:
        """As `cost.device.Device.matmul`, with what calling a linear layer costs, once."""
        called = self.call("linear") if form == "nt" else self.backward("linear") / 2
        return batch * self.product(form, m, n, k) + called

    # --- memory ----------------------------------------------------------------------------

    def stream(self, nbytes: float) -> float:
        """Seconds of one operation that reads and writes so many bytes together."""
        if nbytes <= 0 or not self._streams:
            return 0.0
        return interpolated_seconds(self._streams, nbytes)

    def streams(self, nbytes: float, calls: float) -> float:
        """Seconds of `calls` operations of so many bytes together."""
        return calls * self.stream(nbytes / calls) if calls else 0.0

    def layer(self, way: str, nbytes: float, calls: float) -> float:
        """Seconds of `calls` operations of so many bytes together, of those between a layer's
        products: with what calling them costs. `way`: `forward` or `backward`."""
        if not calls or nbytes <= 0:
            return 0.0
        points = self._layer[way]
        if points:
            return calls * interpolated_seconds(points, nbytes / calls)
        overhead = self.call("add") if way == "forward" else self.backward("add")
        return self.streams(nbytes, calls) + calls * overhead

    # --- overheads -------------------------------------------------------------------------

    def call(self, operation: str) -> float:
        """One small operation with autograd, forward."""
        found = self._dispatch.get(operation)
        return found.recorded if found else 0.0

    def backward(self, operation: str) -> float:
        """The share of one small operation in the backward."""
        found = self._dispatch.get(operation)
        return found.backward if found else 0.0

    # --- kernels and optimizer -------------------------------------------------------------

    def kernel(self, name: str, shape: Sequence[float]) -> tuple[float, float] | None:
        """(forward, backward) seconds of a kernel; None where it was not measured."""
        known = [k for k in self.measured.kernels if k.name == name]
        same = [k for k in known if k.dtype == self.dtype] or known
        if not same:
            return None
        wanted = _doublings(shape)
        near = sorted(same, key=lambda k: math.dist(wanted, _doublings(k.shape)))[:3]
        first = math.dist(wanted, _doublings(near[0].shape))
        if first < 1e-9:
            return near[0].forward, near[0].backward
        found = []
        for field in ("forward", "backward"):
            total = amount = 0.0
            for one in near:
                weight = 1 / math.dist(wanted, _doublings(one.shape)) ** STEEPNESS
                total += weight
                amount += weight * math.log(max(getattr(one, field), 1e-12) / _units(one))
            found.append(math.exp(amount / total) * _work(name, shape))
        return found[0], found[1]

    # --- the kernels that serve ------------------------------------------------------------

    def rows(self, m: float, nbytes: float, held: float, name: str = "rows") -> float | None:
        """Seconds of a product of `m` rows with a weight of `nbytes`, one of those of `held` bytes
        that are read in turn; None where that was not measured. `name`: `rows`, of weights in
        fp32, or `half`, in bf16.

        Seconds for each byte, straight in doublings of rows and of what is held.
        """
        known: dict[float, list[tuple[float, float]]] = {}
        for one in self.measured.kernels:
            if one.name == name:
                rows, wide, deep, count = one.shape
                each = float(BYTES[one.dtype]) * wide * deep
                seconds = max(one.forward - self.kernel_call(), 1e-9) / each
                known.setdefault(each * count, []).append((float(rows), seconds))
        if not known:
            return None
        by_held = [(size, _within(points, m)) for size, points in known.items()]
        return _within(by_held, held) * nbytes + self.kernel_call()

    def kernel_call(self) -> float:
        """Seconds of calling a kernel that serves; 0 where it was not measured."""
        return next((k.forward for k in self.measured.kernels if k.name == "call"), 0.0)

    def optimizer(self, elements: int, tensors: int) -> float:
        """As `cost.device.Device.optimizer`: one AdamW step."""
        points = sorted((u.elements, u.seconds) for u in self.measured.updates if u.name == "adamw")
        if not points or not elements:
            return self.streams(28.0 * elements, max(1, tensors))
        return interpolated_seconds(points, elements)


def interpolated_seconds(points: Sequence[tuple[float, float]], size: float) -> float:
    """Seconds of `size` from (size, seconds) points: straight in doublings between two of them.

    Below the first the time stays; above the last it grows with the size.
    """
    ordered = sorted(points)
    if size <= ordered[0][0]:
        return ordered[0][1]
    if size >= ordered[-1][0]:
        return ordered[-1][1] * size / ordered[-1][0]
    for (low, fast), (high, slow) in itertools.pairwise(ordered):
        if size <= high:
            share = (math.log(size) - math.log(low)) / (math.log(high) - math.log(low))
            return math.exp(math.log(fast) + share * (math.log(slow) - math.log(fast)))
    raise AssertionError(size)


def _within(points: Sequence[tuple[float, float]], size: float) -> float:
    """As `interpolated_seconds`, and the last one's above the last."""
    return interpolated_seconds(points, min(size, max(at for at, _ in points)))


def _points(measured: MachineMeasurements, operation: str) -> list[tuple[float, float]]:
    return [(float(s.bytes), s.seconds) for s in measured.streams if s.operation == operation]


def _doublings(sizes: Iterable[float]) -> tuple[float, ...]:
    return tuple(math.log2(size) for size in sizes)


def _units(kernel: MeasuredKernel) -> float:
    return _work(kernel.name, kernel.shape)


def _work(name: str, shape: Sequence[float]) -> float:
    """What a kernel's time grows with."""
    if name == "attention":
        batch, heads, sequence, width = shape
        return float(batch * heads * sequence * sequence * width)
    if name == "decode":
        rows, heads, _, tokens, width, _ = shape
        return float(rows * heads * tokens * width)
    if name == "chunk":
        heads, _, tokens, width = shape
        return float(heads * tokens * tokens * width)
    if name == "embedding":
        tokens, vocabulary, hidden = shape
        return float(tokens * hidden + vocabulary * hidden)
    return float(math.prod(shape))
