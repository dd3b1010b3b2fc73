"""Where tensor parallelism stops beating a pipeline: the same model on faster and slower links.

    python -m benchmarks.links                       all links, on two ranks
    python -m benchmarks.links --emulate-links nvlink3 pcie4 --scale 5000

The model is the tour's (`jobs.tour_runner.WIDE`): one whose communication does not fill any link.
Each row trains for a few steps in both layouts with `--emulate-links` and reads the prediction that
the run wrote before it started (`forecast.json`, from the measurements of `hocket probe`). One
scale serves all rows, so that they differ in the links alone. Prints the medians, both winners, and
whether the crossover was predicted; `--out` keeps the rows as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from hocket.jobs.tour_runner import WIDE

LINKS = ("nvlink5", "nvlink4", "nvlink3", "nvlink2", "pcie5", "pcie4", "net100g")
LAYOUTS = ("tp2:microbatches=2", "pp2:microbatches=2")
GPU = "A100-SXM-80"
"""Whose ratio of computing to links is felt."""


def one(folder: Path, layout: str, links: str, steps: int, name: str = "") -> dict[str, float]:
    """Train once, in a folder of that name; measured and predicted seconds of a step."""
    from hocket.jobs.request import request
    from hocket.jobs.train import train_model
    from hocket.spec.run import RunFolder

    run = folder / (name or f"{layout[:3]}-{links.partition('@')[0]}")
    train_model(
        request(
            {
                "model": str(folder / "model"), "data": [str(folder / "text.txt")],
                "run": str(run), "layout": layout, "emulate_links": links, "tokenizer": "bytes",
                "seq_len": 64, "global_batch": 4, "steps": steps, "eval_every": 0,
                "eval_batches": 1, "device": "cpu",
            }
        )
    )  # fmt: skip
    rows = [json.loads(line) for line in RunFolder(run).metrics_file.read_text().splitlines()]
    measured = statistics.median(row["step_seconds"] for row in rows[1:])
    found = {"measured": measured}
    file = RunFolder(run).forecast_file
    if file.exists():
        forecast = json.loads(file.read_text())
        found["predicted"] = float(forecast.get("step_seconds") or 0.0)
    return found


def measured_scale(folder: Path) -> float:
    """The scale that a run finds for itself, on a quiet machine."""
    from hocket.spec.links import Links
    from hocket.spec.run import RunFolder

    one(folder, LAYOUTS[0], f"nvlink5@{GPU}", 2, "scale")
    kept = RunFolder(folder / "scale").load().options.emulate_links
    assert kept is not None
    scale = Links.parse(kept).scale
    assert scale is not None
    return scale


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text, with both winners."""
    from hocket.reporting.table import table_text

    heads = ["links"]
    for layout in LAYOUTS:
        heads += [f"{layout[:3]} measured", f"{layout[:3]} predicted"]
    heads += ["faster", "predicted"]
    cells = []
    for row in rows:
        values = []
        for layout in LAYOUTS:
            for what in ("measured", "predicted"):
                seconds = row[layout].get(what)
                values.append("-" if not seconds else f"{seconds:.3f} s")
        winners = [winner(row, what) for what in ("measured", "predicted")]
        cells.append((row["links"], *values, *winners))
    return table_text(heads, cells)


def winner(row: dict[str, Any], what: str) -> str:
    """The faster layout of a row, `-` where one is unknown."""
    seconds = {layout: row[layout].get(what) for layout in LAYOUTS}
    if not all(seconds.values()):
        return "-"
    return min(seconds, key=lambda layout: seconds[layout])[:3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--emulate-links", nargs="+", default=list(LINKS))
    parser.add_argument("--scale", type=float)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(WIDE))
        line = "One melody is dealt note by note to several voices.\n"
        (folder / "text.txt").write_text(line * 2000)
        scale = args.scale or measured_scale(folder)
        print(f"this machine multiplies {scale:g} times slower than {GPU}", flush=True)
        for link in args.emulate_links:
            links = f"{link}@{GPU}:scale={scale}"
            row = {"links": link, **{lay: one(folder, lay, links, args.steps) for lay in LAYOUTS}}
            rows.append(row)
            print(json.dumps(row), flush=True)
    print(table(rows))
    agree = [winner(row, "measured") == winner(row, "predicted") for row in rows]
    print(f"{sum(agree)} of {len(agree)} winners were predicted")
    if args.out is not None:
        args.out.write_text(json.dumps({"scale": scale, "gpu": GPU, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
