"""Faults: a server under load while replicas die, clients storm or read slowly, weights change.

    python -m benchmarks.serve.faults --faults 40 --seed 0

Two tiny models of random weights are served by two replicas on CPU. Client threads ask all the
time, every other request as a stream, and retry what they may: 429, 503, an error event in a
stream. Faults are drawn from the seed and happen one after the other:

    kill      SIGKILL to a rank of a replica
    storm     more requests at once than run and wait
    slow      streams that are not read for a while, and clients that leave in the middle
    reload    POST /v1/models/reload with the other model
    hangup    SIGHUP: the served weights are read again

An answer is right if its tokens are those that plain transformers generates, from the one model or
from the other, greedily.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from hocket.launch.spare import is_spare

KINDS = ("kill", "storm", "slow", "reload", "hangup")
PROMPTS = ["One melody", "note by note", "to several voices", "x" * 40, "sounding", "rest, and"]
TOKENS = 20
CONFIG = {
    "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "eos_token_id": 256, "initializer_range": 0.3, "tie_word_embeddings": False,
}  # fmt: skip


def models(folder: Path) -> dict[str, dict[str, list[int]]]:
    """Two models in `folder`, `a` and `b`, and what each answers to each prompt."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hocket.training.tokenizer import byte_tokenizer

    answers: dict[str, dict[str, list[int]]] = {}
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
        model.save_pretrained(folder / name)
        words = byte_tokenizer()
        words.save(folder / name)
        answers[name] = {}
        for prompt in PROMPTS:
            ids = torch.tensor([list(words.encode(prompt))])
            with torch.no_grad():
                for _ in range(TOKENS):
                    following = model(ids).logits[0, -1].argmax().reshape(1, 1)
                    ids = torch.cat([ids, following], 1)
            answers[name][prompt] = ids[0, -TOKENS:].tolist()
    return answers


@dataclasses.dataclass
class Reply:
    """One try: its HTTP status (0: the connection ended), tokens, and whether it may be retried."""

    status: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    retry_after: float | None = None
    text: str = ""


