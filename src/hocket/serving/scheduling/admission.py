"""Admission: what workers get of a request when it gets a slot, and its binary form."""

from __future__ import annotations

import dataclasses
import struct

from hocket.serving.request import SamplingParams
from hocket.serving.scheduling.frames import FrameError, Reader, packed_numbers
from hocket.spec.errors import OptionError

_FIXED = struct.Struct("<iiqiii6diiii6I")


@dataclasses.dataclass(slots=True, kw_only=True)
class Admission:
    """A request that got a slot.

    Attributes:
        slot: the slot.
        index: which answer to the prompt it is; keys its draws together with `sampling.seed`.
        prompt_length: tokens of the prompt: the row (start, count) samples the token of position
            start+count, which is number start+count-prompt_length of the answer.
        sampling: how to choose; its seed is never None.
        prompt: the prompt, where penalties need it; else empty.
        generated: the answer so far, of one that ran before and was preempted, where penalties or
            structure need it; else empty.
    """

    slot: int
    sampling: SamplingParams
    index: int = 0
    prompt_length: int = 0
    prompt: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()

    @property
    def seed(self) -> int:
        seed = self.sampling.seed
        assert seed is not None
        return seed


def encode_admission(admission: Admission) -> bytes:
    """Its part of a plan's frame: fixed numbers, then columns and text of the lengths they name."""
    sampling = admission.sampling
    text = b"" if sampling.structure is None else sampling.structure.encode("utf-8", "replace")
    fixed = _FIXED.pack(
        admission.slot, admission.index, admission.seed, admission.prompt_length,
        sampling.max_new_tokens, sampling.min_new_tokens,
        sampling.temperature,
        -1.0 if sampling.top_p is None else sampling.top_p,
        -1.0 if sampling.min_p is None else sampling.min_p,
        sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty,
        sampling.top_k or 0,
        -1 if sampling.logprobs is None else sampling.logprobs,
        -1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs,
        sampling.ignore_eos | (sampling.structure is not None) << 1,
        len(admission.prompt), len(admission.generated),
        len(sampling.stop), len(sampling.stop_tokens), len(sampling.logit_bias), len(text),
    )  # fmt: skip
    ints = [*admission.prompt, *admission.generated, *sampling.stop, *sampling.stop_tokens]
    ints += [token for token, _ in sampling.logit_bias]
    return (
        fixed
        + packed_numbers(ints)
        + packed_numbers([bias for _, bias in sampling.logit_bias])
        + text
    )


def decode_admission(reader: Reader) -> Admission:
    """The inverse of `encode_admission`; raises FrameError."""
    (
        slot, index, seed, prompt_length, most, least, temperature, top_p, min_p,
        repetition, presence, frequency, top_k, logprobs, prompt_logprobs, flags,
        num_prompt, num_generated, num_stop, num_stop_tokens, num_bias, num_text,
    ) = reader.unpack(_FIXED)  # fmt: skip
    reader.check(slot >= 0 and index >= 0 and prompt_length >= 0, "an admission is negative")
    reader.check(0 <= flags <= 3, f"an admission's flags are {flags}")
    prompt = tuple(reader.ints(num_prompt))
    generated = tuple(reader.ints(num_generated))
    stop = tuple(reader.ints(num_stop))
    stop_tokens = tuple(reader.ints(num_stop_tokens))
    biased = reader.ints(num_bias)
    biases = reader.floats(num_bias)
    text = reader.text(num_text)
    try:
        sampling = SamplingParams(
            max_new_tokens=most,
            min_new_tokens=least,
            temperature=temperature,
            top_k=top_k if top_k != 0 else None,
            top_p=None if top_p == -1 else top_p,
            min_p=None if min_p == -1 else min_p,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
            logit_bias=tuple(zip(biased, biases, strict=True)),
            seed=seed,
            stop=stop,
            stop_tokens=stop_tokens,
            ignore_eos=bool(flags & 1),
            logprobs=None if logprobs == -1 else logprobs,
            prompt_logprobs=None if prompt_logprobs == -1 else prompt_logprobs,
            structure=text if flags & 2 else None,
        )
    except OptionError as error:
        raise FrameError(f"the step plan is malformed: {error.message}") from None
    return Admission(
        slot=slot,
        sampling=sampling,
        index=index,
        prompt_length=prompt_length,
        prompt=prompt,
        generated=generated,
    )
