"""Four people's paths: scripts of the commands that the docs name, run as a new user runs them."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.test_docs import PAGES, ROOT, commands, shape
from tests.hub_server import TOKEN, Repo, folder, serving
from tests.support.ports import free_ports

HERE = Path(__file__).parent
SCRIPTS = sorted(HERE.glob("*.sh"))


def named() -> list[list[str]]:
    """The commands of all pages, those that are shown and not run here among them."""
    found = [shape(words) for page in PAGES for words in commands(page)]
    for page in PAGES:
        text = page.read_text("utf-8").replace("\\\n", " ")
        lines = [line for line in text.splitlines() if line.startswith("$ hocket ")]
        found += [shape(shlex.split(line, comments=True)[2:]) for line in lines]
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_command_is_on_a_page(script: Path) -> None:
    known = named()
    lines = [line.partition("hocket ")[2] for line in script.read_text("utf-8").splitlines()
             if not line.startswith("#") and "hocket " in line]  # fmt: skip
    assert len(lines) >= 5
    for line in lines:
        assert shape(shlex.split(line)) in known, line


def hub_of(tmp_path: Path) -> Repo:
    """meta-llama/Llama-3.1-8B by its id and its kind, of two small layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hocket.training.tokenizer import resolve_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    resolve_tokenizer("bytes", model_dir=None).save(tmp_path / "llama")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (tmp_path / "llama" / "chat_template.jinja").write_text(template)
    return Repo("meta-llama/Llama-3.1-8B", folder(tmp_path / "llama"))


@pytest.mark.ranks
@pytest.mark.timeout(400)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_path_ends_where_it_leads(script: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    shutil.copy(HERE / "ask", work)
    shutil.copy(ROOT / "CHANGELOG.md", work)
    talk = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Good day. " * 40},
    ]
    (work / "chats.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 4000)
    port = free_ports(2)  # the second is that of the server's metrics
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(serving(hub_of(tmp_path)))
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(tmp_path / "home"),
            "PORT": str(port),
            "PYTHONPATH": str(ROOT / "src"),
            "HF_ENDPOINT": hub.address,
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        with subprocess.Popen(
            ["bash", "-x", script], cwd=work, env=environment, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as running:  # fmt: skip
            try:
                said, _ = running.communicate(timeout=390)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 0, said[-6000:]
    assert "Traceback" not in said, said[-6000:]
