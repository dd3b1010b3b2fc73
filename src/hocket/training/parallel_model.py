"""ParallelModel: what `hocket.parallelize` returns, a rank's part of a model in its owner's loop.

    a step       forward_backward -> clip_grad_norm -> the owner's optimizer
    files        save_checkpoint, load_checkpoint (any layout), export (a Hugging Face directory)
    values       state_dict, in the names of the whole module
    answers      generate

Every rank calls every method, with equal arguments unless stated otherwise.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from hocket.runtime import checkpoint
from hocket.runtime.collectives import all_reduce
from hocket.runtime.data_parallel import Fill
from hocket.runtime.loss import check_convention
from hocket.runtime.parallel import Parallel
from hocket.runtime.pipeline.stage import Microbatch
from hocket.runtime.rank_state import saved_buffers
from hocket.spec import renamed
from hocket.spec.checkpoint import config_hash
from hocket.spec.errors import OptionError
from hocket.spec.placement import Placement
from hocket.training import optimizer_trial
from hocket.training.export import ModelFiles, export_ranks
from hocket.training.own_optimizer import (
    begin_state,
    groups_of,
    state_of,
    take_groups,
    take_numbers,
)

Generate = Callable[..., list[list[int]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeModule:
    """What a module was before a rank took its part of it.

    Attributes:
        config: its Hugging Face configuration; None: it is another module.
        parameters: every name of its `state_dict` that is a parameter, to shape and dtype.
        buffers: the persistent ones, with their values then.
        owners: of tied parameters, name to the name that `named_parameters` lists.
    """

    config: Any
    parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    buffers: Mapping[str, Tensor]
    owners: Mapping[str, str]

    @classmethod
    def of(cls, module: nn.Module) -> WholeModule:
        first = {id(p): name for name, p in module.named_parameters()}
        every = dict(module.named_parameters(remove_duplicate=False))
        saved = module.state_dict(keep_vars=True)
        return cls(
            config=getattr(module, "config", None),
            parameters={n: (tuple(p.shape), p.dtype) for n, p in every.items()},
            buffers={
                n: t.detach().cpu().clone()
                for n, t in saved.items()
                if n not in every and not t.is_meta
            },
            owners={n: first[id(p)] for n, p in every.items()},
        )


class ParallelModel(Parallel):
    """A rank's part of a module, with what a loop of one's own needs besides a step.

    Attributes:
        whole: the module before it was split.
        generator: set by `hocket.parallelize`: continues prompts. None: the module is not a
            Hugging Face causal language model.
    """

    whole: WholeModule
    generator: Generate | None = None
    _labels_seen = False
    _first: Sequence[tuple[Tensor, int, Tensor]] = ()
    _damaged: Mapping[Path, Sequence[str]] = MappingProxyType({})

    def __getattr__(self, name: str) -> Any:
        return getattr(self, renamed.attribute("ParallelModel", name, renamed.PARALLEL))

    def finish(self, fills: Sequence[Fill] = ()) -> None:
        super().finish(fills)
        self._stale = bool(self._sharded)  # its owner may write into what is stepped
        optimizer_trial.watch(self)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The tensors that this rank's optimizer steps: its parameters or, with ZeRO, 1-D views of
        its shards of them."""
        for _, tensor in self.named_stepped():
            yield tensor

    def train(self, mode: bool = True) -> Self:  # type: ignore[override]
        """Set every stage to training mode, or with False to evaluation mode."""
        super().train(mode)
        return self

    def eval(self) -> Self:
        """Set every stage to evaluation mode."""
        return self.train(False)

    def forward_backward(
        self, microbatches: Sequence[Microbatch], num_tokens: int | None = None
    ) -> Tensor:
        """One step's forwards and backwards; afterwards `.grad` holds the whole gradient.

        Gradients of the step before are forgotten first; in the second step with a warning if no
        optimizer had some of them. `labels` [B, S] are those that
        transformers takes: `input_ids` themselves, -100 where there is no target; the shift is done
        here, unless `labels_shifted=True` was given to `parallelize`.

        Args:
            microbatches: of this data rank, in order; every rank of a replica is given the same.
            num_tokens: valid tokens of the global batch. None: counted from `labels`.

        Returns:
            The mean loss over the valid tokens of the global batch, fp32 (fp64 of an fp64 model),
            equal on every rank.

        Raises:
            OptionError: a batch that is not in a list, a number of microbatches that is not the
                schedule's, labels of another shape than their tokens, or labels of the first step
                that follow the other convention.
        """
        _require_several(microbatches, "forward_backward")
        _require_labels(microbatches)
        if not self._labels_seen and self.labels_shifted is not None and microbatches:
            if "labels" in microbatches[0]:
                check_convention(microbatches[0], self.labels_shifted)
            self._labels_seen = True
        self._warn_of_a_gradient_without_a_step()
        loss = super().forward_backward(microbatches, num_tokens)
        if self.step == 1:
            self._first = [
                (tensor, tensor._version, _some(tensor))
                for tensor in self.parameters()
                if tensor.grad is not None
            ]
        return loss

    def _warn_of_a_gradient_without_a_step(self) -> None:
        """In the second step: warn where nothing was done with gradients of the first, as by an
        optimizer over other tensors, or in a loop that adds gradients up over several calls."""
        first, self._first = self._first, ()
        left = sum(
            tensor.grad is not None and tensor._version == version and _some(tensor).equal(before)
            for tensor, version, before in first
        )
        if left:
            warnings.warn(
                f"gradients of the step before are dropped: of {len(first)} tensors that "
                f"`parameters()` returns no optimizer has stepped {left}. Give it "
                "parallel.parameters(), or groups of parallel.named_stepped(), and all "
                "microbatches of a step to one forward_backward",
                stacklevel=3,
            )

    def evaluate(self, microbatches: Sequence[Microbatch]) -> tuple[float, int]:
        """(sum of losses, valid tokens) of a global batch of which this data rank has a part; a
        router's auxiliary loss is left out. Raises OptionError where it is one microbatch."""
        _require_several(microbatches, "evaluate")
        _require_labels(microbatches)
        return super().evaluate(microbatches)

    # --- files -----------------------------------------------------------------------------

    def save_checkpoint(
        self,
        folder: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        keep: int = 2,
    ) -> Path:
        """Save parameters, the optimizer's state and random states after this step.

        Args:
            folder: holds the checkpoints, one folder a step; every rank must reach it.
            optimizer: over `parameters()`. None: its state is not saved. Numbers of its
                parameter groups (learning rate, decay) are saved with it, as by torch.
            extra: JSON values that loading returns: a scheduler's state, the epoch.
            keep: checkpoints that stay.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: what was written does not read back.
            OptionError: the optimizer is not over `parameters()`.
        """
        state = {} if optimizer is None else state_of(optimizer, self.named_stepped())
        return checkpoint.save_checkpoint(
            folder,
            step=self.step,
            parallel=self,
            optimizer_state=state,
            layout=str(self.layout),
            model=self._model,
            cursor={} if optimizer is None else {"groups": groups_of(optimizer)},
            extra=extra,
            keep=keep,
            damaged=self._damaged.get(Path(folder), ()),
        )

    def load_checkpoint(
        self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None
    ) -> Mapping[str, Any]:
        """Take over the newest whole checkpoint, of this layout or of another.

        Afterwards `step` is the number of steps done. An optimizer that has not stepped yet gets
        its state first (a step at learning rate 0 on zero gradients, as torch.distributed's
        checkpoints do). Rank 0 warns of another layout, of damaged newer checkpoints, and of
        buffers that the checkpoint does not hold.

        Returns:
            The `extra` that was saved.

        Raises:
            CheckpointError: there is none, none is whole, or it is of another model.
        """
        if optimizer is not None and not optimizer.state:
            begin_state(optimizer)
        state = {} if optimizer is None else state_of(optimizer, self.named_stepped())
        restored = checkpoint.load_checkpoint(
            folder,
            parallel=self,
            layout=str(self.layout),
            model=self._model,
            optimizer_state=state,
        )
        if optimizer is not None:
            take_numbers(optimizer, self.named_stepped(), state)
            if "groups" in restored.cursor:  # else it was saved without an optimizer, or before
                take_groups(optimizer, restored.cursor["groups"])
        self.step = restored.step
        self._damaged = {Path(folder): restored.damaged}
        for note in restored.notes if self.mesh.rank == 0 else ():
            warnings.warn(note, stacklevel=2)
        return restored.extra

    def export(self, to: str | Path) -> Path:
        """Write an ordinary Hugging Face directory, which `from_pretrained` reads.

        Raises:
            OptionError: the module is not a Hugging Face model, or `to` holds something else.
        """
        config = self._config("exported")
        return export_ranks(self, Path(to), ModelFiles(config=config.to_dict()))

    @property
    def _model(self) -> str:
        config = self.whole.config
        return config_hash(config.to_dict()) if hasattr(config, "to_dict") else ""

    def _config(self, done: str) -> Any:
        if self.generator is None:
            raise OptionError(f"only a Hugging Face causal language model can be {done} from here")
        return self.whole.config

    # --- values ----------------------------------------------------------------------------

    def state_dict(self, *, rank0_only: bool = True) -> dict[str, Tensor]:
        """The whole module's values on the CPU, in the names of its own `state_dict`.

        Args:
            rank0_only: the other ranks get an empty dictionary, and need no memory for it.
        """
        found: dict[str, Tensor] = {}
        self.unshard()
        local = dict(self.named_parameters())
        keeps = not rank0_only or self.mesh.rank == 0
        with self.recorder.in_phase("other"):
            for name, (shape, dtype) in self.whole.parameters.items():
                owner = self.whole.owners[name]
                if owner != name and owner in found:
                    found[name] = found[owner]
                elif owner == name:
                    value = self._gathered(name, shape, dtype, local)
                    if keeps:
                        found[name] = value.cpu()
            for name, before in self.whole.buffers.items():
                value = self._gathered_buffer(name, before)
                if keeps:
                    found[name] = value.cpu()
        self.reshard()
        return found

    @torch.no_grad()
    def _gathered(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        local: Mapping[str, Tensor],
    ) -> Tensor:
        """One whole parameter on every rank: the sum of blocks, each from one of its ranks."""
        whole = torch.zeros(shape, dtype=dtype, device=self.mesh.device)
        if name in local and self.placements[name].tie in (None, name):
            for block in self._blocks_to_give(self.placements[name]):
                whole[block.in_global] = local[name][block.in_local].to(dtype)
        all_reduce(whole, self.mesh.axis("world"), self.recorder)
        return whole

    def _gathered_buffer(self, name: str, before: Tensor) -> Tensor:
        """A buffer as it is now: the mean over the ranks that have it, which is its value."""
        mine = dict(saved_buffers(self)).get(name)
        total = torch.zeros(before.numel() + 1, dtype=torch.float64, device=self.mesh.device)
        if mine is not None and mine.shape == before.shape:
            total[:-1], total[-1] = mine.detach().reshape(-1), 1
        all_reduce(total, self.mesh.axis("world"), self.recorder)
        return (total[:-1] / total[-1]).view(before.shape).to(before.dtype) if total[-1] else before

    def _blocks_to_give(self, placement: Placement) -> list[Any]:
        index = self.mesh.axis("tp").index
        if placement.is_expert:
            return [] if self.mesh.axis("expert_data").index else list(placement.blocks)
        if self.mesh.data.index or (index and "tp" not in placement.sharded):
            return []
        return [block for block in placement.blocks if index % block.copies == 0]

    # --- answers ---------------------------------------------------------------------------

    def generate(
        self,
        prompts: Tensor | Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 64,
        **sampling: Any,
    ) -> list[list[int]]:
        """The tokens that follow each prompt, without it; greedily unless `temperature` is given.

        Args:
            prompts: token ids [B, S], or lists of any lengths. Data ranks may have different ones.
            max_new_tokens: at most, of each row.
            **sampling: other fields of `hocket.SamplingParams`: `temperature`, `top_p`, `seed`,
                `stop`.

        Raises:
            OptionError: the module or the layout cannot generate, or prompts are not lists of
                token ids, or empty.
        """
        self._config("generated from")
        assert self.generator is not None
        if self.layout.cp > 1:
            raise OptionError(
                f"cp is {self.layout.cp}, and a decode step has one token",
                hint="export(FOLDER), then hocket generate FOLDER",
            )
        if self.layout.sequence_parallel and self.layout.tp > 1:
            raise OptionError(
                "sequence parallelism divides every sequence over tp, and a decode step has one "
                "token",
                hint="export(FOLDER), then hocket generate FOLDER",
            )
        if self.layout.splits_experts:
            raise OptionError(
                "under ep and etp all ranks run as many forwards, and answers have as many tokens "
                "as they need",
                hint="export(FOLDER), then hocket generate FOLDER",
            )
        rows = _token_rows(prompts)
        modes = [stage.module.training for stage in self.stages]
        self.unshard()
        try:
            return self.generator(self, rows, max_new_tokens=max_new_tokens, **sampling)
        finally:
            self.reshard()
            for stage, mode in zip(self.stages, modes, strict=True):
                stage.module.train(mode)


