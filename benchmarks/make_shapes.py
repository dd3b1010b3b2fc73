"""Trace every model of the catalogue and write its shape beside it.

    python -m benchmarks.make_shapes [MODEL ...]

Run it again when the trace or a configuration changes; `tests/catalogue` compares some of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(wanted: list[str]) -> int:
    import torch

    from hocket.catalogue import models
    from hocket.models.trace import trace

    torch.set_num_threads(1)
    folder = Path(models.__file__).parent / "data" / "shapes"
    folder.mkdir(exist_ok=True)
    for name in wanted or models.model_names():
        shape = trace(models.config(name), name=name)
        (folder / f"{name}.json").write_text(json.dumps(shape.to_json(), indent=1) + "\n")
        print(f"{name:20}{shape.num_parameters:>18,}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
