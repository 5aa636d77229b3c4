"""Signals may come at any moment, also while the main thread holds what the stop function needs."""

import signal
from pathlib import Path

from support.processes import Child

HELD = """
import logging, signal, sys, threading
from fencepost.operate.signals import draining

logging.disable()
held, asked = threading.Lock(), threading.Event()

def stop():
    with held:
        asked.set()

with draining(stop):
    if sys.argv[1] in ("free", "late"):
        signal.raise_signal(signal.SIGTERM)
        print("interrupted", flush=True)
    else:
        with held:
            signal.raise_signal(signal.SIGTERM)
            print("interrupted", flush=True)
            if sys.argv[1] == "twice":
                signal.raise_signal(signal.SIGINT)
    print("stopped" if asked.wait(10) else "deaf", flush=True)
if sys.argv[1] == "late":
    signal.raise_signal(signal.SIGTERM)
stayed = signal.signal(signal.SIGTERM, signal.SIG_IGN) is not signal.SIG_DFL
stayed == (sys.argv[1] != "quiet") or sys.exit("the handler stayed")
sys.exit(len(threading.enumerate()) - 1)
"""


def test_a_signal_that_interrupts_the_holder_of_the_lock_which_stopping_needs_still_stops(tmp_path: Path) -> None:
    for how in ("free", "held"):
        with Child.script(HELD, folder=tmp_path / how, arguments=[how]) as child:
            assert child.wait(20) == 0, child.text
            assert child.text.splitlines() == ["interrupted", "stopped"]


def test_a_second_signal_leaves_at_once_whatever_the_first_waits_for(tmp_path: Path) -> None:
    with Child.script(HELD, folder=tmp_path, arguments=["twice"]) as child:
        assert child.wait(20) == 128 + signal.SIGINT
        assert child.text.splitlines() == ["interrupted"]


def test_a_second_signal_on_the_way_out_is_answered_as_before_it(tmp_path: Path) -> None:
    with Child.script(HELD, folder=tmp_path, arguments=["late"]) as child:
        assert child.wait(20) == 128 + signal.SIGTERM
        assert child.text.splitlines() == ["interrupted", "stopped"]


LAST = """
import os, signal
from fencepost.operate.signals import draining

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=int(signal.SIGTERM), say=os.write):
        say(1, b"last\\n")
        kill(pid, number)

with draining(lambda: None):
    signal.raise_signal(signal.SIGTERM)
os.last = Last()  # goes when the interpreter has taken its handlers away
"""


def test_a_second_signal_at_the_very_end_does_not_change_how_it_ends(tmp_path: Path) -> None:
    with Child.script(LAST, folder=tmp_path) as child:
        assert child.wait(20) == 0, child.text
        assert "last" in child.text


def test_a_block_that_ends_without_a_signal_leaves_neither_handler_nor_thread(tmp_path: Path) -> None:
    quiet = HELD.replace("if sys.argv[1]", "asked.set()\n    if 0 and sys.argv[1]", 1).replace("else:", "elif 0:", 1)
    with Child.script(quiet, folder=tmp_path, arguments=["quiet"]) as child:
        assert child.wait(20) == 0, child.text
