"""SequencePlan of any model: what sequence parallelism needs, tried on its proxy model.

Nothing is trusted: a forward of the proxy is recorded, then runs again on one of two shards of
its sequences, with what the other ranks would have given put in from the notes.

    a block is about to run     its input must be the slice of what was noted; it is given the whole
    a row product, experts      their output is cut to the slice
    the output head             as a block: its logits must be those that were noted

What a decoder computes from the length of its input (masks, rotary tables, position embeddings)
shows there, and so does whatever mixes tokens outside of the blocks that are split.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hocket.models.failure import raise_if_exhausted
from hocket.models.masks import of_whole_sequences
from hocket.models.plans.tensor import tensor_plan
from hocket.models.proxy import ProxyModel
from hocket.spec.errors import ModelError
from hocket.spec.plan import SequencePlan, Split, StagePlan, TensorPlan, matched

_ROWS, _LENGTH, _RANKS = 2, 16, 2
_TOLERANCE = 1e-4
"""Of the largest entry: sums of fewer rows are rounded in another order."""


def sequence_plan(
    proxy: ProxyModel | None, whole: nn.Module, tensor: TensorPlan | None, stages: StagePlan | None
) -> SequencePlan:
    """How a model runs on slices of its sequences between blocks that are split over tensor ranks.

    Args:
        proxy: the tiny proxy model of the model.
        whole: the real model; only its names are read.
        tensor, stages: its plans.

    Raises:
        ModelError: it does not, with the reason.
    """
    if proxy is None or tensor is None or stages is None:
        raise ModelError("it cannot be split over tensor ranks, or its layers are not a list")
    of_whole_sequences()
    model: Any = proxy.build()
    split, note = tensor_plan(model, stages.decoder, proxy, stages.layers)
    if split is None:
        raise ModelError(f"its tiny proxy model cannot be split: {note}")
    plan = _plan(model, split, stages)
    _require_split_attention(model, plan, stages)
    for block in plan.blocks:
        if _gathers(split, model, block):
            raise ModelError(
                f"{block} gathers the outputs of its split matmuls, and computes on "
                f"whole sequences "
                "from there on"
            )
    for name in plan.embedders:
        if hasattr(model.get_submodule(name), "create_position_ids_from_input_ids"):
            raise ModelError(
                f"{name} counts positions from token ids, of which padding has none, and is given "
                "a sequence shard"
            )
    trial = _Trial(model, split, plan, stages)
    reasons = []
    for mask in (False, True):
        try:
            trial.run(mask)
        except ModelError as error:
            reasons.append(error.message)
            continue
        except Exception as error:  # a forward of any family may fail in its own way
            raise_if_exhausted(error)
            reasons.append(trial.why(error))
            continue
        found = _plan(whole, tensor, stages, mask)
        _require_split_attention(whole, found, stages)  # its projections may have been replaced
        return found
    raise ModelError(reasons[0])


def _plan(model: Any, tensor: TensorPlan, stages: StagePlan, mask: bool = False) -> SequencePlan:
    names = {id(module): name for name, module in model.named_modules()}
    embedding = names.get(id(model.get_input_embeddings()))
    if embedding is None:
        raise ModelError("its token embedding is not a separate module")
    columns = [n for n in names.values() if _style(tensor.splits, n) == "column"]
    blocks = dict.fromkeys(name.rpartition(".")[0] for name in columns)
    heads = [name for name in stages.head if _style(tensor.splits, name) != "vocab_head"]
    return SequencePlan(
        embedding=embedding,
        # Where a layer itself holds the linear layers, they gather on their own.
        blocks=tuple(b for b in blocks if b.rpartition(".")[0] != stages.layers),
        positions=stages.positions,
        embedders=tuple(n for n in stages.before if _embeds(model.get_submodule(n))),
        replicated=tuple(heads),
        mask=mask,
    )


def _embeds(module: nn.Module) -> bool:
    """Whether a module embeds the hidden state that it is given, and adds what positions ask for
    (BERT)."""
    return {"inputs_embeds", "position_ids"} <= set(inspect.signature(module.forward).parameters)


def _gathers(tensor: TensorPlan, model: nn.Module, block: str) -> bool:
    """Whether all that a block's split products return is gathered: it is whole from there on."""
    names = (f"{block}.{name}" for name, _ in model.get_submodule(block).named_children())
    found = [matched(tensor.splits, name) for name in names]
    return all(s.gather_output for s in found if s is not None and s.style == "column")