def ask(port: int, prompt: str, *, stream: bool, pause: float = 0.0) -> Reply:
    """One request; a stream is read to its end, after `pause` seconds without reading."""
    body = {
        "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 1,
        "return_tokens_as_token_ids": True, "stream": stream,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        time.sleep(pause)
        data = answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return Reply(0, text=repr(error))
    finally:
        connection.close()
    after = answer.getheader("Retry-After")
    seconds = None if after is None else float(after)
    if answer.status != 200:
        return Reply(answer.status, retry_after=seconds, text=data)
    parts = [data]
    if stream:
        lines = [line.removeprefix("data: ") for line in data.splitlines() if line]
        parts = [line for line in lines if line != "[DONE]"]
    tokens: list[int] = []
    for part in map(json.loads, parts):
        if "error" in part:
            return Reply(503, retry_after=1.0, text=data[-300:])
        found = part["choices"][0].get("logprobs") or {"tokens": []}
        tokens += [int(token.removeprefix("token_id:")) for token in found["tokens"]]
    return Reply(200, tokens)


class Load:
    """Clients that ask all the time.

    Attributes:
        answered, wrong, retried: requests. lost: those that no retry has answered.
        errors: tries by status.
    """

    def __init__(self, port: int, answers: dict[str, dict[str, list[int]]], clients: int) -> None:
        self.port, self.answers = port, answers
        self.over = threading.Event()
        self.lock = threading.Lock()
        self.answered = self.wrong = self.retried = 0
        self.lost: list[str] = []
        self.errors: collections.Counter[int] = collections.Counter()
        self.threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(clients)]
        for thread in self.threads:
            thread.start()

    def _ask(self, client: int) -> None:
        draws = random.Random(client)
        while not self.over.is_set():
            self.one(draws.choice(PROMPTS), stream=draws.random() < 0.5)

    def one(self, prompt: str, *, stream: bool, pause: float = 0.0) -> None:
        """One request, with its retries."""
        reply = Reply(0)
        for _ in range(40):
            reply = ask(self.port, prompt, stream=stream, pause=pause)
            if reply.status == 200:
                break
            with self.lock:
                self.errors[reply.status] += 1
                if reply.status == 429 and reply.retry_after is None:
                    self.lost.append("429 without Retry-After")
            if reply.status not in (429, 503):
                break
            time.sleep(0.2)
        with self.lock:
            if reply.status != 200:
                self.lost.append(f"{reply.status}: {reply.text[:200]}")
                return
            self.answered += 1
            right = (self.answers[name][prompt] for name in self.answers)
            self.wrong += reply.tokens not in list(right)

    def end(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()


class Server:
    """`hocket serve` of model `a` on two replicas."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        words = [
            *(sys.executable, "-m", "hocket", "serve", str(folder / "a"), "--layout", "dp2"),
            *("--device", "cpu", "--port", "0", "--metrics-port", "0", "--cluster", "none"),
            *("--max-queue", "16", "--max-num-seqs", "4", "--run", str(folder / "run")),
            *("--reload-dir", str(folder), "--max-restarts", "1000", "--json"),
        ]
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=self.log.open("w"), text=True
        )
        assert self.process.stdout is not None
        event: dict[str, Any] = {}
        while event.get("event") != "ready":
            line = self.process.stdout.readline()
            assert line, self.log.read_text()
            event = json.loads(line)
        self.notes: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        self.port = int(event["address"].rsplit(":", 1)[1])
        self.metrics = int(event["metrics"].rsplit(":", 1)[1])

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.notes.append(str(json.loads(line).get("text", "")))

    def reloads(self) -> int:
        """Reloads of weights that have ended."""
        return sum("replicas serve the weights" in note for note in list(self.notes))

    def living(self) -> int:
        """Replicas that answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics, timeout=30)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return sum(f'hocket_running{{replica="{n}"}}' in text for n in range(2))

    def ranks(self) -> list[int]:
        """Process ids of ranks: what the fork servers of the replicas have forked, but spares."""
        parents: dict[int, int] = {}
        servers = set()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
                )
                if b"hocket.launch.server" in (entry / "cmdline").read_bytes():
                    servers.add(int(entry.name))
            except (OSError, ValueError):
                continue
        mine = {pid for pid in servers if parents.get(pid) == self.process.pid}
        return sorted(pid for pid in servers if parents.get(pid) in mine and not is_spare(pid))

    def reload(self, model: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/models/reload", json.dumps({"path": model}), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def _until(condition: Any, seconds: float = 60.0) -> float:
    """Seconds until something holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it did not come"
        time.sleep(0.01)
    return time.monotonic() - began


class Faults:
    """Brings faults on a server, one after the other."""

    def __init__(self, server: Server, load: Load, seed: int) -> None:
        self.server, self.load = server, load
        self.draws = random.Random(seed)
        self.model = "a"

    def bring(self, kind: str) -> float:
        """One fault; seconds until the server is as before."""
        seconds: float = getattr(self, f"_{kind}")()
        return seconds

    def _kill(self) -> float:
        os.kill(self.draws.choice(self.server.ranks()), signal.SIGKILL)
        gone = _until(lambda: self.server.living() < 2)
        return gone + _until(lambda: self.server.living() == 2)

    def _storm(self) -> float:
        before = self.load.errors[429]
        began = time.monotonic()
        threads = [
            threading.Thread(
                target=self.load.one, args=(self.draws.choice(PROMPTS),), kwargs={"stream": False}
            )
            for _ in range(120)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert self.load.errors[429] > before, "the queue was never full"
        return time.monotonic() - began

    def _slow(self) -> float:
        began = time.monotonic()
        body = json.dumps({"prompt": "x", "max_tokens": 150, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        leaving = []
        for _ in range(3):
            leaving.append(socket.create_connection(("127.0.0.1", self.server.port)))
            leaving[-1].sendall(head.encode() + body)
        for _ in range(3):
            self.load.one(self.draws.choice(PROMPTS), stream=True, pause=0.5)
        for door in leaving:
            door.close()
        return time.monotonic() - began

    def _reload(self) -> float:
        self.model = "b" if self.model == "a" else "a"
        before, began = sum(self.load.errors.values()) - self.load.errors[429], time.monotonic()
        status, text = self.server.reload(self.model)
        assert status == 200, text
        seconds = time.monotonic() - began
        after = sum(self.load.errors.values()) - self.load.errors[429]
        assert before == after, "a request met with an error while weights were reloaded"
        reply = ask(self.server.port, PROMPTS[0], stream=False)
        assert reply.tokens == self.load.answers[self.model][PROMPTS[0]], "the old weights answer"
        return seconds

    def _hangup(self) -> float:
        before = self.server.reloads()
        self.server.process.send_signal(signal.SIGHUP)
        return _until(lambda: self.server.reloads() > before)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=4)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="hocket-faults-") as name:
        folder = Path(name)
        answers = models(folder)
        server = Server(folder)
        load = Load(server.port, answers, given.clients)
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        try:
            faults = Faults(server, load, given.seed)
            draws = random.Random(given.seed)
            for number in range(given.faults):
                kind = KINDS[number] if number < len(KINDS) else draws.choice(KINDS)
                seconds[kind].append(faults.bring(kind))
                time.sleep(draws.random() * 0.3)
        finally:
            load.end()
            server.end()
    print("| fault | number | seconds, median | seconds, most |\n|---|---|---|---|")
    for kind, found in seconds.items():
        if found:
            middle = sorted(found)[len(found) // 2]
            print(f"| {kind} | {len(found)} | {middle:.2f} | {max(found):.2f} |")
    errors = ", ".join(f"{count} x {status}" for status, count in sorted(load.errors.items()))
    print(
        f"\n{load.answered} requests answered, {load.wrong} with a wrong token, {len(load.lost)} "
        f"lost; tries that were retried: {errors or 'none'}"
    )
    for text in load.lost[:5]:
        print(text)
    return int(bool(load.wrong or load.lost))


if __name__ == "__main__":
    raise SystemExit(main())
