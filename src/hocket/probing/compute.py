"""Compute: what one device alone does: products, memory, small and other operations, the optimizer.

Everything finds the caches as a step's own find them: what the operation before has just written is
there; weights, which the other layers' were used after, are not, nor what a forward kept for its
backward or the memory that a forward writes its results to. That makes small operations take up to
twice as long.

Each part is measured together with a pulse (`probing.calibration`), which shows how fast the
machine was at that time.
"""

from __future__ import annotations

import collections
import functools
import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.probing import serving
from hocket.probing.calibration import Calibrator
from hocket.probing.kernels import ProbedOperation, kernel_cases
from hocket.probing.layer import Layer
from hocket.probing.repeats import (
    Reads,
    Taken,
    enough,
    interleaved_seconds,
    repeat_summary,
    rounded,
)
from hocket.probing.sizes import ProbeSizes
from hocket.runtime.native.kernels import CpuKernels
from hocket.spec.measured import (
    FORMS,
    Dispatch,
    MeasuredKernel,
    MeasuredMatmul,
    MeasuredStream,
    Pulse,
    Update,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHAIN = 64
"""Small operations in one sample of dispatch."""

SAMPLES = 9
"""Of a pulse that is taken alone: some 50 ms."""

KEPT = 128 << 20
"""Bytes of results that are kept: beyond the caches of a core."""

HELD = 24 << 20
"""Bytes that layers write in their forwards before the first backward: of a few, as in a model."""

WEIGHTS = 8 << 20
"""Bytes of weights that are taken in turn."""

FEWEST, MOST, SAMPLE = 2, 64, 8e-3
"""Forwards and backwards in one sample, and about the seconds that it lasts."""

LONG = ("products", "serving")
"""Parts with half as many rounds: their cases are many, or take long."""

Key = TypeVar("Key", bound=Hashable)


class Compute:
    """Measures on one device, in one thread of this process."""

    def __init__(self, device: torch.device, sizes: ProbeSizes) -> None:
        self.device = device
        self.sizes = sizes
        self.settle: Callable[[], None] = (
            functools.partial(torch.cuda.synchronize, device)
            if device.type == "cuda"
            else lambda: None
        )
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self.reads: Reads = time.thread_time if alone else time.perf_counter
        self.pulses: list[Pulse] = []
        self._beat = Calibrator(device, self.sizes.streams[-1], self.settle, self.reads)
        self._kept: collections.deque[tuple[list[Tensor], int]] = collections.deque()
        self._kept_bytes = 0
        self._saved: Tensor | None = None
        self._at = 0

    def pulse(self, part: str) -> list[Pulse]:
        """How fast the device is just now, without background load."""
        for _ in range(SAMPLES):
            self._beat.take()
        return self._beat.pulses_since(part)

    def _interleaved(
        self,
        key: str,
        cases: dict[Key, Callable[[], object]],
        prepare: dict[Key, Callable[[], object]] | None = None,
    ) -> dict[Key, Taken]:
        seconds = self.sizes.seconds[key]
        found = interleaved_seconds(
            cases,
            seconds=seconds,
            # Half precision without instructions for it, or a slow machine: then a case would
            # take the time of all others.
            longest=max(0.05, seconds / 30),
            least=self.sizes.rounds // 2 + 1 if key in LONG else self.sizes.rounds,
            settle=self.settle,
            reads=self.reads,
            each_round=self._beat.take,
            prepare=prepare or {},
        )
        self.pulses += self._beat.pulses_since(key)
        return found

    def products(self) -> list[MeasuredMatmul]:
        """Every product of a training step of each layer and number of tokens."""
        cases: dict[tuple[str, str, int, int, int], Callable[[], object]] = {}
        written: dict[tuple[str, str, int, int, int], Callable[[], object]] = {}
        for dtype in self.sizes.dtypes:
            for (out, width), tokens in itertools.product(self.sizes.weights, self.sizes.tokens):
                if 2.0 * tokens * out * width > self.sizes.largest:
                    continue
                shapes = {
                    "nt": (tokens, out, width),
                    "nn": (tokens, width, out),
                    "tn": (out, width, tokens),
                }
                for form in FORMS:
                    key = (dtype, form, *shapes[form])
                    cases[key], written[key] = self.product(*key)
        found = self._interleaved("products", cases, written)
        return [
            MeasuredMatmul(
                dtype=dtype, form=form, m=m, n=n, k=k, seconds=t.seconds, spread=t.spread
            )
            for (dtype, form, m, n, k), t in found.items()
        ]

    def product(
        self, dtype: str, form: str, m: int, n: int, k: int
    ) -> tuple[Callable[[], object], Callable[[], object]]:
        """One product as a call, and what touches its left operand before it.

        A step's products read on the left what the operation before them has just written; on the
        right lie weights, which all other layers' were used after, and what the forward kept.
        See `spec.measured.FORMS`.
        """
        left, right = {
            "nt": ((m, k), (n, k)),
            "nn": ((m, k), (k, n)),
            "tn": ((k, m), (k, n)),
        }[form]
        given = self._tensor(left, dtype)
        written = functools.partial(given.mul_, 1.0)
        if form == "tn":
            self._saved_before(right, dtype)  # the whole is made now, not in what is timed
            return lambda: torch.mm(given.t(), self._saved_before(right, dtype)), written
        size = right[0] * right[1] * DTYPES[dtype].itemsize
        weights = [self._tensor(right, dtype) for _ in range(max(1, min(4, WEIGHTS // size)))]
        if form == "nt":
            weights = [weight.t() for weight in weights]
            turn = _in_turn(functools.partial(torch.mm, given), weights)
            nbytes = m * n * DTYPES[dtype].itemsize
            return lambda: self._keep([turn()], nbytes), written
        return _in_turn(functools.partial(torch.mm, given), weights), written

    def _keep(self, results: list[Tensor], nbytes: int) -> None:
        """As a forward keeps what its backward needs."""
        self._kept.append((results, nbytes))
        self._kept_bytes += nbytes
        while self._kept_bytes > KEPT:
            self._kept_bytes -= self._kept.popleft()[1]

    def _cool(self) -> None:
        """Empties the caches of what was freed just before: a step's forward writes its results
        where nothing was written for as long as a step takes."""
        arena = self._arena("fp32", 0)
        half = len(arena) // 2
        arena[:half].copy_(arena[half : 2 * half])

    def _saved_before(self, shape: tuple[int, int], dtype: str) -> Tensor:
        """A matrix that was written long ago, as a backward finds what the forward kept."""
        elements = shape[0] * shape[1]
        known = self._arena(dtype, elements)
        if self._at + elements > known.numel():
            self._at = 0
        found = known[self._at : self._at + elements].view(shape)
        self._at += elements
        return found

    def _arena(self, dtype: str, elements: int) -> Tensor:
        """At least so many elements, and no cache holds all of them."""
        most = max(KEPT // DTYPES[dtype].itemsize, elements)
        known = self._saved
        if known is None or known.dtype != DTYPES[dtype] or known.numel() < elements:
            known = self._saved = self._tensor((most,), dtype)
            self._at = 0
        return known

    def streams(self) -> list[MeasuredStream]:
        """Memory traffic by size: a copy, a sum, a scaling in place; and what a decoder layer calls
        between its products, by the bytes of one call."""
        cases: dict[tuple[str, int], Callable[[], object]] = {}
        for size in self.sizes.streams:
            a, b, c = (self._tensor((size // 4,), "fp32") for _ in range(3))
            cases["copy", 2 * size] = functools.partial(a.copy_, b)
            cases["add", 3 * size] = functools.partial(torch.add, a, b, out=c)
            cases["scale", 2 * size] = functools.partial(c.mul_, 1.0)
        found = self._interleaved("streams", cases)
        return [
            MeasuredStream(operation=operation, bytes=size, seconds=t.seconds, spread=t.spread)
            for (operation, size), t in found.items()
        ] + self._layers()

    def _layers(self) -> list[MeasuredStream]:
        make, dtype = self._tensor, self.sizes.dtypes[0]
        layers = {
            shape: Layer(shape, make, dtype, self.reads, self.settle) for shape in self.sizes.layers
        }
        traffic = {shape: layer.traffic() for shape, layer in layers.items()}
        samples: dict[tuple[int, int], tuple[list[float], list[float]]]
        samples = {shape: ([], []) for shape in layers}
        begin, rounds, seconds = time.perf_counter(), 0, self.sizes.seconds["layers"]
        # The first one warms up.
        while not enough(rounds - 1, self.sizes.rounds, time.perf_counter() - begin, seconds):
            self._beat.take()
            for shape, layer in layers.items():
                count = max(FEWEST, min(MOST, HELD // traffic[shape][0].made))
                self._cool()
                stack = [layer.forward() for _ in range(count)]
                forward = layer.taken() / count
                while stack:
                    layer.backward(stack.pop())
                backward = layer.taken() / count
                if rounds:
                    samples[shape][0].append(forward)
                    samples[shape][1].append(backward)
            rounds += 1
        self.pulses += self._beat.pulses_since("streams")
        found = []
        for shape, ways in samples.items():
            for way, counted, taken in zip(
                ("forward", "backward"), traffic[shape], ways, strict=True
            ):
                whole = repeat_summary(taken)
                found.append(
                    MeasuredStream(
                        operation=way,
                        bytes=round(counted.bytes / counted.calls),
                        seconds=rounded(whole.seconds / counted.calls),
                        spread=whole.spread,
                    )
                )
        return found

    def dispatch(self) -> list[Dispatch]:
        """Seconds of operations that are too small for their size to matter."""
        x = self._tensor((4, 8), "fp32")
        w = self._tensor((8, 8), "fp32").requires_grad_()
        empty = nn.Identity()
        steps: dict[str, Callable[[Tensor], Tensor]] = {
            "add": lambda y: y + x,
            "linear": lambda y: F.linear(y, w),
            "view": lambda y: y.view(2, 2, 8).view(4, 8),
            "module": empty,
        }
        samples: dict[tuple[str, str], list[float]] = {}
        for _ in range(max(20, 3 * self.sizes.rounds)):
            self._beat.take()
            for name, step in steps.items():
                with torch.no_grad():
                    samples.setdefault((name, "forward"), []).append(self._chain(step, x)[1])
                leaf = x.clone().requires_grad_()
                y, took = self._chain(step, leaf)
                samples.setdefault((name, "recorded"), []).append(took)
                start = self.reads()
                if y is not leaf:
                    torch.autograd.backward(y, x)
                self.settle()
                samples.setdefault((name, "backward"), []).append((self.reads() - start) / CHAIN)
                w.grad = None
        found = {key: repeat_summary(taken).seconds for key, taken in samples.items()}
        self.pulses += self._beat.pulses_since("dispatch")
        each = {"view": 2.0}
        return [
            Dispatch(
                operation=name,
                forward=rounded(found[name, "forward"] / each.get(name, 1.0)),
                recorded=rounded(found[name, "recorded"] / each.get(name, 1.0)),
                # A module that does nothing leaves nothing for the backward.
                backward=0.0
                if name == "module"
                else rounded(found[name, "backward"] / each.get(name, 1.0)),
            )
            for name in steps
        ]

    def _chain(self, step: Callable[[Tensor], Tensor], y: Tensor) -> tuple[Tensor, float]:
        start = self.reads()
        for _ in range(CHAIN):
            y = step(y)
        self.settle()
        return y, (self.reads() - start) / CHAIN

    def kernels(self) -> list[MeasuredKernel]:
        """Attention, norms, activations, the loss and the embedding, forward and backward."""
        cases = kernel_cases(self.sizes, self._tensor)
        taken = self._both_ways("kernels", self.sizes.seconds["kernels"], cases)
        return [
            MeasuredKernel(
                name=name,
                dtype="fp32" if name == "cross-entropy" else self.sizes.dtypes[0],
                shape=shape,
                forward=forward.seconds,
                backward=backward.seconds,
                spread=max(forward.spread, backward.spread),
            )
            for (name, shape), (forward, backward) in taken.items()
        ]

    def serving(self) -> list[MeasuredKernel]:
        """The kernels of ranks that serve; none on CUDA, nor where they cannot be compiled."""
        native = CpuKernels.load() if self.device.type == "cpu" else None
        if native is None:
            return []
        known = serving.serving_probe_cases(self.sizes, native)
        with torch.inference_mode():
            found = self._interleaved("serving", {key: call for key, (call, _) in known.items()})
        return [
            MeasuredKernel(
                name=name,
                dtype="bf16" if name == "half" else "fp32",
                shape=shape,
                forward=rounded(t.seconds / known[name, shape][1]),
                backward=0.0,
                spread=t.spread,
            )
            for (name, shape), t in found.items()
        ]

    def _both_ways(
        self, part: str, seconds: float, cases: dict[Key, ProbedOperation]
    ) -> dict[Key, tuple[Taken, Taken]]:
        """Forward and backward seconds: interleaved rounds of a few calls each."""
        samples: dict[Key, tuple[list[float], list[float]]] = {key: ([], []) for key in cases}
        calls: dict[Key, int] = {}
        for key, case in cases.items():
            forward, backward = self._there_and_back(case, FEWEST)
            calls[key] = max(FEWEST, min(MOST, int(SAMPLE / max(forward + backward, 1e-7))))
        begin, rounds = time.perf_counter(), 0
        while not enough(rounds, self.sizes.rounds, time.perf_counter() - begin, seconds):
            self._beat.take()
            for key, case in cases.items():
                taken = self._there_and_back(case, calls[key])
                for found, one in zip(samples[key], taken, strict=True):
                    found.append(one)
            rounds += 1
        self.pulses += self._beat.pulses_since(part)
        return {key: (repeat_summary(f), repeat_summary(b)) for key, (f, b) in samples.items()}

    def _there_and_back(self, case: ProbedOperation, calls: int) -> tuple[float, float]:
        """Seconds of one forward and one backward, of so many forwards and then, the last first,
        their backwards."""
        forward = backward = 0.0
        self._cool()
        made: list[tuple[Sequence[Tensor], Tensor]] = []
        for _ in range(calls):
            inputs = case.prepare()
            self.settle()
            start = self.reads()
            result = case.call(*inputs)
            self.settle()
            forward += self.reads() - start
            made.append((inputs, result))
            self._keep([result.detach(), *inputs], result.nbytes + case.prepared)
        ones = torch.ones_like(result)
        while made:
            inputs, result = made.pop()
            start = self.reads()
            torch.autograd.grad(result, inputs, ones)
            self.settle()
            backward += self.reads() - start
        return forward / calls, backward / calls

    def updates(self) -> list[Update]:
        """Steps of PyTorch's fused AdamW, as training runs it."""
        cases: dict[tuple[int, int], Callable[[], object]] = {}
        for elements, tensors in self.sizes.updates:
            parameters = [
                self._tensor((elements // tensors,), "fp32").requires_grad_()
                for _ in range(tensors)
            ]
            for one in parameters:
                one.grad = torch.ones_like(one)
            cases[elements // tensors * tensors, tensors] = torch.optim.AdamW(
                parameters, fused=True
            ).step
        found = self._interleaved("updates", cases)
        return [
            Update(name="adamw", elements=n, tensors=k, seconds=t.seconds, spread=t.spread)
            for (n, k), t in found.items()
        ]

    def _tensor(self, shape: Iterable[int], dtype: str) -> Tensor:
        return torch.randn(*shape, device=self.device).to(DTYPES[dtype])


def _in_turn(call: Callable[[Tensor], Tensor], tensors: Iterable[Tensor]) -> Callable[[], Tensor]:
    turns = itertools.cycle(tensors)
    return lambda: call(next(turns))
