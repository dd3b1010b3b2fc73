"""Triton kernels of the runtime, and how they are compiled and checked without a GPU."""

from __future__ import annotations

from typing import Any, Final

FUSED: Final[dict[str, Any]] = {"enable_fp_fusion": True}
"""Of every launch: multiply-adds are fused, as in the kernels that were checked. Triton 3.9 warns
where a launch does not say so, and 3.10 would fuse none."""
