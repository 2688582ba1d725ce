"""What a test or the gate starts heeds Ctrl-C, wherever it was itself started."""

import signal


def heed_interrupts() -> None:
    """Undoes what a shell does that starts something with `&`: all below would ignore Ctrl-C.

    For `preexec_fn`.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
