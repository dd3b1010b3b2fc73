"""Measured reads back equal from every form, and refuses what no machine can be."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest

from hocket.catalogue import hardware, machine_file
from hocket.spec.cluster import Cluster, Gpu, Link, Node
from hocket.spec.errors import OptionError
from hocket.spec.measured import (
    Curve,
    DevicePair,
    Dispatch,
    Host,
    LatencyFit,
    MachineMeasurements,
    MeasuredDevice,
    MeasuredKernel,
    MeasuredMatmul,
    MeasuredStream,
    Sharing,
    Update,
)

MEASURED = MachineMeasurements(
    device="cpu",
    date="2026-11-20T12:00:00Z",
    torch="2.13.0",
    hocket="0.1.0",
    host=Host(name='a "b"\\c\x7f', cpu="EPYC", cores=2, caches=(32768, 2**20, 2**25), load=0.1),
    quick=True,
    unknown=("no NVML",),
    devices=(MeasuredDevice(index=0, name="EPYC", memory=2**34, nics=("eth0", "eth1")),),
    pairs=(DevicePair(first=0, second=1, path="MEM", rate=1e9 / 3, latency=1e-6, measured=True),),
    products=(
        MeasuredMatmul(dtype="fp32", form="nt", m=512, n=256, k=64, seconds=1 / 3e4, spread=0.01),
        MeasuredMatmul(dtype="fp32", form="tn", m=64, n=256, k=512, seconds=2e-5),
    ),
    streams=(MeasuredStream(operation="copy", bytes=2**20, seconds=1e-4),),
    dispatch=(Dispatch(operation="add", forward=2e-6, recorded=3e-6, backward=4e-6),),
    kernels=(
        MeasuredKernel(
            name="attention", dtype="fp32", shape=(2, 4, 128, 64), forward=1e-3, backward=3e-3
        ),
    ),
    updates=(Update(name="adamw", elements=10**6, tensors=10, seconds=1e-3),),
    sharing=(Sharing(ranks=4, product=2.1, stream=2.5, dispatch=2.0),),
    curves=(
        Curve(
            backend="shm",
            operation="all-reduce",
            ranks=2,
            world=4,
            sizes=(1024, 2**20),
            seconds=(1e-5, 7e-4),
            spread=(0.1, 0.05),
            lines=(
                LatencyFit(bytes=4096, latency=1e-5, rate=1e9),
                LatencyFit(bytes=2**20, latency=0.0, rate=1.5e9),
            ),
            error=0.02,
            worst=0.1,
        ),
    ),
)


def cluster() -> Cluster:
    gpu = Gpu(
        name="EPYC core", flops={"fp32": 1e11 / 3}, memory=2**33, usable=2**33, bandwidth=1e10
    )
    link = Link(kind="shared-memory", bandwidth=1e9 / 7, domain=2)
    node = Node(gpu=gpu, num_gpus=2, link=link, pcie=1e9, network=0.0, nics=1)
    return Cluster(name="here", num_nodes=1, node=node, measured=MEASURED)


def test_json_reads_back_equal() -> None:
    assert MachineMeasurements.from_json(MEASURED.to_json()) == MEASURED


def test_a_file_reads_back_equal() -> None:
    text = machine_file.cluster_toml(cluster())
    again = machine_file.read_cluster(text, gpu=hardware.gpu, node=hardware.node)
    assert again == cluster()
    assert "# dtype, form, m, n, k, seconds, spread\n" in text


def test_rows_of_an_older_hocket_are_shorter() -> None:
    data = MEASURED.to_dict()
    data["products"][0] = data["products"][0][:-1]
    assert MachineMeasurements.from_dict(data).products[0].spread == 0.0


def test_ranks_beyond_the_cores_share_the_memory() -> None:
    four = cluster().with_ranks(4)
    assert (four.num_gpus, four.domain, four.node.gpu.memory) == (4, 4, 2**32)
    assert four.measured is not None
    assert four.measured.host.cores == 2


def put(data: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    data = copy.deepcopy(data)
    at: Any = data
    for key in path[:-1]:
        at = at[key]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("products", 0, 5), -1e-3, r"seconds of measured.products\[0\] is -0.001"),
        (("products", 0, 5), 0, "a number above 0"),
        (("products", 0, 5), math.nan, "nan"),
        (("products", 0, 5), math.inf, "inf"),
        (("products", 0, 5), 1e300, "no machine has that much"),
        (("products", 0, 5), 10**400, "no machine has that much"),
        (("products", 0, 5), "fast", "'fast'"),
        (("products", 0, 5), True, "True"),
        (("products", 0, 2), 1.5, "a whole number of at least 1"),
        (("products", 0, 2), 0, "a whole number of at least 1"),
        (("products", 0, 1), "tt", "unknown form of a matmul 'tt'"),
        (("products", 0), ["fp32", "nt"], "has no m, n, k, seconds"),
        (("products", 0), [1] * 9, "9 values, not 7"),
        (("products", 0), "fp32", "must be a list"),
        (("products",), 3, "must be a list"),
        (("sharing", 0, 1), None, "None"),
        (("host",), KeyError, "has no host"),
        (("host", "cores"), KeyError, "host has no cores"),
        (("host", "cores"), 0, "at least 1"),
        (("host", "crores"), 2, "did you mean 'cores'"),
        (("host", "caches"), 5, "must be a list"),
        (("divices",), [], "did you mean 'devices'"),
        (("version",), 99, "reads version 1"),
        (("date",), 5, "must be a text"),
        (("quick",), 1, "true or false"),
        (("curves", 0, "seconds"), [1e-5], "2 sizes and 1 seconds"),
        (("curves", 0, "sizes"), [2**20, 1024], "do not ascend"),
        (("curves", 0, "sizes"), [], "0 sizes"),
        (("curves", 0, "operation"), "all-redcue", "did you mean 'all-reduce'"),
        (("curves", 0, "ranks"), 3, "groups of 3 do not fill 4 ranks"),
        (("curves", 0, "lines", 0, 2), 0.0, "above 0"),
        (("curves", 0), 1, "must be a table"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_is_refused(path: tuple[Any, ...], value: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words.replace("(", r"\(")) as caught:
        MachineMeasurements.from_dict(put(MEASURED.to_dict(), path, value))
    assert str(caught.value)


def test_text_that_is_cut_off_is_refused() -> None:
    text = MEASURED.to_json()
    for end in range(0, len(text), 97):
        with pytest.raises(OptionError):
            MachineMeasurements.from_json(text[:end])
    with pytest.raises(OptionError, match="must be a table"):
        MachineMeasurements.from_json(json.dumps([1]))


def test_files_that_are_cut_off_are_refused_or_say_less() -> None:
    text = machine_file.cluster_toml(cluster())
    refused = 0
    for end in range(0, len(text), 41):
        try:
            machine_file.read_cluster(text[:end], gpu=hardware.gpu, node=hardware.node)
        except OptionError:
            refused += 1
    assert refused > 0.6 * len(range(0, len(text), 41))
