"""What a server over context ranks (cp) is rejected for, before ranks start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.spec.errors import LayoutError, OptionError
from hocket.spec.layout import Layout
from hocket.spec.legality import narrowed
from hocket.spec.serving import BLOCK_SIZE

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


def require_divided_blocks(block_size: int | None, layout: Layout, device: str) -> None:
    """Raise OptionError for blocks of the cache whose tokens do not divide over context ranks; on
    CUDA those that are asked for, as others are chosen so that they do."""
    block_size = block_size or (BLOCK_SIZE if device == "cpu" else layout.cp)
    if block_size % layout.cp:
        raise OptionError(
            f"block_size is {block_size}; its tokens do not divide over cp {layout.cp}",
            hint=f"--block-size {layout.cp * -(-block_size // layout.cp)}",
        )
