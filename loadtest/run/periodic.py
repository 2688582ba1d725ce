"""Does something again and again beside a run, in a thread of its own."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeated(act: Callable[[], None], period_s: float, name: str) -> Iterator[None]:
    """Calls `act` at once and then every `period_s`; after the block it waits for the last call."""
    is_over = threading.Event()

    def run() -> None:
        act()
        while not is_over.wait(period_s):
            act()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
