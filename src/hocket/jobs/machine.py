"""This machine as a Cluster: measured once and kept, for commands with `auto`.

cluster("auto")             what was measured here before, else a quick probe
cluster("2x8xH100-SXM")     the catalogue's, or a TOML file
require_here(cluster)       that its devices are on this machine, for what must run on it
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import hocket
from hocket.jobs.measured_cluster import measured_cluster
from hocket.jobs.probe import BUSY, Listener, ProbeTarget, measure_machine, present_machine
from hocket.spec.cluster import Cluster
from hocket.spec.errors import HocketError, OptionError
from hocket.spec.files import write_text
from hocket.spec.install import install_line
from hocket.spec.measured import MachineMeasurements
from hocket.spec.user_cache import cache_folder

AUTO = "auto"
PATIENCE = 120.0
"""Seconds that `auto` waits for another probe of this machine."""


def named_cluster(
    text: str | os.PathLike[str],
    *,
    ranks: int | None = None,
    device: str = "auto",
    on_event: Listener | None = None,
) -> Cluster:
    """The cluster that a `--cluster` names.

    Args:
        text: `auto` is this machine: as it was probed before, else probed now in the quick form.
            Anything else is a name of the catalogue or a TOML file.
        ranks: as how many devices a CPU machine is looked at, cores or not. None: its cores.
        device: of `auto`: `cpu`, `cuda`, or whichever it has.
        on_event: as `jobs.probe.measure_machine`.

    Raises:
        HocketError: what the caller can mend.
    """
    if str(text) == AUTO:
        found = _auto(device, on_event)
    else:
        from hocket.catalogue.hardware import cluster as named

        found = named(os.fspath(text))
    return found.with_ranks(ranks) if ranks is not None and found.is_cpu else found


def kept(device: str = "auto") -> Cluster | None:
    """What was measured of this machine before, by this hocket and torch; None where nothing was.

    Raises:
        OptionError: no such device here.
    """
    return _kept(present_machine(device))


def probe(
    *, device: str = "auto", quick: bool = False, on_event: Listener | None = None
) -> Cluster:
    """Measure this machine now, and keep it for `auto`.

    A quick form does not displace a full one, unless that was disturbed and this was not.

    Raises:
        HocketError: as `jobs.probe.measure_machine`, or another probe is measuring.
    """
    here = present_machine(device)
    _require_torch()
    with _alone(wait=0.0):
        found = measured_cluster(measure_machine(device=device, quick=quick, on_event=on_event))
        before = _kept(here)
        if not quick or before is None or not _better(before, found):
            _keep(here, found)
    return found


def _better(full: Cluster, quick: Cluster) -> bool:
    """Whether what is kept tells more than a quick form that was measured now."""
    if full.measured is None or quick.measured is None or full.measured.quick:
        return False
    return full.measured.host.load <= BUSY or quick.measured.host.load > BUSY


def _auto(device: str, on_event: Listener | None) -> Cluster:
    here = present_machine(device)
    found = _kept(here)
    if found is not None:
        return found
    _require_torch()
    with _alone(wait=PATIENCE):
        found = _kept(here)  # by the one that was waited for
        if found is None:
            found = measured_cluster(measure_machine(device=device, quick=True, on_event=on_event))
            _keep(here, found)
    return found


# --- that it is this machine ----------------------------------------------------------------------


def require_here(cluster: Cluster, *, ranks: int | None = None) -> None:
    """That the devices of a measured cluster are on this machine, for what is to run on it.

    A cluster that nobody measured (of the catalogue, or written by hand) promises nothing.

    Args:
        ranks: how many devices the run takes. None: all that were measured.

    Raises:
        OptionError: another machine, another kind of device, or fewer devices than were measured.
    """
    if cluster.measured is None:
        return
    measured = cluster.measured
    mend = "hocket probe --out FILE measures the machine as it is now"
    here = present_machine("auto" if measured.device == "cuda" else "cpu")
    if measured.device == "cuda":
        now, then = here.found.devices, measured.devices
        if here.kind != "cuda" or not now:
            raise OptionError(
                f"{cluster.name} was measured on {_count(len(then), then[0].name)}; "
                "this machine shows no GPU that torch can use",
                hint="--device cpu, or " + mend,
            )
        needed = len(then) if ranks is None else ranks
        missing = [d for d in then[:needed] if d.name not in {n.name for n in now}]
        if len(now) < needed or missing:
            raise OptionError(
                f"{cluster.name} was measured on {_count(len(then), then[0].name)} on "
                f"{measured.date[:10]}; this machine shows {_count(len(now), now[0].name)} now, "
                f"and {needed} are needed",
                hint=mend,
            )
        return
    if (measured.host.cpu, measured.host.name) != (here.host.cpu, here.host.name):
        raise OptionError(
            f"{cluster.name} was measured on {measured.host.name} ({measured.host.cpu}); "
            f"this is {here.host.name} ({here.host.cpu})",
            hint=mend,
        )
    if here.host.cores < measured.host.cores:
        raise OptionError(
            f"{cluster.name} was measured with {measured.host.cores} cores on "
            f"{measured.date[:10]}; processes may use {here.host.cores} here now",
            hint=mend,
        )


def _count(number: int, name: str) -> str:
    return f"{number} x {name}"


# --- what is kept ---------------------------------------------------------------------------------


def machine_folder() -> Path:
    """Where measurements of this user are kept."""
    return cache_folder("probes")


def kept_file(here: ProbeTarget) -> Path:
    """Where `auto` keeps this machine: another one, or other versions, have another file."""
    host = dataclasses.replace(here.host, load=0.0)
    devices = [dataclasses.astuple(one) for one in here.found.devices]
    key = [here.kind, dataclasses.astuple(host), devices, _version("torch"), hocket.__version__]
    digest = hashlib.sha256(json.dumps(key, default=str).encode()).hexdigest()[:24]
    return machine_folder() / f"{digest}.toml"


def _kept(here: ProbeTarget) -> Cluster | None:
    from hocket.catalogue.hardware import cluster as named

    try:
        found = named(str(kept_file(here)))
    except (HocketError, OSError):  # none yet, or one that was cut off: measure again
        return None
    return found if found.measured is not None else None


def _keep(here: ProbeTarget, found: Cluster) -> None:
    from hocket.catalogue.hardware import to_toml

    file = kept_file(here)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, to_toml(found))
    except OSError:
        return  # what cannot be kept is measured again


@contextlib.contextmanager
def _alone(wait: float) -> Iterator[None]:
    """Two probes at once would measure each other: one at a time, of this user.

    Raises:
        OptionError: another one is measuring, and was not done within `wait` seconds.
    """
    import fcntl  # here, since a plan needs no POSIX

    try:
        machine_folder().mkdir(parents=True, exist_ok=True)
        lock = open(machine_folder() / "lock", "a+")  # noqa: SIM115  closed below, by the stack
    except OSError:  # nowhere to keep anything: nobody to wait for
        yield
        return
    with lock:
        end = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= end:
                    lock.seek(0)
                    who = lock.read(32).strip() or "unknown"
                    raise OptionError(
                        f"another probe (process {who}) measures this machine; two at once would "
                        "measure each other",
                        hint="wait until it is done",
                    ) from None
                time.sleep(0.2)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise OptionError(
            "measuring needs torch, which is not installed", hint=install_line("train")
        )


def _version(package: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


# --- what the verb shows and writes ---------------------------------------------------------------


def machine_text(measured: MachineMeasurements) -> str:
    """What was measured, for the terminal."""
    from hocket.reporting.measured import measured_text

    return measured_text(measured)


def writable(files: Sequence[str | os.PathLike[str]], instead: str = "cluster.toml") -> None:
    """That each of these files can be written: asked before a minute is spent measuring.

    `instead`: a file's name for the hint where a folder was named.

    Raises:
        OptionError: a folder that is not there or does not let us, or a folder's own name.
    """
    for name in files:
        path = Path(name)
        if path.is_dir():
            raise OptionError(f"{path} is a folder", hint=str(path / instead))
        if not path.parent.is_dir():
            raise OptionError(
                f"there is no folder {path.parent} to write {path.name} in",
                hint=f"mkdir -p {path.parent}",
            )
        try:  # what permissions say is not the whole truth: a full disk, /proc
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise OptionError(f"{path} cannot be written: {error.strerror}") from None


def save_machine(found: Cluster, file: str | os.PathLike[str]) -> None:
    """Write the file that every verb takes as `--cluster`."""
    from hocket.catalogue.hardware import to_toml

    write_text(Path(file), to_toml(found))


def draw_topology(measured: MachineMeasurements, file: str | os.PathLike[str]) -> None:
    from hocket.reporting.topology import svg

    write_text(Path(file), svg(measured))
