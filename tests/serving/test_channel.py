"""Frames and channels: whole messages, limits, strangers."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hocket.serving.engine.channel import Channel, ChannelClosed, ChannelListener, connect
from hocket.serving.front.frames import (
    FrameReader,
    FrameTooLong,
    decode_frame,
    encode,
    hello,
    pack,
)
from hocket.spec.errors import OptionError

TOKEN = bytes(range(32))


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    left, right = (Channel(end) for end in socket.socketpair())
    yield left, right
    left.close()
    right.close()


def test_frames_come_out_whole_however_the_stream_is_cut() -> None:
    payloads = [b"", b"one", bytes(300), "drei \N{SNOWMAN}".encode()]
    stream = b"".join(map(pack, payloads))
    for size in (1, 2, 3, 7, 1000):
        reader = FrameReader(1000)
        found = [
            payload
            for at in range(0, len(stream), size)
            for payload in reader.feed(stream[at : at + size])
        ]
        assert found == payloads
        assert not reader.inside


def test_a_length_above_the_limit_is_refused_before_the_payload() -> None:
    with pytest.raises(FrameTooLong, match="4294967295 bytes; at most 1000"):
        FrameReader(1000).feed(b"\xff\xff\xff\xff")
    assert FrameReader(3).feed(pack(b"abc")) == [b"abc"]
    with pytest.raises(FrameTooLong):
        FrameReader(2).feed(pack(b"abc"))


def test_a_message_is_a_json_object() -> None:
    (payload,) = FrameReader(1000).feed(encode({"do": "add", "n": [1, 2.5, None]}))
    assert decode_frame(payload) == {"do": "add", "n": [1, 2.5, None]}
    for bad, why in ((b"[1]", "object"), (b"{", "Expecting"), (b"\xff", "decode"), (b"", "char 0")):
        with pytest.raises(ValueError, match=why):
            decode_frame(bad)


def test_what_the_socket_does_not_take_is_kept_in_order(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    payloads = [bytes([n]) * 100_000 for n in range(20)]
    sent = [left.send(payload) for payload in payloads]
    assert sent[0]
    assert not sent[-1]
    assert left.unsent_bytes > 1_000_000
    found: list[bytes] = []

    def read() -> None:
        found.extend(right.receive() for _ in payloads)

    reader = threading.Thread(target=read)
    reader.start()
    left.flush()
    reader.join(60)
    assert found == payloads
    assert left.unsent_bytes == 0


def test_one_that_waits_for_a_frame_sends_what_is_left_meanwhile(
    pair: tuple[Channel, Channel],
) -> None:
    """Two ends that both have much to say do not wait for each other."""
    big = bytes(3_000_000)
    found: dict[int, bytes] = {}

    def talk(number: int) -> None:
        assert not pair[number].send(big + bytes([number]))
        found[number] = pair[number].receive()
        pair[number].flush()

    threads = [threading.Thread(target=talk, args=(n,), daemon=True) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {0: big + b"\x01", 1: big + b"\x00"}


def test_a_closed_end_is_reported_after_what_it_said(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    left.send(b"last words")
    left.close()
    assert right.receive() == b"last words"
    with pytest.raises(ChannelClosed):
        right.receive()
    with pytest.raises(ChannelClosed):
        right.take()
    with pytest.raises(ChannelClosed):
        right.send(b"too late")


def test_only_who_knows_the_secret_comes_in(tmp_path: Path) -> None:
    door = ChannelListener(tmp_path / "door", TOKEN)
    assert stat.S_IMODE(os.stat(tmp_path / "door").st_mode) == 0o600
    wrong = connect(tmp_path / "door", bytes(32), 1)
    hurried = socket.socket(socket.AF_UNIX)
    hurried.connect(str(tmp_path / "door"))
    hurried.sendall(hello(TOKEN, 2)[:-1])
    hurried.close()
    right = connect(tmp_path / "door", TOKEN, 3)
    entered = door.accept(10)
    assert entered is not None
    channel, rank = entered
    assert rank == 3
    with pytest.raises(ChannelClosed):
        wrong.receive()
    right.send(b"hello")
    assert channel.receive() == b"hello"
    assert door.accept(0.01) is None
    door.close()
    assert not (tmp_path / "door").exists()
    with pytest.raises(ChannelClosed):
        connect(tmp_path / "door", TOKEN)


def test_a_path_too_long_for_a_socket_is_reported(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="100 characters"):
        ChannelListener(tmp_path / ("x" * 120), TOKEN)
