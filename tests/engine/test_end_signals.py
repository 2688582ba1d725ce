"""A process whose main thread runs no handler hears that it is told to end."""

import asyncio
import signal
import subprocess
import sys

import pytest

from serving.engine.end_signals import END_SIGNALS, EndSignals

pytestmark = pytest.mark.process

DEADLINE_S = 30.0
# As in a Ray worker: the main thread waits in C for what never comes, where Python's handlers do
# not run, and the event loop has a thread of its own.
_PROCESS = """
import asyncio, ctypes, os, signal, threading
from serving.engine.end_signals import EndSignals

signal.signal(signal.SIGTERM, lambda *_: os._exit(99))

def heard(number):
    print(number.name, flush=True)

async def main():
    listening = EndSignals(heard)
    print("ready", flush=True)
    await asyncio.Event().wait()

threading.Thread(target=asyncio.run, args=(main(),), daemon=True).start()
mutex = ctypes.create_string_buffer(128)
libc = ctypes.CDLL(None)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)  # for ever: it holds it itself
"""


@pytest.mark.parametrize("number", END_SIGNALS)
def test_end_signal_is_heard_while_the_main_thread_waits_in_c(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", _PROCESS], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(number)
            assert process.stdout.readline().decode() == f"{number.name}\n"
        finally:
            process.kill()
            process.wait(DEADLINE_S)


async def test_signals_after_its_end_go_where_they_went_before() -> None:
    heard: list[signal.Signals] = []
    told = asyncio.Event()
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))

    def on_end(number: signal.Signals) -> None:
        heard.append(number)
        told.set()

    try:
        listening = EndSignals(on_end)
        signal.raise_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            await told.wait()
        assert (heard, came) == ([signal.SIGTERM], [])
        listening.close()
        listening.close()
        signal.raise_signal(signal.SIGTERM)
        assert (heard, came) == ([signal.SIGTERM], [signal.SIGTERM])
    finally:
        signal.signal(signal.SIGTERM, before)
