"""Expert dispatch: how tokens reach the ranks that hold their experts (`--expert-dispatch`).

direct         a row for each choice of a token
node           a token crosses the network once for each node that has experts of its; nodes of as
               many ranks as were started on this machine
node:4         the same with nodes of 4 ranks
deepep         the library DeepEP moves the tokens, once to each rank or node (bf16, on GPUs of
               capability 9.0 and later)
auto           node, where the experts' ranks are on several nodes with several ranks each
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping

from hocket.spec.errors import LayoutError, OptionError
from hocket.spec.launcher_variables import launcher_number
from hocket.spec.layout import Layout
from hocket.spec.process_groups import node_groups

AUTO, DIRECT, NODE, DEEPEP = "auto", "direct", "node", "deepep"

GATHERED_ROWS = 8192
"""Rows of other ranks' experts up to which a server's step is gathered instead of dispatched. A row
is about 50 KB of traffic, or 20 ns at 3 TB/s (H 2,048, experts 768 wide, bf16); a host read in each
set of experts lets a device idle for some 50 microseconds, and rules out a CUDA graph. Estimated,
not measured."""

ROWS_AT_ONCE = 4096
"""Rows of gathered tokens that are computed at once, if they are no more than of one rank's."""


def parse_dispatch(text: str) -> tuple[str, int | None]:
    """The kind and, with `node`, ranks of a node if they are named.

    Raises:
        OptionError: another text.
    """
    kind, colon, number = text.partition(":")
    if kind not in (AUTO, DIRECT, NODE, DEEPEP) or (colon and kind != NODE):
        raise OptionError(
            f"--expert-dispatch is {text!r}; it is auto, direct, node, node:RANKS or deepep",
            hint="--expert-dispatch auto",
        )
    if colon and (not re.fullmatch("[0-9]{1,18}", number) or int(number) < 2):
        raise OptionError(
            f"--expert-dispatch {text}: a node has a whole number of ranks, at least 2",
            hint="--expert-dispatch node:8",
        )
    return kind, int(number) if colon else None


def local_ranks(environment: Mapping[str, str]) -> int | None:
    """Ranks that torchrun or Slurm started on this machine. None: neither did."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    tasks = re.findall(r"([0-9]{1,9})(?:\(x[0-9]+\))?", text)
    return max(launcher_number(environment, "LOCAL_WORLD_SIZE", 0), *map(int, tasks), 0) or None


def settle_dispatch(text: str, layout: Layout, local_ranks: int | None) -> str:
    """`direct`, `node:RANKS` or `deepep`, for a layout on nodes.

    Args:
        text: as it was asked for.
        local_ranks: ranks of a node, where they are known.

    Raises:
        OptionError: an unknown text.
        LayoutError: `node`, and the experts' ranks do not form nodes; `deepep`, and every rank
            holds all experts.
    """
    kind, ranks = parse_dispatch(text)
    if kind == DEEPEP and layout.ep == 1:
        raise LayoutError(
            f"--expert-dispatch {DEEPEP} sends tokens to experts on other ranks, and with "
            f"{layout.axes_text()} (ep 1) every rank holds all experts",
            hint="--expert-dispatch direct",
        )
    if kind == DEEPEP:
        return DEEPEP
    ranks = ranks or local_ranks
    if kind == DIRECT:
        return DIRECT
    if ranks is not None and ranks > 1 and node_groups(layout, ranks):
        return f"{NODE}:{ranks}"
    if kind == AUTO:
        return DIRECT
    number = "an unknown number of" if ranks is None else str(ranks)
    raise LayoutError(
        f"--expert-dispatch {text} sends a token to each node once, and the ep {layout.ep} ranks "
        f"that hold the experts of {layout.axes_text()} are not on several nodes with two or "
        f"more ranks each (nodes of {number} ranks)",
        hint="--expert-dispatch direct",
    )


def num_nodes(text: str, layout: Layout) -> int:
    """Nodes of a settled text; 0: a row is sent for each choice."""
    ranks = parse_dispatch(text)[1]
    groups = [] if ranks is None else node_groups(layout, ranks)
    return len(groups[1][1][0]) if groups else 0


def require_deepep(*, cuda: bool, dtype: str, capability: tuple[int, int] | None = None) -> None:
    """Raise OptionError where DeepEP cannot move the tokens of a job: on CPU or older GPUs, of
    another precision than bf16, or where the library is not installed."""
    why, hint = "", f"--expert-dispatch {DIRECT}"
    if not cuda:
        why = "it moves tokens between GPUs, and the ranks are on CPU"
    elif capability is not None and capability < (9, 0):
        why = "it needs GPUs of capability 9.0, and these have " + ".".join(map(str, capability))
    elif dtype not in ("bf16", "fp8"):
        why, hint = f"it moves rows of bf16, and --dtype is {dtype}", "--dtype bf16"
    elif importlib.util.find_spec("deep_ep") is None:
        why = "the library deep_ep is not installed here"
    if why:
        raise OptionError(f"--expert-dispatch {DEEPEP}: {why}", hint=hint)


def check_copies(number: int, layout: Layout, experts: int) -> None:
    """Raise LayoutError for copies of experts (`--redundant-experts`) that the ranks of a layout
    cannot hold.

    Args:
        number: of copies in each layer. experts: of the model, in each layer.
    """
    ep = layout.ep
    if not number:
        return
    if not experts or ep == 1:
        why = "the model has no experts" if not experts else "every rank holds all experts"
        raise LayoutError(
            f"--redundant-experts {number} copies experts over ranks (ep); {why} at "
            f"{layout.axes_text()}",
            hint="--redundant-experts 0" if not experts else "--layout dp2.ep2",
        )
    most = experts * (ep - 1)
    if number % ep or number > most:
        fit = min(-(-number // ep) * ep, most)
        raise LayoutError(
            f"--redundant-experts {number}: it is a multiple of ep {ep}, and at most {most}, with "
            f"which each rank holds all {experts} experts",
            hint=f"--redundant-experts {fit}",
        )
