"""How busy a machine is while something is measured."""

from __future__ import annotations

import subprocess
import sys
import time

from irongrad.analysis.other_work import OtherWork, said

BUSY = "while True: pass"


def test_a_process_beside_this_one_is_other_work() -> None:
    beside = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        time.sleep(0.2)  # to start
        others = OtherWork()
        time.sleep(0.5)
        share = others.share()
    finally:
        beside.kill()
        beside.wait()
    assert share is None or share > 0.05
    assert share is None or "other work took" in said(share)


def test_a_quiet_machine_needs_no_words() -> None:
    assert said(None) == said(0.01) == ""
    assert said(0.5) == "other work took 50% of the CPUs meanwhile"
