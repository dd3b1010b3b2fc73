"""Fit the shape of a GPU's matrix rate to measured products.

    python -m benchmarks.fit.products PRODUCTS.csv

The table has the columns system, gemm_dtype, m, n, k and latency (milliseconds). Printed for each
system: the rate of a tile half as large, the inner loop's overhead in elements of k, and the error
of the fit. `matrix_rate` is printed too, but training takes its own: a step runs hotter.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from hocket.catalogue import hardware
from hocket.cost.constants import Platform, constants
from hocket.cost.device import matmul_seconds
from hocket.cost.machine import machine

NAMES = {
    "a100_sxm": "A100-SXM-80",
    "h100_sxm": "H100-SXM-80",
    "b200_sxm": "B200-SXM-180",
    "gb200": "GB200-186",
}
LEAST = (1024, 512, 512)


def main(path: str) -> None:
    """Fit and print."""
    rows = defaultdict(list)
    with Path(path).open(newline="") as file:
        for row in csv.DictReader(file):
            sizes = tuple(int(row[name]) for name in "mnk")
            large = all(size >= least for size, least in zip(sizes, LEAST, strict=True))
            if row["gemm_dtype"] == "bfloat16" and row["system"] in NAMES and large:
                rows[row["system"]].append((*sizes, float(row["latency"]) * 1e-3))
    for system, found in rows.items():
        m, n, k, seconds = np.array(found, dtype=np.float64).T
        numbers = machine(hardware.cluster(f"1x{NAMES[system]}"))
        base = constants(NAMES[system], "megatron")

        def error(values: np.ndarray) -> float:
            changed = dataclasses.replace(
                base,  # noqa: B023
                matrix_rate=values[0],
                small_tile=min(abs(values[1]), 1.0),
                inner_overhead=abs(values[2]) * 100,
            )
            time = matmul_seconds(m, n, k, Platform(numbers, changed))  # noqa: B023
            return float(np.mean(np.abs(np.log(time / seconds))))  # noqa: B023

        best = minimize(error, [0.9, 0.9, 2.0], method="Nelder-Mead", options={"maxiter": 300})
        rate, tile, overhead = best.x
        print(f"{NAMES[system]}: {len(m)} products, mean error {100 * best.fun:.1f}%")
        print(f"  matrix_rate {rate:.3f} small_tile {tile:.3f} inner_overhead {100 * overhead:.0f}")


if __name__ == "__main__":
    main(sys.argv[1])
