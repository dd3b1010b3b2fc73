"""What a server over context ranks (cp) is rejected for, before ranks start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.spec.errors import LayoutError, OptionError
from hocket.spec.layout import Layout
from hocket.spec.legality import narrowed

if TYPE_CHECKING:
    from hocket.models.dimensions import Dimensions


def require_whole_experts(layout: Layout) -> None:
    """Raise LayoutError for context ranks together with experts over ranks."""
    if layout.cp > 1 and layout.splits_experts:
        raise LayoutError(
            f"the layout {layout.axes_text()} serves with cp and with experts over ranks; a server "
            "has one of the two",
            hint=f"--layout {narrowed(layout, cp=1).axes_text()}",
        )


def whole_chunks(layout: Layout, model: Dimensions) -> int:
    """Tokens that divide over context ranks as those of training do; a prompt need not."""
    return 2 * layout.cp * max(1, model.handed_width)


GPU_BLOCK_MULTIPLE = 16
"""Tokens of a block that every attention kernel on a GPU reads are a multiple of this."""


def require_divided_blocks(block_size: int, layout: Layout, device: str) -> None:
    """Raise OptionError for blocks of the cache whose tokens do not divide over context ranks, or
    of which no kernel of a GPU reads a rank's part."""
    gpu = device != "cpu"
    least = layout.cp * (GPU_BLOCK_MULTIPLE if gpu else 1)
    if block_size % least == 0:
        return
    rule = f"on a GPU it is a multiple of {least}"
    if layout.cp > 1:
        over = f"do not divide over cp {layout.cp}"
        rule = f"its tokens {over}" + f" in multiples of {GPU_BLOCK_MULTIPLE}" * gpu
    fit = least * max(1, block_size // least + (not gpu))
    none = ", or none: what the attention kernels read best" * gpu
    raise OptionError(f"block_size is {block_size}; {rule}", hint=f"--block-size {fit}{none}")
