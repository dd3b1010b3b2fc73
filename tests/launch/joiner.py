"""What torchrun starts in the test of joining: joins, and writes what it heard into a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    from hocket.launch import run_joined

    events: list[dict[str, Any]] = []
    run_joined("tests.launch.cases:exchange", {"start": 5}, events.append, device="cpu")
    folder = Path(sys.argv[1])
    (folder / f"rank-{events[0]['rank']}.json").write_text(json.dumps(events))


if __name__ == "__main__":
    main()
