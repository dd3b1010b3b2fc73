"""The topology of a run: what the machine's devices are joined by, kept in the run folder.

It is the part of the probe that is not about speed alone: host, devices, and what joins each two of
them. `hocket report` draws it next to the layout.
"""

from __future__ import annotations

import dataclasses

from hocket.jobs.probe import BUSY
from hocket.spec.errors import HocketError
from hocket.spec.files import write_text
from hocket.spec.measured import MachineMeasurements
from hocket.spec.run import RunFolder


def topology_of(measured: MachineMeasurements) -> MachineMeasurements:
    """The host, its devices and pairs alone: a few kilobytes of what can be a hundred."""
    return dataclasses.replace(
        measured,
        products=(),
        streams=(),
        dispatch=(),
        kernels=(),
        updates=(),
        sharing=(),
        curves=(),
    )


def keep(folder: RunFolder, cluster: str, device: str = "auto") -> str:
    """Write topology.json where the machine was measured; a run is never held up by it.

    Returns what a person should know of that measurement: that it was disturbed; else nothing.

    Args:
        cluster: as `jobs.forecast_policy.before`; of `none` nothing is kept.
        device: of the run: which measurements of this machine are meant.
    """
    from hocket.jobs import forecast, forecast_policy

    if cluster == forecast_policy.NONE:
        return ""
    try:
        measured = forecast.measurements(cluster, device)
    except HocketError:
        return ""
    if measured is None:
        return ""
    write_text(folder.topology_file, topology_of(measured).to_json())
    if measured.host.load <= BUSY:
        return ""
    return (
        f"other programs took {measured.host.load:.2g} of {measured.host.cores} cores while this "
        "machine was probed, so forecasts are less certain; hocket probe --quick measures again"
    )
