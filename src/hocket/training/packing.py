"""Packing: which documents share a row, so that rows are full and documents stay whole.

    documents  ======= ==== == === =====        rows of S tokens
    best fit   | ======= == | ===== ==== | === .... |

Longest first, each into the row with the least room for it (best fit decreasing: at most 11/9 of
the fewest rows, Johnson 1973). Never imports torch.
"""

from __future__ import annotations

import bisect

import numpy as np
import numpy.typing as npt

ACROSS, DOCUMENTS, NONE = "across", "documents", "none"
PACKINGS = (ACROSS, DOCUMENTS, NONE)
"""Attention across documents; whole documents that do not see each other; one document a row."""


def rows_of(lengths: npt.NDArray[np.int64], row: int, *, shared: bool) -> list[list[int]]:
    """Numbers of the documents of each row; a function of the lengths alone.

    Args:
        lengths: of the documents, each at most `row`.
        row: tokens of a row.
        shared: whether a row holds several documents.
    """
    assert lengths.size == 0 or int(lengths.max()) <= row, (row, lengths.max())
    if not shared:
        return [[number] for number in range(len(lengths))]
    rows: list[list[int]] = []
    free: dict[int, list[int]] = {}  # room left -> rows that have it
    rooms: list[int] = []  # its keys, ascending
    for number in np.argsort(-lengths, kind="stable"):
        length = int(lengths[number])
        at = bisect.bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            index = free[room].pop()
            if not free[room]:
                del free[room], rooms[at]
        else:
            room, index = row, len(rows)
            rows.append([])
        rows[index].append(int(number))
        left = room - length
        if left:
            if left not in free:
                bisect.insort(rooms, left)
            free.setdefault(left, []).append(index)
    return rows
