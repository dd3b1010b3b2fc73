"""TokenSampler: what the samplers of CPUs and of GPUs have in common: slots, and rows over ranks.

Legend: N rows of logits, P those that want their largest one, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hocket.runtime.collectives import gather
from hocket.runtime.record import Recorder
from hocket.serving.engine.asked import Slot
from hocket.serving.engine.penalties import TokenHistory
from hocket.serving.engine.top_logits import top_token
from hocket.serving.engine.vocabulary import Vocabulary
from hocket.serving.scheduling.admission import Admission

if TYPE_CHECKING:
    from hocket.serving.engine.structure import Structures


class TokenSampler:
    """The sampler of one rank of the last stage; its tensor ranks make the same calls.

    Args:
        vocabulary: the part that this rank's logits cover.
        vocab_size: token ids of the whole.
        device: where the logits are.
        recorder: counts what is moved.
        slice_bytes: logits taken at once.
        structures: compiles structures; None: requests with one fail.
    """

    _history: TokenHistory

    def __init__(
        self,
        vocabulary: Vocabulary,
        vocab_size: int,
        device: torch.device | str,
        recorder: Recorder,
        *,
        slice_bytes: int,
        structures: Structures | None,
    ) -> None:
        assert not vocabulary.sizes or sum(vocabulary.sizes) == vocab_size, vocabulary.sizes
        self.vocabulary = vocabulary
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.recorder = recorder
        self.structures = structures
        self.samples = vocabulary.axis.index == 0
        self._slots: dict[int, Slot] = {}
        self._rows_at_once = max(1, slice_bytes // (4 * vocab_size))
        self._whole = Vocabulary(axis=dataclasses.replace(vocabulary.axis, size=1, group=None))

    def release(self, slot: int) -> None:
        """Forget a request; of a slot that is free already nothing happens."""
        self._slots.pop(slot, None)

    def _admit(self, admission: Admission) -> Slot:
        """The slot of a request, with its history and its structure where tokens are chosen."""
        sampling = admission.sampling
        slot = self._slots[admission.slot] = Slot.of(admission, self.vocab_size)
        for token, _ in sampling.logit_bias:
            if token >= self.vocab_size:
                slot.broken = f"logit_bias names token {token} of {self.vocab_size}"
        if not self.samples:
            return slot
        if sampling.penalizes:
            prompt = admission.prompt if sampling.repetition_penalty != 1 else ()
            known = [token for token in prompt if token < self.vocab_size]
            self._history.admit(admission.slot, known, admission.generated)
        if sampling.structure is not None:
            if self.structures is None:
                slot.broken = "this server was started without structured output"
            else:
                slot.structure = self.structures.start(
                    sampling.structure, self._ends(admission), admission.generated
                )
        return slot

    def _ends(self, admission: Admission) -> list[int]:
        """Tokens that end a request, ascending."""
        return sorted(token for token in admission.sampling.ends if token < self.vocab_size)

    def _largest(self, logits: Tensor, parts: Sequence[Tensor]) -> Tensor | None:
        """The largest logit of each row and its id, [P, 2] fp64, on index 0; None elsewhere.
        `parts`: the rows of `logits`, as many as are taken at once."""
        if logits.shape[1] == 0:
            values = logits.new_full((logits.shape[0],), -torch.inf, dtype=torch.float)
            ids = torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)
        else:
            found = [top_token(part.float()) for part in parts]
            values, ids = (torch.cat(column) for column in zip(*found, strict=True))
        pairs = torch.stack([values.double(), (ids + self.vocabulary.start).double()], -1)
        if not self.vocabulary.split:
            return pairs if self.samples else None
        every = gather(pairs, self.vocabulary.axis, self.recorder)
        if every is None:
            return None
        best = torch.stack(every)
        # of equals the first rank, which holds the lower ids
        winner = best[..., 0].argmax(0).view(1, -1, 1).expand(1, -1, 2)
        return best.gather(0, winner).squeeze(0)

    def _gathered(self, logits: Tensor) -> Tensor | None:
        """Rows [N, V] with the whole vocabulary on index 0; None elsewhere."""
        if not self.vocabulary.split:
            return logits if self.samples else None
        sizes = self.vocabulary.sizes
        short = max(sizes) - logits.shape[1]
        if short:
            logits = torch.nn.functional.pad(logits, (0, short))
        every = gather(logits, self.vocabulary.axis, self.recorder)
        if every is None:
            return None
        return torch.cat([part[:, :size] for part, size in zip(every, sizes, strict=True)], 1)
