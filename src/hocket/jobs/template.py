"""Job files for clusters: Slurm, Kubernetes, Docker and SkyPilot, filled in for one layout.

    options -> Template, checked -> a text of `jobs/templates`, its {{names}} replaced

A line that begins with {{?gpus}} or {{?cpu}} is kept for that kind of device only; {{?elastic}} and
{{?alone}} are for runs that continue on fewer nodes, the latter on one of a single rank.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
from importlib import resources

from hocket.spec.errors import LayoutError, OptionError, unknown
from hocket.spec.layout import Layout
from hocket.spec.legality import narrowed
from hocket.spec.serving import replica_layout

KINDS = ("slurm", "kubernetes", "docker", "skypilot", "grafana", "prometheus")
"""What can be printed; the last two do not depend on a layout."""

DRAIN, DRAIN_UNDER_LAUNCHER = 50, 25
"""Seconds that requests have to end. torchrun and Slurm kill what is left 30 s after SIGTERM."""

WAIT = 300
"""Seconds from the end of the first task of a Slurm step to that of the step."""

TORCH = "2.13.0"
"""torch's version in the CPU image; constraints.txt's."""

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,51}[a-z0-9])?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Template:
    """What a job file is filled in with.

    Attributes:
        kind: of `KINDS`. model, layout, data: as of `hocket train` and `hocket serve`.
        serve: a server instead of a training job.
        options: further flags of `hocket train` or `hocket serve`, already checked.
        name: of the job. run: its run folder. gpus_per_node: 0: CPU ranks.
        ranks_per_node: without GPUs. gpu: its name, for SkyPilot.
        time: limit, as Slurm writes it. image: of the container. storage: size of the volume.
        interface: network interface of NCCL and Gloo. launch: words between `srun` and `hocket`.
    """

    kind: str
    model: str = ""
    layout: str | None = None
    data: tuple[str, ...] = ()
    serve: bool = False
    options: tuple[str, ...] = ()
    name: str = "hocket"
    run: str | None = None
    gpus_per_node: int = 8
    ranks_per_node: int = 1
    gpu: str = "H100"
    time: str = "24:00:00"
    image: str | None = None
    storage: str = "1Ti"
    interface: str | None = None
    port: int = 8000
    launch: str = ""


def template(wanted: Template) -> str:
    """The job file as text.

    Raises:
        OptionError: an unknown kind, no model or data, or a name that Kubernetes does not take.
        LayoutError: no layout, or ranks that do not fill their nodes.
    """
    if wanted.kind not in KINDS:
        message, hint = unknown("template", wanted.kind, KINDS)
        raise OptionError(message, hint=hint if wanted.kind else "hocket template docker")
    if wanted.kind == "grafana":
        from hocket.jobs.monitoring import grafana_board

        return json.dumps(grafana_board(), indent=2) + "\n"
    if wanted.kind == "prometheus":
        from hocket.jobs.monitoring import rules

        return rules()
    if not 0 <= wanted.gpus_per_node <= 1024 or not 1 <= wanted.ranks_per_node <= 1024:
        raise OptionError(
            f"gpus_per_node is {wanted.gpus_per_node} and ranks_per_node {wanted.ranks_per_node}; "
            "a node has 0 to 1024 GPUs and at least one rank",
            hint="--gpus-per-node 8",
        )
    if not 1 <= wanted.port < 65535:
        raise OptionError(f"port is {wanted.port}; it is 1 to 65534", hint="--port 8000")
    if not _NAME.fullmatch(wanted.name):
        raise OptionError(
            f"name is {wanted.name!r}; Kubernetes takes up to 53 of a-z, 0-9 and -, a letter first",
            hint="--name hocket",
        )
    if not re.fullmatch(r"[0-9]+(-[0-9]+)?(:[0-9]{2}){0,2}", wanted.time):
        raise OptionError(
            f"time is {wanted.time!r}; Slurm reads HH:MM:SS or DAYS-HH:MM:SS",
            hint="--time 24:00:00",
        )
    if not re.fullmatch(r"[1-9][0-9]*(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?", wanted.storage):
        raise OptionError(
            f"storage is {wanted.storage!r}; a size is needed, as in 500Gi", hint="--storage 1Ti"
        )
    if wanted.kind == "docker":
        return _filled("docker", wanted, _names(wanted))
    return _job(wanted)


def _job(wanted: Template) -> str:
    """A job of ranks: its layout decides nodes, tasks and arguments."""
    verb = "serve" if wanted.serve else "train"
    from hocket.catalogue import models

    if not wanted.model:
        raise OptionError(
            "no model was named",
            hint=f"hocket template {wanted.kind} Qwen/Qwen3-8B --layout tp8 ...",
        )
    if not wanted.serve and not wanted.data:
        raise OptionError("a training job needs data", hint="--data FILE, or --serve for a server")
    if wanted.layout in (None, "auto"):
        raise LayoutError(
            "the layout decides how many nodes the job asks for",
            hint=f"--layout dp{max(1, wanted.gpus_per_node)}, or what hocket plan chooses",
        )
    layout = Layout.parse(str(wanted.layout))
    _fits_model(wanted, layout)
    if wanted.serve and wanted.model in models.model_names():  # whose weights are on the Hub
        wanted = dataclasses.replace(
            wanted, model=models.entry(wanted.model).hub_id or wanted.model
        )
    per_node = wanted.gpus_per_node or wanted.ranks_per_node
    replica = layout
    if wanted.serve:
        replica = dataclasses.replace(replica_layout(layout), microbatches=layout.microbatches)
    replicas = layout.world_size // replica.world_size
    name = f"{wanted.kind}.{verb}"
    if wanted.serve and wanted.kind == "skypilot":
        layout = replica
    if wanted.serve and wanted.kind == "kubernetes":
        if replica.world_size <= per_node:
            layout, per_node = replica, replica.world_size
        else:
            name = "kubernetes.serve-hosts"
    world = layout.world_size
    nodes = math.ceil(world / per_node)
    if world % nodes or world // nodes > per_node:
        fit = narrowed(layout, dp=max(1, nodes * per_node * layout.dp // world))
        hint = f"--layout {fit.axes_text()}" if fit.world_size == nodes * per_node else None
        raise LayoutError(
            f"the layout {layout.axes_text()} has {world} ranks; they do not fill {nodes} nodes of "
            f"{per_node} equally",
            hint=hint or f"--gpus-per-node {math.gcd(world, per_node)}",
        )
    data_ranks = layout.dp if "--elastic" in wanted.options else 1
    fewest = math.ceil(world // data_ranks / (world // nodes))  # that have the ranks of one
    kept = ("elastic", "alone")[: (fewest < nodes) + (fewest < nodes == world)]
    words = _names(wanted) | {
        "nodes": str(nodes),
        "fewest": f"{fewest}-" if fewest < nodes else "",
        "ranks_per_node": str(world // nodes),
        "replicas": str(replicas),
    }
    arguments = [wanted.model, "--layout", str(layout), *wanted.options]
    if wanted.data:
        arguments[1:1] = ["--data", *wanted.data]
    drain = DRAIN if name == "kubernetes.serve" else DRAIN_UNDER_LAUNCHER
    words |= {
        "arguments": shlex.join(arguments),
        "title": _title(wanted, layout, nodes, world // nodes),
        # Ranks that --elastic leaves out end at once, and rank 0 waits for the last upload.
        "wait": "" if {"--elastic", "--upload"} & set(wanted.options) else f"--wait={WAIT} ",
        "drain": str(drain),
        "grace": str(drain + (20 if name == "kubernetes.serve" else 10)),
        "resources": _resources(wanted, world // nodes),
        "shared_memory": "16Gi" if wanted.gpus_per_node else "4Gi",
        "accelerators": _accelerators(wanted, world // nodes),
        "argument_list": _argument_list(wanted, arguments, drain),
    }
    return _filled(name, wanted, words, *kept)


def _fits_model(wanted: Template, layout: Layout) -> None:
    """Refuse a layout that a model of the catalogue cannot be split by; others are not known here.

    The batch and the sequence are such that they divide: they are the job's own options.
    """
    from hocket.catalogue import shapes
    from hocket.planning.layouts import row

    if wanted.model not in shapes.shape_names():
        return
    batch = layout.dp * (layout.microbatches or 2 * layout.pp)
    row(layout, shapes.shape(str(wanted.model)), 256 * layout.cp * layout.tp, batch)


def _title(wanted: Template, layout: Layout, nodes: int, ranks: int) -> str:
    what = f"hocket {'serve' if wanted.serve else 'train'} {wanted.model} in {layout.axes_text()}"
    device = wanted.gpus_per_node and "GPU"
    each = f"{ranks} {device or 'CPU rank'}{'s' if ranks > 1 else ''}"
    title = f"{what}: {nodes} node{'s' if nodes > 1 else ''} of {each}."
    if layout.tp > ranks:
        title += f"\n# tp{layout.tp} crosses nodes: every layer waits for the network."
    return title


def _names(wanted: Template) -> dict[str, str]:
    """What does not depend on the layout."""
    from hocket import __version__

    folder = "/runs" if wanted.kind == "kubernetes" else "runs"
    return {
        "name": wanted.name,
        "run": shlex.quote(wanted.run or f"{folder}/{wanted.name}"),
        "title": "hocket in a container, as a user without privileges.",
        "time": wanted.time,
        "image": wanted.image or f"hocket:{__version__}",
        "storage": wanted.storage,
        "cpus": "8" if wanted.gpus_per_node else "1",
        "port": str(wanted.port),
        "metrics_port": str(wanted.port + 1),
        "retries": "6",
        "version": __version__,
        "wheel": f"hocket-{__version__}-py3-none-any.whl",
        "torch": TORCH,
        "launch": f"{wanted.launch} " if wanted.launch else "",
        "environment": "".join(f"export {k}={shlex.quote(v)}\n" for k, v in _environment(wanted)),
        "environment_yaml": "\n".join(
            f"            - name: {name}\n              value: {json.dumps(value)}"
            for name, value in _environment(wanted)
        ),
        "environment_map": "\n".join(f"  {k}: {json.dumps(v)}" for k, v in _environment(wanted)),
    }


def _environment(wanted: Template) -> list[tuple[str, str]]:
    """Variables of every rank."""
    found = [("OMP_NUM_THREADS", "1"), ("TOKENIZERS_PARALLELISM", "false")]
    if wanted.gpus_per_node:
        found.append(("NCCL_DEBUG", "WARN"))
    if wanted.interface:
        names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
        found += [(name, wanted.interface) for name in names]
    return found


def _resources(wanted: Template, ranks: int) -> str:
    """Requests and limits of a pod."""
    if wanted.gpus_per_node:
        lines = ["limits:", f"  nvidia.com/gpu: {ranks}", "requests:", f'  cpu: "{8 * ranks}"']
    else:
        lines = ["limits:", "  memory: 16Gi", "requests:", f'  cpu: "{ranks}"', "  memory: 4Gi"]
    return "\n".join(f"            {line}" for line in lines)


def _accelerators(wanted: Template, ranks: int) -> str:
    """SkyPilot's resources of a node."""
    if wanted.gpus_per_node:
        return f"  accelerators: {wanted.gpu}:{ranks}"
    return f"  cpus: {max(2, ranks)}+"


def _argument_list(wanted: Template, arguments: list[str], drain: int) -> str:
    """The arguments of a pod's server, one a line."""
    words = [
        *arguments, "--host", "0.0.0.0", "--port", str(wanted.port),
        "--metrics-port", str(wanted.port + 1), "--api-key-file", "/etc/hocket/keys",
        "--drain-seconds", str(drain), "--run", "/tmp/served",
    ]  # fmt: skip
    return "\n".join(f"            - {json.dumps(word)}" for word in words)


def _filled(name: str, wanted: Template, words: dict[str, str], *kept: str) -> str:
    """A template with its names replaced; of marked lines, those of its device and of `kept`."""
    text = resources.files("hocket.jobs").joinpath("templates", f"{name}.in").read_text("utf-8")
    marks = {"gpus" if wanted.gpus_per_node else "cpu", *kept}
    marked = [re.fullmatch(r"(?:{{\?(\w+)}})?(.*)", line) for line in text.splitlines()]
    lines = [found[2] for found in marked if found and (found[1] is None or found[1] in marks)]
    filled = re.sub(r"{{(\w+)}}", lambda match: words[match[1]], "\n".join(lines) + "\n")
    return re.sub(r"\n{3,}", "\n\n", filled)
