"""Compute: what one device alone does: products, memory, small and other operations, the optimizer.

Operands are taken from several copies in turn, as a step's layers take theirs: none is in the
nearest cache just because it was used a moment ago. What a forward leaves for the backward is kept
here too: such results go to memory that no cache holds, which makes small ones a third slower, and
the backward's weight gradients read them from there.

Each part is measured together with a pulse (`probing.beat`), so that it is known how fast the
machine was just then.
"""

from __future__ import annotations

import collections
import functools
import itertools
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.probing.beat import Beat
from hocket.probing.repeats import Reads, Taken, enough, interleaved, rounded, summary
from hocket.probing.sizes import Sizes
from hocket.spec.measured import FORMS, Dispatch, Kernel, Product, Pulse, Stream, Update

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHAIN = 64
"""Small operations in one sample of dispatch."""

SAMPLES = 9
"""Of a pulse that is taken beside nothing: some 50 ms."""

KEPT = 64 << 20
"""Bytes of results that are kept: beyond the caches of a core."""

Key = TypeVar("Key", bound=Hashable)


class Compute:
    """Measures on one device, in one thread of this process."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
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
        self._beat = Beat(device, self.sizes.streams[-1], self.settle, self.reads)
        self._kept: collections.deque[Tensor] = collections.deque()
        self._kept_bytes = 0
        self._saved: Tensor | None = None
        self._at = 0

    def pulse(self, part: str) -> list[Pulse]:
        """How fast the device is just now, beside nothing else."""
        for _ in range(SAMPLES):
            self._beat.take()
        return self._beat.told(part)

    def _interleaved(self, key: str, cases: dict[Key, Callable[[], object]]) -> dict[Key, Taken]:
        seconds = self.sizes.seconds[key]
        found = interleaved(
            cases,
            seconds=seconds,
            # Half precision without instructions for it, or a slow machine: then a case would
            # take the time of all others.
            longest=max(0.05, seconds / 30),
            least=self.sizes.rounds // 2 + 1 if key == "products" else self.sizes.rounds,
            settle=self.settle,
            reads=self.reads,
            each_round=self._beat.take,
        )
        self.pulses += self._beat.told(key)
        return found

    def products(self) -> list[Product]:
        """Every product of a training step of each layer and number of tokens."""
        cases: dict[tuple[str, str, int, int, int], Callable[[], object]] = {}
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
                    cases[dtype, form, *shapes[form]] = self.product(dtype, form, *shapes[form])
        found = self._interleaved("products", cases)
        return [
            Product(dtype=dtype, form=form, m=m, n=n, k=k, seconds=t.seconds, spread=t.spread)
            for (dtype, form, m, n, k), t in found.items()
        ]

    def product(self, dtype: str, form: str, m: int, n: int, k: int) -> Callable[[], object]:
        """One product as a call; see `spec.measured.FORMS`."""
        left, right = {
            "nt": ((m, k), (n, k)),
            "nn": ((m, k), (k, n)),
            "tn": ((k, m), (k, n)),
        }[form]
        size = (m * k + k * n) * DTYPES[dtype].itemsize
        copies = max(1, min(4, (8 << 20) // size))
        pairs = [(self._tensor(left, dtype), self._tensor(right, dtype)) for _ in range(copies)]
        if form == "nt":
            pairs = [(a, b.t()) for a, b in pairs]
            return _in_turn(lambda a, b: self._keep(torch.mm(a, b)), pairs)
        if form == "tn":
            gradients = [(a.t(),) for a, _ in pairs]
            self._saved_before(right, dtype)  # the whole is made now, not in what is timed
            return _in_turn(lambda g: torch.mm(g, self._saved_before(right, dtype)), gradients)
        return _in_turn(torch.mm, pairs)

    def _keep(self, result: Tensor) -> None:
        """As a forward keeps what its backward needs."""
        self._kept.append(result)
        self._kept_bytes += result.nbytes
        while self._kept_bytes > KEPT:
            self._kept_bytes -= self._kept.popleft().nbytes

    def _saved_before(self, shape: tuple[int, int], dtype: str) -> Tensor:
        """A matrix that was written long ago, as a backward finds what the forward kept."""
        elements = shape[0] * shape[1]
        most = max(KEPT // DTYPES[dtype].itemsize, elements)
        known = self._saved
        if known is None or known.dtype != DTYPES[dtype] or known.numel() < elements:
            known = self._saved = self._tensor((most,), dtype)
            self._at = 0
        if self._at + elements > known.numel():
            self._at = 0
        found = known[self._at : self._at + elements].view(shape)
        self._at += elements
        return found

    def streams(self) -> list[Stream]:
        """Memory traffic by size: a copy, a sum, a scaling in place."""
        cases: dict[tuple[str, int], Callable[[], object]] = {}
        for size in self.sizes.streams:
            a, b, c = (self._tensor((size // 4,), "fp32") for _ in range(3))
            cases["copy", 2 * size] = functools.partial(a.copy_, b)
            cases["add", 3 * size] = functools.partial(torch.add, a, b, out=c)
            cases["kept", 3 * size] = functools.partial(self._added, a, b)
            cases["scale", 2 * size] = functools.partial(c.mul_, 1.0)
        found = self._interleaved("streams", cases)
        return [
            Stream(operation=operation, bytes=size, seconds=t.seconds, spread=t.spread)
            for (operation, size), t in found.items()
        ]

    def _added(self, a: Tensor, b: Tensor) -> None:
        self._keep(torch.add(a, b))

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
        found = {key: summary(taken).seconds for key, taken in samples.items()}
        self.pulses += self._beat.told("dispatch")
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

    def kernels(self) -> list[Kernel]:
        """Attention, norms, activations, the loss and the embedding, forward and backward."""
        dtype = self.sizes.dtypes[0]
        calls: dict[tuple[str, tuple[int, ...]], tuple[Callable[[], Tensor], list[Tensor]]] = {}
        for shape in self.sizes.heads:
            q, k, v = (self._tensor(shape, dtype).requires_grad_() for _ in range(3))
            attend = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
            calls["attention", shape] = (attend, [q, k, v])
        for tokens, width in self.sizes.widths:
            x = self._tensor((tokens, width), dtype).requires_grad_()
            w = self._tensor((width,), dtype).requires_grad_()
            plain: dict[str, Callable[[], Tensor]] = {
                "gelu": functools.partial(F.gelu, x),
                "silu": functools.partial(F.silu, x),
                "softmax": functools.partial(torch.softmax, x, -1),
            }
            for name, call in plain.items():
                calls[name, (tokens, width)] = (call, [x])
            rms = functools.partial(F.rms_norm, x, (width,), w)
            layer = functools.partial(F.layer_norm, x, (width,), w, w)
            calls["rms-norm", (tokens, width)] = (rms, [x, w])
            calls["layer-norm", (tokens, width)] = (layer, [x, w])
        for tokens, vocabulary, hidden in self.sizes.vocabularies:
            logits = self._tensor((tokens, vocabulary), "fp32").requires_grad_()
            ids = torch.randint(vocabulary, (tokens,), device=self.device)
            loss = functools.partial(F.cross_entropy, logits, ids)
            calls["cross-entropy", (tokens, vocabulary)] = (loss, [logits])
            table = self._tensor((vocabulary, hidden), dtype).requires_grad_()
            look = functools.partial(F.embedding, ids, table)
            calls["embedding", (tokens, vocabulary, hidden)] = (look, [table])
        taken = self._both_ways(calls)
        return [
            Kernel(
                name=name,
                dtype="fp32" if name == "cross-entropy" else dtype,
                shape=shape,
                forward=forward.seconds,
                backward=backward.seconds,
                spread=max(forward.spread, backward.spread),
            )
            for (name, shape), (forward, backward) in taken.items()
        ]

    def _both_ways(
        self, calls: dict[Key, tuple[Callable[[], Tensor], list[Tensor]]]
    ) -> dict[Key, tuple[Taken, Taken]]:
        """Forward and backward seconds: interleaved rounds of a few calls each."""
        samples: dict[Key, tuple[list[float], list[float]]] = {key: ([], []) for key in calls}
        gradients = {key: torch.ones_like(call()) for key, (call, _) in calls.items()}
        begin, rounds, seconds = time.perf_counter(), 0, self.sizes.seconds["kernels"]
        # The first one warms up.
        while not enough(rounds - 1, self.sizes.rounds, time.perf_counter() - begin, seconds):
            self._beat.take()
            for key, (call, inputs) in calls.items():
                forward = backward = 0.0
                for _ in range(4):
                    self.settle()
                    start = self.reads()
                    y = call()
                    self.settle()
                    middle = self.reads()
                    self._keep(y.detach())
                    torch.autograd.grad(y, inputs, gradients[key])
                    self.settle()
                    forward += (middle - start) / 4
                    backward += (self.reads() - middle) / 4
                if rounds:
                    samples[key][0].append(forward)
                    samples[key][1].append(backward)
            rounds += 1
        self.pulses += self._beat.told("kernels")
        return {key: (summary(f), summary(b)) for key, (f, b) in samples.items()}

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


def _in_turn(call: Callable[..., object], arguments: list[Any]) -> Callable[[], object]:
    turns = itertools.cycle(arguments)
    return lambda: call(*next(turns))
