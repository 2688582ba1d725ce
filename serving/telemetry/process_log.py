"""The destination of our log lines, process by process. Without it Python shows warnings only.

Owns the handlers of the loggers `serving` and `vllm`, set by the constructor of each Serve class.
Does not own the form of a line (`log_lines`).
"""

import logging
from dataclasses import dataclass
from logging.handlers import MemoryHandler

from serving.telemetry.log_lines import JsonLines

_FORMAT = "%(levelname)s %(asctime)s %(name)s -- %(message)s"
_NAMES = ("serving", "vllm")


@dataclass(frozen=True, slots=True)
class LogStyle:
    """The form of lines, and the lowest of `logging`'s levels that is written."""

    is_json: bool = False
    level: int = logging.INFO

    @property
    def formatter(self) -> logging.Formatter:
        """The formatter that makes a line of a record."""
        return JsonLines() if self.is_json else logging.Formatter(_FORMAT)


DEFAULT_STYLE = LogStyle()


def log_as_replica(style: LogStyle = DEFAULT_STYLE) -> None:
    """Sends our lines to the log file that Serve keeps for this replica; warnings to stderr too."""
    # `ray.serve` writes its file through a memory handler; its other one is for the terminal, where
    # a line per request would cost as much as the request.
    files = [
        handler
        for handler in logging.getLogger("ray.serve").handlers
        if isinstance(handler, MemoryHandler)
    ]
    if style.is_json:
        for handler in files:
            if handler.target is not None:
                handler.target.setFormatter(_OursAsJson(handler.target.formatter))
    _configure(style, *files, _to_stderr(style, logging.WARNING))


def log_as_actor(style: LogStyle = DEFAULT_STYLE) -> None:
    """Sends our lines to stderr; Ray keeps a file of it for each actor."""
    _configure(style, _to_stderr(style, style.level))


class _OursAsJson(logging.Formatter):
    """The formatter of a file shared with Serve: our lines as JSON, Serve's own unchanged."""

    def __init__(self, others: logging.Formatter | None) -> None:
        super().__init__()
        self._ours = JsonLines()
        self._others = others or logging.Formatter()

    def format(self, record: logging.LogRecord) -> str:
        is_ours = record.name.partition(".")[0] in _NAMES
        return (self._ours if is_ours else self._others).format(record)


def _to_stderr(style: LogStyle, level: int) -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setLevel(level)
    handler.setFormatter(style.formatter)
    return handler


def _configure(style: LogStyle, *handlers: logging.Handler) -> None:
    for name in _NAMES:
        logger = logging.getLogger(name)
        # What vLLM logs at `debug` is for its own developers, and much.
        logger.setLevel(style.level if name == "serving" else max(style.level, logging.INFO))
        logger.propagate = False
        logger.handlers[:] = handlers