def _some(tensor: Tensor) -> Tensor:
    """A few of its values, copied."""
    return tensor.detach().reshape(-1)[:8].clone()


def _token_rows(prompts: Any) -> list[list[int]]:
    """Prompts as lists of token ids. Raises OptionError for anything else."""
    hint = "[tokenizer(text).input_ids for text in texts]"
    if isinstance(prompts, Tensor):
        if prompts.dim() != 2 or prompts.is_floating_point() or prompts.is_complex():
            raise OptionError(
                f"prompts are token ids [B, S], and a tensor {list(prompts.shape)} of "
                f"{prompts.dtype} is given",
                hint="prompts.unsqueeze(0)" if prompts.dim() == 1 else hint,
            )
        return [[int(token) for token in row] for row in prompts.tolist()]
    rows = [] if isinstance(prompts, str) else [each for each in prompts]
    found = [] if any(isinstance(row, str | int) for row in rows) else [[*row] for row in rows]
    numbers = all(isinstance(token, Integral) for row in found for token in row)
    if not numbers or len(found) != len(rows) or isinstance(prompts, str):
        raise OptionError("prompts are lists of token ids, one list for each", hint=hint)
    return [[int(token) for token in row] for row in found]


def _require_labels(microbatches: Sequence[Microbatch]) -> None:
    """Raises OptionError for labels of another shape than their tokens."""
    for batch in microbatches:
        labels, tokens = batch.get("labels"), batch.get("input_ids")
        if labels is not None and tokens is not None and labels.shape != tokens.shape:
            raise OptionError(
                f"labels {list(labels.shape)} are of another shape than input_ids "
                f"{list(tokens.shape)}: one label for each token, -100 where there is no target",
                hint="labels=input_ids",
            )


def _require_several(microbatches: Sequence[Microbatch], method: str) -> None:
    """Raises OptionError for a batch, or a tensor, that is not in a list, and for no batch."""
    if not isinstance(microbatches, Mapping | Tensor) and not len(microbatches):
        raise OptionError(
            f"{method} takes at least one microbatch, and is given an empty list",
            hint=f"{method}([batch])",
        )
    if isinstance(microbatches, Mapping | Tensor):
        kind = type(microbatches).__name__
        raise OptionError(
            f"{method} takes a list of microbatches, and is given a {kind}",
            hint=f"{method}([batch])",
        )
