"""What others take beside a run: our own children, the ended ones too, are not others."""

from __future__ import annotations

import subprocess
import sys

from hocket.jobs.background_load import BackgroundLoad, own_seconds


def test_children_are_ours_after_they_have_ended() -> None:
    before = own_seconds()
    background_load = BackgroundLoad()
    burn = "import time\nwhile time.process_time() < 0.4: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert own_seconds() - before >= 0.35
    assert background_load.cores() >= 0.0
