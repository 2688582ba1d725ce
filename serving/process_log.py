"""Where our log lines go, process by process. Without this Python shows warnings only.

Owns the handlers of the loggers `serving` and `vllm`, set by the constructor of each Serve class.
"""

import logging
from logging.handlers import MemoryHandler

_FORMAT = "%(levelname)s %(asctime)s %(name)s -- %(message)s"


def log_as_replica() -> None:
    """Sends our lines to the log file that Serve keeps for this replica; warnings to stderr too."""
    # `ray.serve` writes its file through a memory handler; its other one is for the terminal, where
    # a line per request would cost as much as the request.
    files = [
        handler
        for handler in logging.getLogger("ray.serve").handlers
        if isinstance(handler, MemoryHandler)
    ]
    _configure(*files, _to_stderr(logging.WARNING))


def log_as_actor() -> None:
    """Sends our lines to stderr, of which Ray keeps a file for each actor."""
    _configure(_to_stderr(logging.INFO))


def _to_stderr(level: int) -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setLevel(level)
    handler.setFormatter(logging.Formatter(_FORMAT))
    return handler


def _configure(*handlers: logging.Handler) -> None:
    for name in ("serving", "vllm"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.handlers[:] = handlers
