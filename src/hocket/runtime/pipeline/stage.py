"""Stage: one cut of a model, called with what its place in the pipeline asks for.

    first   decoder(input_ids, position_ids)        -> hidden [B, S, H], behind its last layer
    middle  decoder(inputs_embeds, ...), hidden taking the place of what comes to its first layer
                                                    -> hidden [B, S, H], behind its last layer
    last    model(inputs_embeds, ...), the same     -> logits -> loss_fn -> (sum, tokens)

On slices of the sequence every stage is called as a middle one is: the first looks its tokens up
before, and all see whole sequences by their positions.

Legend: B batch, S sequence, H hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.context_parallel.split import running
from hocket.runtime.pipeline.cut import taps
from hocket.spec.errors import OptionError
from hocket.spec.placement import Placement
from hocket.spec.plan import SequencePlan, StagePlan

Microbatch = Mapping[str, Tensor]
LossFunction = Callable[[Any, Microbatch], tuple[Tensor, "Tensor | int"]]


class Stage:
    """One stage of a pipeline on this rank.

    Attributes:
        module: the cut model; its parameter names are the whole model's.
        index, num_stages: place in the pipeline.
        plan: how the model was cut. None: it is whole (`num_stages` is 1).
        placements: where each parameter lies in the whole, by name.
        loss_fn: `(output, microbatch) -> (sum of losses, number of tokens)`, on the last stage.
        hidden_size: H of what travels between stages. None: only needed with several stages.
        slices: with sequence parallelism, how the model runs on slices and over how many ranks
            sequences are dealt; the hidden state is then [B, S / ranks, H]. Else None.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int = 0,
        num_stages: int = 1,
        *,
        plan: StagePlan | None = None,
        placements: dict[str, Placement] | None = None,
        loss_fn: LossFunction | None = None,
        hidden_size: int | None = None,
        slices: tuple[SequencePlan, int] | None = None,
    ) -> None:
        assert slices is None or plan is not None
        assert num_stages == 1 or plan is not None
        self.module = module
        self.index = index
        self.num_stages = num_stages
        self.plan = plan
        self.placements = placements if placements is not None else {}
        self.loss_fn = loss_fn
        self.hidden_size = hidden_size
        self._dtype: torch.dtype | None = None
        self.slices = slices
        whole = self.is_last or plan is None
        self._target = module if whole else module.get_submodule(_plan(plan).decoder)
        input_argument = plan.input_argument if plan is not None else "input_ids"
        self._hidden_argument = plan.hidden_argument if plan is not None else "inputs_embeds"
        names = inspect.signature(self._target.forward).parameters
        # A forward that names its arguments gets those it names; one that takes anything, all.
        self._accepts = set(names) if input_argument in names else None
        self._input_argument = input_argument
        self._constants = {"use_cache": False} if "use_cache" in names else {}
        self._coming, self._going = (
            taps(module, plan, first=self.is_first, last=self.is_last)
            if plan is not None and num_stages > 1
            else (None, None)
        )
        self._ids: Tensor | None = None
        if not self.is_first and plan is not None and plan.tokens:
            for layer in module.get_submodule(plan.layers).children():
                layer.register_forward_pre_hook(self._give_tokens, with_kwargs=True)

    def _give_tokens(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A hook before a layer that reads token ids: where the model is given a hidden state, its
        own code has none to hand on."""
        return args, {**kwargs, _plan(self.plan).tokens: self._ids}

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the hidden state: that of the first floating-point parameter."""
        if self._dtype is None:
            wide = (p for p in self.module.parameters() if p.element_size() > 1)  # not in 8 bits
            floating = (p.dtype for p in wide if p.is_floating_point())
            self._dtype = next(floating, torch.get_default_dtype())
        return self._dtype

    def hidden_shape(self, microbatch: Microbatch) -> tuple[int, ...]:
        """Shape of the hidden state that belongs to `microbatch`: (B, S, H), or with several
        streams (B, S, streams, H) or (B, S, streams H)."""
        assert self.hidden_size is not None, "a pipeline of several stages needs hidden_size"
        rows, length = self._tokens(microbatch).shape[:2]
        ranks = 1 if self.slices is None else self.slices[1]
        streams = self.plan.streams if self.plan is not None else 0
        if streams and _plan(self.plan).flat_streams:
            return (rows, length // ranks, streams * self.hidden_size)
        return (rows, length // ranks, *((streams,) if streams else ()), self.hidden_size)

    def _tokens(self, microbatch: Microbatch) -> Tensor:
        tokens = microbatch.get(self._input_argument)
        return next(iter(microbatch.values())) if tokens is None else tokens

    def inputs(self, microbatch: Microbatch, hidden: Tensor | None) -> dict[str, Any]:
        """The keyword arguments of this stage's call."""
        arguments: dict[str, Any] = {
            name: value
            for name, value in microbatch.items()
            if name != "labels" and (self._accepts is None or name in self._accepts)
        }
        if self.slices is not None:
            hidden = self._sliced(microbatch, arguments, *self.slices, hidden)
        if hidden is not None or not self.is_first:
            arguments.pop(self._input_argument, None)
            if self._coming is not None and hidden is not None:
                # What the model makes of its input is not looked at: zeros that take no memory,
                # unless the model writes there.
                shape = (*hidden.shape[:2], self.hidden_size or hidden.shape[-1])
                zeros = hidden.new_zeros(shape if _plan(self.plan).overwrites else 1)
                arguments[self._hidden_argument] = zeros.expand(shape)
            else:
                arguments[self._hidden_argument] = hidden
        return {**self._constants, **arguments}

    def _sliced(
        self,
        microbatch: Microbatch,
        arguments: dict[str, Any],
        plan: SequencePlan,
        ranks: int,
        hidden: Tensor | None,
    ) -> Tensor:
        """This rank's slice of the hidden state; `arguments` are given the whole length."""
        tokens = self._tokens(microbatch)
        rows, length = tokens.shape[:2]
        if length % ranks:
            raise OptionError(
                f"sequences of {length} tokens do not divide over tp {ranks}, as sequence "
                "parallelism needs",
                hint=f"--seq-len {length - length % ranks or ranks}, or sequence_parallel=false",
            )
        whole: dict[str, Tensor] = {}
        if plan.mask:
            # One number, expanded: `models.masks` knows by that, without a read, what it holds.
            one = torch.ones(1, 1, dtype=torch.long, device=tokens.device)
            whole["attention_mask"] = one.expand(rows, length)
        if "position_ids" not in arguments:
            whole["position_ids"] = torch.arange(length, device=tokens.device).expand(rows, -1)
        for name, value in whole.items():
            if self._accepts is None or name in self._accepts:
                arguments.setdefault(name, value)
        if hidden is None and self.is_first:
            hidden = self.module.get_submodule(plan.embedding)(tokens)
        assert hidden is not None
        return hidden

    def output(self, microbatch: Microbatch, hidden: Tensor | None = None, **extra: Any) -> Any:
        """What the module returns: the hidden state [B, S, H], on the last stage its own output.

        `extra` keyword arguments (a key/value cache, say) override those of the microbatch.
        """
        arguments = {**self.inputs(microbatch, hidden), **extra}
        self._ids = microbatch.get(self._input_argument)
        if self._coming is not None:
            self._coming.entering = hidden
        with running(microbatch):
            result = self._target(**arguments)
        if self._going is not None:
            return self._going.take()
        return result if self.is_last else _hidden(result)

    def forward(self, microbatch: Microbatch, hidden: Tensor | None = None) -> Any:
        """The hidden state [B, S, H], or on the last stage (sum of losses, number of tokens)."""
        result = self.output(microbatch, hidden)
        if not self.is_last:
            return result
        assert self.loss_fn is not None, "the last stage needs a loss function"
        return self.loss_fn(result, microbatch)


def _plan(plan: StagePlan | None) -> StagePlan:
    assert plan is not None
    return plan


def _hidden(result: Any) -> Tensor:
    """The hidden state among what a decoder may return."""
    if isinstance(result, Tensor):
        return result
    hidden = getattr(result, "last_hidden_state", None)
    if hidden is None:
        hidden = getattr(result, "logits", None)
    found = result[0] if hidden is None else hidden
    assert isinstance(found, Tensor), type(result)
    return found
