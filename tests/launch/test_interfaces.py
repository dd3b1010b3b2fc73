"""Ranks of several hosts that cannot connect: the error names the variable and the interface."""

from __future__ import annotations

import subprocess

import pytest

from hocket.launch.interfaces import interface_to
from hocket.spec.errors import HocketError


def test_the_interface_to_an_address() -> None:
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("not an address") is None
    route = subprocess.run(
        ["ip", "route", "get", "198.51.100.1"], capture_output=True, text=True, check=False
    ).stdout.split()
    if "dev" in route:  # a machine with a way out
        assert interface_to("198.51.100.1") == route[route.index("dev") + 1]


@pytest.mark.torch
@pytest.mark.parametrize("one_machine", [True, False])
def test_gloo_that_finds_no_interface(one_machine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real failure of Gloo, by an interface that this host does not have."""
    from torch.distributed import HashStore

    from hocket.launch.context import RankContext

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    context = RankContext(
        rank=0, world_size=1, local_rank=0, device_kind="cpu", one_machine=one_machine, attempt=0,
        _send=lambda _: None, _open_store=lambda _: HashStore(),
    )  # fmt: skip
    if one_machine:  # there the launcher chose the interface, and the user has none to set
        with pytest.raises(RuntimeError):
            context.init_process_group("gloo", timeout=60)
        return
    with pytest.raises(HocketError) as caught:
        context.init_process_group("gloo", timeout=60)
    assert "cannot connect to the other ranks over gloo (GLOO_SOCKET_IFNAME=nowhere0)" in str(
        caught.value
    )
    assert "export GLOO_SOCKET_IFNAME=lo on this host" in str(caught.value.hint)
    assert "`ip route get 127.0.0.1`" in str(caught.value.hint)