def _attention(model: nn.Module, stages: StagePlan) -> list[str]:
    """The modules that attend, as far as they are known."""
    names = [name for name, _ in model.named_modules() if name.startswith(f"{stages.layers}.")]
    own = {name: name[len(stages.layers) + 1 :].partition(".")[2] for name in names}
    return [name for name in names if own[name] in stages.cores]


def _require_split_attention(model: nn.Module, plan: SequencePlan, stages: StagePlan) -> None:
    for name in _attention(model, stages):
        if not any(f"{name}.".startswith(f"{block}.") for block in plan.blocks):
            raise ModelError(f"{name} is replicated on every rank, and attends to whole sequences")


def _style(splits: Mapping[str, Split], name: str) -> str:
    split = matched(splits, name)
    return "" if split is None else split.style


class _Trial:
    """The proxy model, run whole and then on slices."""

    def __init__(
        self, model: Any, tensor: TensorPlan, plan: SequencePlan, stages: StagePlan
    ) -> None:
        self.model, self.plan, self.stages = model, plan, stages
        self.modules = dict(model.named_modules())
        self.entered: dict[str, tuple[Any, ...]] = {}
        self.index = 0
        styles = {name: _style(tensor.splits, name) for name in self.modules}
        inside = {n for n, s in styles.items() if s == "column"}
        self.entries = [
            *plan.blocks,
            *(n for n in sorted(inside) if n.rpartition(".")[0] not in plan.blocks),
            *(n for n, s in styles.items() if s == "experts"),
            *(n for n in stages.head if n in self.modules),
        ]
        self.exits = [n for n, s in styles.items() if s in ("row", "experts")]
        self.inputs = {
            "input_ids": torch.arange(3, 3 + _ROWS * _LENGTH).view(_ROWS, _LENGTH),
            "position_ids": torch.arange(_LENGTH).expand(_ROWS, -1).contiguous(),
            "attention_mask": torch.ones(1, 1, dtype=torch.long).expand(_ROWS, _LENGTH),
        }
        self.running: list[str] = []
        noted = [*self.entries, *plan.positions]
        with torch.no_grad():
            self.logits = self._hooked({n: self._note(n) for n in noted}, {}, whole=True)
        for name in plan.positions:
            known = inspect.signature(self.modules[name].forward).parameters
            if "position_ids" not in known and self.entered[name][0] is self.inputs["input_ids"]:
                raise ModelError(f"{name} embeds the tokens, but receives a sequence shard of them")
        for name in self.entries:
            if name.startswith(f"{stages.layers}."):
                given = self.entered.get(name)
                if given and tuple(given[0].shape[:2]) == (_LENGTH, _ROWS):
                    raise ModelError(
                        f"{name} receives [sequence, rows, hidden size]; sequences are sharded as "
                        "[rows, sequence, hidden size]"
                    )

    def why(self, error: Exception) -> str:
        """Why a forward on a slice failed: said of the module in which it did."""
        where = self.running[-1] if self.running else ""
        layers = f"{self.stages.layers}."
        if where.startswith(layers) and where[len(layers) :].count("."):
            block = next((b for b in self.plan.blocks if f"{where}.".startswith(f"{b}.")), None)
            if block is None:
                return f"{where} is replicated on every rank and works on whole sequences"
            return (
                f"{block} receives whole sequences and values that its model makes for as "
                "many tokens as a sequence shard has"
            )
        if where in self.plan.positions:
            return f"{where} cannot be given the positions of whole sequences"
        name = where or type(self.model).__name__
        if where.startswith(layers):
            return f"{name} combines whole sequences and sequence shards"
        return (
            f"{name} combines values at the positions of whole sequences with a sequence shard, "
            "where no module of its own can be cut"
        )

    def _enter(self, name: str) -> Any:
        def before(module: nn.Module, args: Any) -> None:
            self.running.append(name)

        return before

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        del self.running[-1:]

    @torch.no_grad()
    def run(self, mask: bool) -> None:
        """Each slice in turn. Raises ModelError where a module is given something else."""
        for self.index in reversed(range(_RANKS)):
            logits = self._hooked(
                {n: self._replace(n) for n in self.entries}
                | {n: self._positions(n) for n in (*self.plan.positions, *self.plan.embedders)},
                {n: self._cut_output(n) for n in (*self.exits, *self.plan.positions)},
                mask=mask,
            )
            self._same("its output", logits, self.logits)

    def _hooked(
        self, before: Mapping[str, Any], after: Mapping[str, Any], *, whole: bool = False,
        mask: bool = False,
    ) -> Tensor:  # fmt: skip
        modules = self.modules
        handles = [m.register_forward_pre_hook(self._enter(n)) for n, m in modules.items()]
        handles += [
            modules[n].register_forward_pre_hook(h, with_kwargs=True) for n, h in before.items()
        ]
        handles += [modules[n].register_forward_hook(h) for n, h in after.items()]
        handles += [m.register_forward_hook(self._leave) for m in modules.values()]
        try:
            return self._call(whole, mask)
        finally:
            for handle in handles:
                handle.remove()

    def _call(self, whole: bool, mask: bool) -> Tensor:
        self.running.clear()
        accepted = inspect.signature(self.model.forward).parameters
        given = {n: v for n, v in self.inputs.items() if n in accepted and n != "attention_mask"}
        if whole:  # as a model is called that nobody has split
            given.pop("position_ids", None)
        else:
            embeds = _looked_up(self.modules[self.plan.embedding], given.pop("input_ids"))
            given[self.stages.hidden_argument] = self._cut(embeds)
            if mask:
                given["attention_mask"] = self.inputs["attention_mask"]
        logits: Tensor = self.model(**given, use_cache=False).logits
        return logits

    # --- what happens at the ends of blocks ----------------------------------------------------

    def _note(self, name: str) -> Any:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.entered[name] = _tensors(module, args, kwargs)

        return before

    def _replace(self, name: str) -> Any:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            many = name in self.exits  # experts take tokens, choices and weights
            if name not in self.entered:
                raise ModelError(f"{name} runs on a part of a sequence alone, and not on the whole")
            noted = self.entered[name]
            found = _tensors(module, args, kwargs)
            first = next(iter(inspect.signature(module.forward).parameters))
            if not many:
                self._same(f"the input of {name}", found[0], self._cut(noted[0]))
                if args:
                    return (noted[0], *args[1:]), kwargs
                return args, {**kwargs, first: noted[0]}
            for one, other in zip(found, noted, strict=True):
                self._same(f"the input of {name}", one, self._cut(other))
            return noted, {}

        return before

    def _positions(self, name: str) -> Any:
        """As `runtime.tensor_parallel.sequence` tells positions: whole ones where what is added is
        cut, this slice's own where a slice is embedded."""
        names = list(inspect.signature(self.modules[name].forward).parameters)
        count = _LENGTH // _RANKS

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if "position_ids" not in names:
                return None
            at = names.index("position_ids")
            given = args[at] if at < len(args) else kwargs.get("position_ids")
            if name in self.plan.embedders:
                own = self.inputs["position_ids"][:1].narrow(-1, self.index * count, count)
                if given is not None and given.shape[-1] == _LENGTH:
                    own = given.narrow(-1, self.index * count, count)
            elif given is None or given.shape[-1] == count:
                own = torch.arange(_LENGTH)
            else:
                return None
            return args[:at], {**kwargs, "position_ids": own}

        return before

    def _cut_output(self, name: str) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> Any:
            if not isinstance(output, Tensor):
                raise ModelError(
                    f"{name} returns more than one tensor, and cannot be sharded by sequence"
                )
            return self._cut(output)

        return after

    def _cut(self, x: Tensor) -> Tensor:
        """This slice of [B, S, ...] or of [B S, ...]."""
        count = _LENGTH // _RANKS
        if x.ndim == 2 and x.shape[0] == _ROWS * _LENGTH:
            cut = x.view(_ROWS, _LENGTH, -1).narrow(1, self.index * count, count)
            return cut.reshape(-1, x.shape[-1])
        return x.narrow(-2, self.index * count, count).contiguous()

    def _same(self, what: str, found: Tensor, wanted: Tensor) -> None:
        if found.shape != wanted.shape:
            raise ModelError(
                f"{what} is {tuple(found.shape)} where sequences are cut, not {tuple(wanted.shape)}"
            )
        off = float((found.float() - wanted.float()).abs().max())
        if not off <= _TOLERANCE * max(1e-3, float(wanted.float().abs().max())):
            raise ModelError(f"{what} is not the sequence shard of its value on whole sequences")


def _looked_up(module: nn.Module, ids: Tensor) -> Tensor:
    """What an embedding returns."""
    found: Tensor = module(ids)
    return found


def _tensors(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The tensors that a module is given, its first argument first."""
    first = next(iter(inspect.signature(module.forward).parameters))
    if not args:
        return (kwargs[first],)
    return tuple(a for a in args if isinstance(a, Tensor))
