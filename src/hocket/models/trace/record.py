"""Recording: every operation of a model on fake tensors, forward and backward, as a graph.

A value is a storage: views of one tensor are the same value, with another offset or extent. The
batch and the sequence are two primes, so that a count of elements alone shows
whether it grows with tokens (B x S), with tokens times sequence (B x S x S), or not at all.

Attention goes to one stand-in for a flash kernel (it saves query, key, value, output and the
log-sum-exp of each row), and dropout to the fused operation of accelerators, whatever this CPU
would choose for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.spec.errors import ModelError


@dataclasses.dataclass(frozen=True)
class TracedSize:
    """Rows and tokens of each that are traced."""

    rows: int = 1009
    sequence: int = 1013

    @property
    def tokens(self) -> int:
        return self.rows * self.sequence

    @property
    def prime(self) -> bool:
        """Whether a count of elements alone tells what it grows with."""
        return self.rows == TracedSize.rows


PRIMES = TracedSize()
SHORTER = (457, 157, 73, 61, 37)
"""Sequences of models that have fewer positions: primes followed by twice a large prime, so that
hardly a width of a model is a multiple of either (`Value.square`); 127 and 31 are followed by
widths."""

MOST_OPERATIONS = 2000
"""Of the forward of one part; a block of attention and experts has some hundred."""

FEW_POSITIONS, FOR_FEW = 100, 6
"""So many times the operations are recorded where a sequence has few positions."""


class WrittenOut(ModelError):
    """A part has more operations than any that is not written out position by position."""


PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm", "grouped_mm_fallback"}
COPIES = {"clone", "_to_copy", "contiguous", "copy_", "repeat_interleave", "expand_copy"}
NORMS = {"rsqrt", "native_layer_norm", "_fused_rms_norm", "linalg_vector_norm", "native_group_norm"}


@dataclasses.dataclass(frozen=True)
class Ref:
    """A tensor: its value (storage), and where in it: offset and elements."""

    value: int
    offset: int
    numel: int


@dataclasses.dataclass(frozen=True)
class Value:
    """A storage: elements, bytes of one, and whether it can carry a gradient."""

    numel: int
    itemsize: int
    floating: bool
    traced: TracedSize = PRIMES

    @property
    def square(self) -> bool:
        """Scores: as many as the sequence has positions, or one more for an attention sink."""
        return self._width() is not None

    @property
    def by_token(self) -> bool:
        return self.numel % self.traced.tokens == 0

    @property
    def by_position(self) -> bool:
        """A table of floating-point numbers for each position of a sequence."""
        return self.floating and not self.by_token and self.numel % self.traced.sequence == 0

    @property
    def per_token(self) -> float:
        """Elements per token, and per token and position of the sequence where it is square."""
        return self.numel / (self.traced.tokens * (self._width() or 1))

    def _width(self) -> int | None:
        widths = (self.traced.sequence, self.traced.sequence + 1)
        return next((w for w in widths if self.numel % (self.traced.tokens * w) == 0), None)


@dataclasses.dataclass
class TracedOp:
    """One operation: what it reads and writes.

    `kind`: `product` (with a weight), `core` (a product of two activations), `attention`,
    `pointwise` (anything else). Products know `rows`, `n` and `k`, and the `weight` they use.
    """

    name: str
    kind: str
    path: str
    ins: tuple[Ref, ...]
    outs: tuple[Ref, ...]
    weight: str = ""
    n: int = 0
    k: int = 0
    rows: int = 0
    groups: int = 1
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class TracedPart:
    """What ran in one part of the model: the embedding, one block, the head."""

    traced: TracedSize = PRIMES
    forward: list[TracedOp] = dataclasses.field(default_factory=list)
    backward: list[TracedOp] = dataclasses.field(default_factory=list)
    saved: dict[int, int] = dataclasses.field(default_factory=dict)
    """Value to its bytes, of what autograd held."""
    inputs: list[Ref] = dataclasses.field(default_factory=list)
    outputs: list[Ref] = dataclasses.field(default_factory=list)
    last_save: int = 0
    """Operations that had run when autograd last saved something."""
    weight_gradients: set[int] = dataclasses.field(default_factory=set)
    """Values that its backward returns for parameters."""


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes operations into the part that is running.

    Args:
        parameters: every parameter of the model by name.
        traced: what is run.
        buffers: of its modules, which are there whether autograd holds them or not.
        computed: of the experts that a router chooses among, those that compute something.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        traced: TracedSize = PRIMES,
        *,
        buffers: Sequence[torch.Tensor] = (),
        computed: float = 1.0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computed = computed
        self.looping: set[str] = set()
        """Paths of modules that compute one expert after another."""
        self.parameters = {_key(p): name for name, p in parameters.items()}
        self.sizes = {name: p.numel() for name, p in parameters.items()}
        self.resident = {*self.parameters, *map(_key, buffers)}
        self.values: dict[int, Value] = {}
        self.traced = traced
        self.part = TracedPart(traced)
        self.path: list[str] = [""]
        self.in_backward = False
        self.paused = False
        self._kept: list[torch.Tensor] = [*parameters.values(), *buffers]

    def ref(self, tensor: torch.Tensor) -> Ref:
        """The reference of a tensor, whose storage is then kept from being reused."""
        key = _key(tensor)
        if key not in self.values and key not in self.parameters:
            self._kept.append(tensor)
            storage = tensor.untyped_storage()
            self.values[key] = Value(
                numel=storage.nbytes() // tensor.element_size(),
                itemsize=tensor.element_size(),
                floating=tensor.dtype.is_floating_point,
                traced=self.traced,
            )
        return Ref(key, int(tensor.storage_offset()), tensor.numel())

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Hook on what autograd saves."""
        key = _key(tensor)
        if not self.in_backward:
            self.part.last_save = len(self.part.forward)
        if key not in self.resident and not self.in_backward:
            self.ref(tensor)
            self.part.saved[key] = tensor.untyped_storage().nbytes()
        return tensor

    def _inside_loop(self) -> bool:
        return any(f"{self.path[-1]}.".startswith(f"{path}.") for path in self.looping)

    def add(self, op: TracedOp) -> None:
        """Append to the running part. Raises WrittenOut where a recurrence goes on and on."""
        (self.part.backward if self.in_backward else self.part.forward).append(op)
        most = MOST_OPERATIONS * (1 if self.traced.sequence > FEW_POSITIONS else FOR_FEW)
        if len(self.part.forward) > most:
            raise WrittenOut(
                f"more than {most} operations in {op.path or 'one part'}, for "
                f"{self.traced.sequence} positions: one position is too much to be traced"
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._chosen(func, args)
        if result is None:
            result = func(*args, **(kwargs or {}))
        if not self.paused:
            self._record(func, args, kwargs or {}, result)
        return result

    def _chosen(self, func: Any, args: Any) -> Any:
        """What a loop over the experts that were chosen reads: one expert, of which all choices
        are, so that the loop is recorded as one grouped matmul. None: it reads no such thing."""
        if func is torch.ops.aten._local_scalar_dense.default and self.path[-1] in self.looping:
            return 0
        if func is not torch.ops.aten.nonzero.default:
            return None
        (mask,) = args
        if mask.dim() == 2 and self.path[-1] in self.looping:
            each = max(1, round(mask.numel() / self.traced.tokens * self.computed))
            return mask.new_zeros((each * self.traced.tokens, 2), dtype=torch.long)
        if mask.dim() == 1 and mask.numel() % self.traced.sequence:
            self.looping.add(self.path[-1])
            return mask.new_zeros((1, 1), dtype=torch.long)
        return None

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        given = list(_tensors((args, kwargs)))
        outs = list(_tensors(result))
        if not given or not outs:
            for tensor in outs:
                self.ref(tensor)
            return
        keys = {_key(t) for t in given}
        if not func._schema.is_mutable and all(_key(t) in keys for t in outs):
            return  # a view: the same value
        name = func._schema.name.split("::")[1]
        if name == "index" and _key(given[0]) in self.parameters and self._inside_loop():
            self.parameters[_key(outs[0])] = self.parameters[_key(given[0])]
            self._kept.append(outs[0])
            return  # an expert's weights, of those of all
        op = TracedOp(
            name=name,
            kind="pointwise",
            path=self.path[-1],
            ins=tuple(self.ref(t) for t in given if _key(t) not in self.parameters),
            outs=tuple(self.ref(t) for t in outs if _key(t) not in self.parameters),
        )
        if not op.outs:
            return
        if name in PRODUCTS:
            _product(op, name, given, self.parameters)
            if op.weight and self._inside_loop():
                op.groups = self.sizes[op.weight] // (op.n * op.k)
        elif used := [self.parameters[k] for k in keys if k in self.parameters]:
            op.weight = used[0]
        self.add(op)


def _product(
    op: TracedOp, name: str, given: list[torch.Tensor], parameters: Mapping[int, str]
) -> None:
    left, right = given[:2] if name not in ("addmm", "baddbmm") else given[1:3]
    used = [t for t in (right, left) if _key(t) in parameters]
    op.kind = "product" if used else "core"
    if used:
        op.weight = parameters[_key(used[0])]
    if used and used[0] is left:
        left, right = right.transpose(-1, -2), left.transpose(-1, -2)
    if name == "linear":
        right = right.t()
    op.k, op.n = int(right.shape[-2]), int(right.shape[-1])
    op.rows = left.numel() // op.k
    if name in ("_grouped_mm", "grouped_mm_fallback"):
        op.groups = int(right.shape[0])
        if int(left.shape[-1]) != op.k:  # weights stored [E, n, k]
            op.k, op.n = op.n, op.k
            op.rows = left.numel() // op.k


_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class TracedKernels(TorchFunctionMode):
    """Sends attention and dropout to what an accelerator would run. `asked`: modules that asked
    transformers for their attention, which a GPU computes without a mask."""

    def __init__(self, recorder: OpRecorder, asked: Sequence[object]) -> None:
        super().__init__()
        self.recorder = recorder
        self.asked = asked

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is torch.nn.functional.dropout:
            return self._dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(_ATTENTION, args, strict=False)) | kwargs
        inputs = (given["query"], given["key"], given["value"])
        details = {
            "dropout": given.get("dropout_p", 0.0),
            "masked": given.get("attn_mask") is not None and not self.asked,
        }
        return Flash.apply(*inputs, (self.recorder, details))  # type: ignore[no-untyped-call]

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0:
            return input
        return torch.native_dropout(input, p, True)[0]


