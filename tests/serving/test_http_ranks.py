"""A whole server with ranks that compute: hostile requests, disconnects, and the next succeeds."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hocket
from tests.jobs.served_model import CONFIG, model
from tests.jobs.test_serve import Visitor
from tests.serving.http_hostile import CHAT, MESSAGE, PLAIN, REFUSED
from tests.serving.http_live import TEMPLATE, Door, error, events

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

NORMAL = {"prompt": "note by note", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def weighted(folder: Path) -> Path:
    """A small model of random weights."""
    from safetensors.numpy import save_file

    config = {**CONFIG, "max_position_embeddings": 512}
    model(folder)
    (folder / "config.json").write_text(json.dumps(config))
    hidden, wide, size = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    narrow = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (size, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.self_attn.q_proj.weight": (hidden, hidden),
            f"{name}.self_attn.k_proj.weight": (narrow, hidden),
            f"{name}.self_attn.v_proj.weight": (narrow, hidden),
            f"{name}.self_attn.o_proj.weight": (hidden, hidden),
            f"{name}.mlp.gate_proj.weight": (wide, hidden),
            f"{name}.mlp.up_proj.weight": (wide, hidden),
            f"{name}.mlp.down_proj.weight": (hidden, wide),
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.post_attention_layernorm.weight": (hidden,),
        }
    draws = np.random.default_rng(0)
    save_file(
        {name: draws.normal(size=shape).astype(np.float32) / 4 for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    return folder


class Client(Door):
    """Asks, and looks whether anything is left."""

    def __init__(self, event: dict[str, Any]) -> None:
        super().__init__(int(event["address"].rsplit(":", 1)[1]))
        self.metrics = event["metrics"] + "/metrics"
        self.expected = self.normal()

    def normal(self) -> str:
        status, _, body = self.post(PLAIN, NORMAL)
        assert status == 200, body
        return str(json.loads(body)["choices"][0]["text"])

    def well(self) -> None:
        """An ordinary request is answered as ever."""
        assert self.normal() == self.expected

    def idle(self) -> None:
        """No request is left, and no block is held."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            text = urllib.request.urlopen(self.metrics).read().decode()
            held = [f'hocket_{name}{{replica="0"}} 0.0' in text for name in
                    ("running", "waiting", "blocks_used")]  # fmt: skip
            if all(held):
                return
            time.sleep(0.05)
        raise AssertionError(text)

    def leave(self, body: dict[str, Any], path: str) -> None:
        """Ask, and go away while it is answered."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.port)) as door:
            door.sendall(head.encode() + data)
            if body.get("stream"):
                assert b"200 OK" in door.recv(1000)
            else:
                time.sleep(0.05)
            door.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def attack(event: dict[str, Any]) -> None:
    client = Client(event)
    for name, (path, body, expected) in REFUSED.items():
        if "too large" in name:
            continue  # of this server's bodies, which may have eight megabytes
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, _, answer = client.post(path, None, data=data)
        assert status in (expected, 413), (name, answer[:500])
        error(answer)
    client.well()
    for number in range(12):
        body = {"max_tokens": 300, "stream": number % 2 == 0, "ignore_eos": True, "n": 2}
        body |= {"messages": [MESSAGE]} if number % 3 else {"prompt": "x" * 50}
        client.leave(body, CHAT if number % 3 else PLAIN)
        if number % 4 == 0:
            client.well()
    client.well()
    client.idle()
    # What is asked well is answered, by the same ranks.
    options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    status, _, answer = client.post(PLAIN, {**NORMAL, **options})
    chunks = events(answer)
    assert "".join(c["choices"][0]["text"] for c in chunks[:-2]) == client.expected
    assert chunks[-2]["usage"]["completion_tokens"] == 12
    scored = {"prompt": "abcd", "max_tokens": 0, "echo": True, "logprobs": 1}
    status, _, answer = client.post(PLAIN, scored)
    found = json.loads(answer)["choices"][0]["logprobs"]["token_logprobs"]
    assert found[0] is None
    assert all(-50 < one < 0 for one in found[1:]), found
    cut = {**NORMAL, "stop": client.expected[3:5]}
    assert json.loads(client.post(PLAIN, cut)[2])["choices"][0]["finish_reason"] == "stop"
    late = {**NORMAL, "max_tokens": 300, "deadline": 0.01}
    status, _, answer = client.post(PLAIN, late)
    assert (status, error(answer)["code"]) == (504, "deadline_exceeded")
    client.idle()
    client.well()


@pytest.mark.usefixtures("warm")
def test_ranks_outlive_any_request(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    visitor = Visitor(attack)
    hocket.serve(
        weighted(tmp_path / "model"), layout="tp2", run=tmp_path / "run", on_event=visitor,
        device="cpu", cluster="none", port=0, metrics_port=0, max_model_len=384, num_blocks=24,
        max_num_seqs=8, chat_template_file=os.fspath(template),
    )  # fmt: skip
    visitor.over()
