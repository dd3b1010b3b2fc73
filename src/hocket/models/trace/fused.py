"""What one part costs with fused kernels: products, attention, memory-bound kernels, bytes held.

A product holds its activation input, attention its three inputs and its output, a norm its input
and a statistic a row, the loss its log-softmax in fp32; a region holds what its saved tensors can
be computed from again. Attention without a flash kernel is recorded with it (view `core`).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from hocket.models.trace import eager
from hocket.models.trace.graph import INSIDE, OUTSIDE, VOCAB, Graph, short
from hocket.models.trace.record import Ref, TracedOp
from hocket.spec.model_shape import Attention, MatrixProduct, MemoryBound, Saved


class Costs(Graph):
    """The costs of one part."""

    def products(self) -> tuple[MatrixProduct, ...]:
        """Every product with a weight, in order."""
        found = []
        # Stacked experts are done when their module is, with the last of its products.
        done = {op.path: at for at, op in enumerate(self.part.forward)}
        last = {op.path: op for op in self.part.forward if op.kind == "product"}
        for op in self.part.forward:
            if op.kind != "product" or op.rows % self.part.traced.tokens:
                continue
            read = [self.source(ref.value) for ref in op.ins if ref.value in self.carrying]
            found.append(
                MatrixProduct(
                    name=short(op.path) or short(op.weight),
                    n=op.n,
                    k=op.k,
                    split=self.splits.product(op.weight),
                    count=op.rows / self.part.traced.tokens,
                    groups=op.groups,
                    input=self.value_name(read[-1]) if read else "",
                    bare=op.path not in self.linear,
                    gathered=op.weight in self.splits.gathers,
                    ends=op is last[op.path] and done[op.path] >= self.part.last_save,
                )
            )
        return tuple(found)

    def attention(self) -> tuple[Attention, ...]:
        """Every attention core, whether a flash kernel or written out as two products."""
        found = []
        cores = [op for op in self.part.forward if op.kind == "core"]
        for op in self.part.forward:
            if op.kind == "attention":
                kv_heads = int(op.details["kv_heads"])
                if op.ins[1].value in self.alias and 0 < self.kv_heads < kv_heads:
                    kv_heads = self.kv_heads
                found.append(
                    Attention(
                        name=short(op.path),
                        heads=op.details["heads"],
                        kv_heads=kv_heads,
                        head_dim=op.details["head_dim"],
                        value_dim=op.details["value_dim"],
                        window=self.window,
                        split=self.labels.get(op.outs[0].value, OUTSIDE),
                        masked=op.details["masked"],
                    )
                )
        for first, second in zip(cores[::2], cores[1::2], strict=False):
            scores = self.values[first.outs[0].value]
            if not scores.square:
                continue
            heads = round(scores.per_token)
            found.append(
                Attention(
                    name=short(first.path),
                    heads=heads,
                    kv_heads=self.kv_heads or heads,
                    head_dim=first.k,
                    value_dim=second.n,
                    window=self.window,
                    split=self.labels.get(second.outs[0].value, OUTSIDE),
                )
            )
        return tuple(found)

    def memory_bound(self) -> tuple[MemoryBound, ...]:
        """Kernels of the fused view that are neither products nor attention."""
        found = [self._kernel(unit) for unit in self.units if unit[0].kind == "pointwise"]
        return tuple(_merged([kernel for kernel in found if kernel] + self._gradients()))

    def _kernel(self, unit: list[TracedOp]) -> MemoryBound | None:
        """One kernel's elements; None where it only makes what nobody reads."""
        reads, writes = self.edges(unit)
        read, written = sum(reads.values()), sum(writes.values())
        if unit[0].path == "loss":
            wide = 2 * read  # the log-softmax in fp32
            forward, backward = read + wide, wide + read
        elif not writes:
            return None
        else:
            masks = self._masks(unit)
            looked_up = sum(
                self.elements(r.value) for o in unit if o.name == "embedding" for r in o.outs
            )
            forward = read + written + masks + looked_up
            backward = 2.0 * looked_up
            if unit[0].path in self.norms:
                changed, held = read, read
            else:
                added = self._added(unit, writes)
                changed = sum(size for value, size in reads.items() if value not in added)
                held = sum(reads.get(v, self.elements(v)) for v in self._held(unit))
            if changed or held:
                backward += written + changed + held + masks
        return MemoryBound(
            name=self.unit_name(unit),
            forward=forward,
            backward=backward,
            split=self.side([*reads, *writes]),
            backward_kernels=1 if backward else 0,
        )

    def _gradients(self) -> list[MemoryBound]:
        """What only a backward does: gradients of biases, sums where a tensor had more readers."""
        readers: collections.Counter[int] = collections.Counter()
        for unit in self.units:
            readers.update(self.edges(unit)[0])  # type: ignore[arg-type]
        found = []
        for label in (OUTSIDE, INSIDE):
            biases = [
                op.n * op.rows / self.part.traced.tokens
                for op in self.part.forward
                if op.name == "addmm" and self.labels.get(op.outs[0].value) == label
            ]
            # Readers of disjoint views need no sum: whole readings less one.
            sums = {
                value: int(size / self.elements(value) + 1e-6) - 1
                for value, size in readers.items()
                if self.labels.get(value, OUTSIDE) == label
            }
            summed = sum(3 * n * self.elements(v) for v, n in sums.items() if n > 0)
            for name, elements, kernels in (
                ("bias gradients", sum(biases), len(biases)),
                ("gradient sums", summed, sum(n for n in sums.values() if n > 0)),
            ):
                if kernels:
                    found.append(
                        MemoryBound(
                            name=name,
                            forward=0.0,
                            backward=elements,
                            split=label,
                            kernels=0,
                            backward_kernels=kernels,
                        )
                    )
        return found

    def unfused(self) -> tuple[MemoryBound, ...]:
        """The same work operation by operation, and what attention adds without a flash kernel."""
        return (*self._core_kernels(), *eager.eager_elements(self))

    def saved(self) -> tuple[Saved, ...]:
        """What is held from forward to backward."""
        found: list[Saved] = []
        taken: dict[int, str] = {}
        rows: dict[tuple[str, str], float] = collections.defaultdict(float)
        extents: dict[int, set[tuple[int, int]]] = collections.defaultdict(set)

        def hold(ref: Ref, name: str) -> None:
            value = self.source(ref.value)
            if not self.activation(value):
                return
            taken.setdefault(value, "input" if value in self.given else name)
            whole = self.values[value].numel
            extents[value].add((ref.offset, ref.numel) if value == ref.value else (0, whole))

        for unit in self.units:
            op = unit[0]
            if op.path == "loss":
                reads, _ = self.edges(unit)
                rows["logits", VOCAB] += 4 * sum(self.values[v].per_token for v in reads)
            elif op.kind == "product":
                for ref in op.ins:
                    hold(ref, f"{self.unit_name(unit)} input")
            elif op.kind == "attention":
                for ref, what in zip(op.ins, ("query", "key", "value"), strict=False):
                    hold(ref, f"{short(op.path)} {what}")
                hold(op.outs[0], f"{short(op.path)} output")
                sums = self.values[op.outs[1].value].per_token
                rows[f"{short(op.path)} row sums", self.side([op.outs[0].value])] += 4 * sums
            elif op.kind == "core":
                for ref in (*op.ins, *op.outs):
                    hold(ref, f"{short(op.path)} core")
            elif op.path in self.norms:
                reads, _ = self.edges(unit)
                kept = 2 if any(o.name == "native_layer_norm" for o in unit) else 1
                for value in reads:
                    hold(Ref(value, 0, self.values[value].numel), f"{short(op.path)} input")
                statistic = min(
                    (self.values[r.value].per_token for o in unit for r in o.outs
                     if self.values[r.value].by_token), default=0.0)  # fmt: skip
                label = self.side(reads)
                rows[f"{short(op.path)} statistics", label] += 4 * kept * statistic
        for unit in self.units:
            op = unit[0]
            if op.kind != "pointwise" or op.path == "loss" or op.path in self.norms:
                continue
            for value in self._held(unit):
                if value not in taken:
                    hold(Ref(value, 0, self.values[value].numel), self.unit_name(unit))
            masks = self._masks(unit)
            if masks:
                rows[f"{self.unit_name(unit)} dropout mask", self.side(
                    [r.value for o in unit for r in o.outs])] += 2 * masks  # fmt: skip
        for value, name in taken.items():
            held = self.values[value]
            numel = min(held.numel, sum(n for _, n in extents[value]))
            share = numel / held.numel
            rows[name, self.labels.get(value, OUTSIDE)] += held.per_token * held.itemsize * share
        found += [
            Saved(name=name, bytes=amount, split=label, view="fused")
            for (name, label), amount in rows.items()
        ]
        return (*found, *self._core_saved(), *eager.saved(self), *eager.backward(self))

    def _added(self, unit: list[TracedOp], writes: Mapping[int, float]) -> set[int]:
        """Inputs of a region that are only added to its output: their gradient is the output's."""
        return {
            self.source(ref.value)
            for op in unit
            if op.name == "add" and op.outs[0].value in writes
            for ref in op.ins
        }

    def _held(self, unit: list[TracedOp]) -> list[int]:
        """Values a region's backward needs: what its saved tensors can be computed from again."""
        made = {ref.value for op in unit for ref in op.outs}
        touched = {ref.value for op in unit for ref in (*op.ins, *op.outs)}
        wanted = [v for v in self.part.saved if v in touched and v not in self.anchored]
        reads, _ = self.edges(unit)
        found: dict[int, None] = {}
        for value in wanted:
            if value in made:
                for ref in self._origins(value, made):
                    found[ref] = None
            elif (source := self.source(value)) in reads:
                found[source] = None
        return [v for v in found if self.activation(v)]

    def _origins(self, value: int, made: set[int]) -> list[int]:
        """Activations from outside a region that a value inside it was computed from."""
        found: list[int] = []
        seen, ahead = {value}, [value]
        while ahead:
            value = ahead.pop()
            op = self.maker[value]
            if op.name == "native_dropout" and not self.values[value].floating:
                continue  # a mask, which is held itself
            for ref in op.ins:
                source = self.source(ref.value)
                if source not in made:
                    found.append(source)
                elif source not in seen and source not in self.anchored:
                    seen.add(source)
                    ahead.append(source)
        return found

    def _masks(self, unit: list[TracedOp]) -> float:
        """Elements (of two bytes) of dropout masks."""
        return sum(
            self.values[ref.value].per_token / 2
            for op in unit
            if op.name == "native_dropout"
            for ref in op.outs[1:]
        )

    def uneven(self) -> bool:
        """`eager.uneven` of the part."""
        return eager.uneven(self)

    def _core_saved(self) -> list[Saved]:
        found = []
        for core, dropout in self._cores():
            pieces = [("probabilities", 2.0)]
            if dropout:
                pieces += [("dropout mask", 1.0), ("dropped probabilities", 2.0)]
            found += [
                Saved(name=f"{core.name} {what}", bytes=size * core.heads, split=core.split,
                      square=True, view="core", selective=True)
                for what, size in pieces
            ]  # fmt: skip
        return found

    def _core_kernels(self) -> list[MemoryBound]:
        """Scores written and read, softmax, dropout, probabilities read: times S."""
        return [
            MemoryBound(
                name=f"{core.name} softmax",
                forward=(6.5 if dropout else 4.0) * core.heads,
                backward=(9.5 if dropout else 7.0) * core.heads,
                split=core.split,
                kernels=2 if dropout else 1,
                backward_kernels=2 if dropout else 1,
                square=True,
                view="core",
            )
            for core, dropout in self._cores()
        ]

    def _cores(self) -> list[tuple[Attention, bool]]:
        flash = [bool(o.details["dropout"]) for o in self.part.forward if o.kind == "attention"]
        written = any(
            op.name == "native_dropout" and self.values[op.outs[0].value].square
            for op in self.part.forward
        )
        found = self.attention()
        flags = [*flash, *([written] * (len(found) - len(flash)))]
        return list(zip(found, flags, strict=True))


def _merged(kernels: list[MemoryBound]) -> list[MemoryBound]:
    """Kernels of one name and split as one entry."""
    found: dict[tuple[str, str], MemoryBound] = {}
    for kernel in kernels:
        key = (kernel.name, kernel.split)
        if key in found:
            old = found[key]
            kernel = dataclasses.replace(
                old,
                forward=old.forward + kernel.forward,
                backward=old.backward + kernel.backward,
                kernels=old.kernels + kernel.kernels,
                backward_kernels=old.backward_kernels + kernel.backward_kernels,
            )
        found[key] = kernel
    return list(found.values())