class Flash(torch.autograd.Function):
    """A flash kernel's sizes: [B, heads, S, d] of query, key and value to [B, heads, S, d_v]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: tuple[OpRecorder, dict[str, Any]],
    ) -> torch.Tensor:
        recorder, details = context
        recorder.paused = True
        batch, heads, rows = (int(n) for n in query.shape[:3])
        # The layout the kernel writes: heads of a token side by side, as the next product reads.
        output = query.new_empty(batch, rows, heads, int(value.shape[-1])).transpose(1, 2)
        sums = query.new_empty(batch, heads, rows, dtype=torch.float32)
        recorder.paused = False
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.recorder = recorder
        recorder.add(
            TracedOp(
                name="attention",
                kind="attention",
                path=recorder.path[-1],
                ins=(recorder.ref(query), recorder.ref(key), recorder.ref(value)),
                outs=(recorder.ref(output), recorder.ref(sums)),
                details={
                    "heads": heads,
                    "kv_heads": int(key.shape[1]),
                    "head_dim": int(query.shape[-1]),
                    "value_dim": int(value.shape[-1]),
                    **details,
                },
            )
        )
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        recorder = ctx.recorder
        query, key, value, _, _ = ctx.saved_tensors
        recorder.paused = True
        found = tuple(torch.empty_like(t) for t in (query, key, value))
        recorder.paused = False
        recorder.add(
            TracedOp(
                name="attention",
                kind="attention",
                path="",
                ins=(recorder.ref(grads[0]),),
                outs=tuple(recorder.ref(t) for t in found),
            )
        )
        return (*found, None)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors(item)
