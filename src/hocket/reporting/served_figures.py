"""The report of a server as one picture, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hocket.reporting.figures import new_figure, no_formula, write_figure
from hocket.reporting.served import ServerRecord, load_curves, load_text, round_seconds

COLOURS = {"predicted": "#0072b2", "from measured steps": "#d55e00", "measured": "#009e73"}


def save_served_figure(several: Sequence[ServerRecord], path: Path) -> None:
    """Draw one or two servers into a picture; its form follows the name's ending.

    Raises:
        OptionError: matplotlib is not installed, or writes no such form.
    """
    figure = new_figure(14, 4.6 * len(several))
    axes = figure.subplots(len(several), 3, squeeze=False)
    for (bars, load, wait), served in zip(axes, several, strict=True):
        rows = round_seconds(served)
        for kind, shift in (("predicted", -0.2), ("measured", 0.2)):
            values = [1e3 * (getattr(row, kind) or 0.0) for row in rows]
            places = [number + shift for number in range(len(rows))]
            bars.barh(places, values, height=0.38, color=COLOURS[kind], label=kind)
        bars.set_yticks(range(len(rows)), [row.title for row in rows], fontsize=7)
        bars.invert_yaxis()
        name = f"{served.name} ({served.spec.layout})" if served.spec else served.name
        bars.set_title(no_formula(f"{name}: milliseconds per decode step"), fontsize=10, loc="left")
        bars.legend(fontsize=8, frameon=False)
        for kind, loads in load_curves(served):
            rates = [one.rate for one in loads]
            mark = "o-" if kind != "measured" else "s--"
            throughput = [one.tokens_per_second for one in loads]
            load.plot(rates, throughput, mark, color=COLOURS[kind], label=kind)
            first = [1e3 * one.ttft_p90 for one in loads]
            further = [1e3 * one.tpot_p90 for one in loads]
            wait.plot(rates, first, mark, color=COLOURS[kind], label=f"first, {kind}")
            wait.plot(rates, further, mark, color=COLOURS[kind], alpha=0.5, label=f"next, {kind}")
        load.set_title("tokens/s of a replica over requests/s", fontsize=10, loc="left")
        wait.set_title("milliseconds to a token, p90, over requests/s", fontsize=10, loc="left")
        for one in (load, wait):
            one.set_xlabel(no_formula(load_text(served)), fontsize=7)
            if one.has_data():
                one.legend(fontsize=7, frameon=False)
    write_figure(figure, path)
