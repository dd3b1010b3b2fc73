"""A process in which Triton interprets kernels instead of compiling them.

Triton decides once, when it is imported; the process of the tests compiles.
"""

from __future__ import annotations

import os
from typing import Any


def begin() -> None:
    """Of the process, before Triton is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)
    _multiply_bfloat16()
    _round_to_8_bits()


def _multiply_bfloat16() -> None:
    """The interpreter holds bfloat16 as its 16 bits, and multiplies these as integers (Triton 3.7).

    Widened to float32 instead: products of bfloat16 are exact in it, as in a tensor core.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    given = builder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    builder.create_dot = lambda self, a, b, *rest: given(self, widened(a), widened(b), *rest)


def _round_to_8_bits() -> None:
    """The interpreter (Triton 3.7) rounds up into the next exponent without adding the carry to it:
    7.9 becomes 4. The device's instruction rounds to the nearest, as PyTorch does."""
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    given = interpreter._convert_float

    def nearest(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return given(data, source, target, rounding)
        return torch.from_numpy(data).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = nearest


def error_of_case(name: str) -> tuple[float, str]:
    """The error of one case of paged attention, and its dtype."""
    from hocket.runtime.triton.paged_attention_cases import CASES, largest_error

    case = next(case for case in CASES if case.name == name)
    return largest_error(case), str(case.dtype)


def same_in_any_layout(name: str) -> bool:
    """Whether a query that is a view of a larger tensor gives bit for bit the same."""
    import torch

    from hocket.runtime.triton.paged_attention import paged_attention
    from hocket.runtime.triton.paged_attention_cases import CASES

    arguments = next(case for case in CASES if case.name == name).arguments()
    query = arguments.pop("query")
    wide = torch.randn(query.shape[1], query.shape[0], query.shape[2] + 8)
    wide[..., : query.shape[2]] = query.transpose(0, 1)
    view = wide[..., : query.shape[2]].transpose(0, 1)
    assert not view.is_contiguous()
    return torch.equal(paged_attention(query, **arguments), paged_attention(view, **arguments))


def error_when_keys_are_shifted(name: str) -> float:
    """The error of a case whose reference sees one token fewer: a proof that errors are seen."""
    from hocket.runtime.triton.paged_attention import paged_attention
    from hocket.runtime.triton.paged_attention_cases import CASES, paged_attention_reference

    arguments = next(case for case in CASES if case.name == name).arguments()
    found = paged_attention(**arguments).double()
    arguments["seqused_k"] = arguments["seqused_k"] - 1
    return float((found - paged_attention_reference(**arguments)).abs().max())
