"""The log lines that people read and machines parse.

A line is an event and its facts: `request_resumed request_id=%s emitted=%d`. Every line of ours is
written in this way. The template shows which argument is which fact, so that nothing has to be
parsed out of a text again. Owns the JSON form of a line and the trace id on it. Does not own where
lines go (`process_log`).
"""

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any

# One conversion of a template, its flags and width included.
_CONVERSION = re.compile(r"%[-#0 +]*\d*(?:\.\d+)?[a-zA-Z]")
_FACT = re.compile(r"([A-Za-z_]\w*)=(.+)")


def log_traced(
    logger: logging.Logger, level: int, trace_id: str | None, template: str, *args: object
) -> None:
    """Logs a line about one request, with the request's trace id if it has one."""
    if trace_id is not None:
        template, args = template + " trace_id=%s", (*args, trace_id)
    logger.log(level, template, *args, stacklevel=2)


def facts_of(template: str, args: object) -> tuple[str, dict[str, Any]]:
    """Returns the event of a line, and its facts by name.

    A fact that is one argument keeps its type; others are text. All other text belongs to the
    event.

    Raises:
        TypeError, ValueError: the arguments are not the template's, or are named.
    """
    if args and not isinstance(args, tuple):
        raise TypeError("named arguments")
    values = args if isinstance(args, tuple) else ()
    event: list[str] = []
    facts: dict[str, Any] = {}
    position = 0
    for token in template.split():
        num = len(_CONVERSION.findall(token.replace("%%", "")))
        own, position = values[position : position + num], position + num
        fact = _FACT.fullmatch(token)
        text = token if fact is None else fact[2]
        value = text % own if num or "%%" in text else text
        if fact is None:
            event.append(value)
        elif num == 1 and _CONVERSION.fullmatch(text) and _keeps_type(text, own[0]):
            facts[fact[1]] = own[0]
        else:
            facts[fact[1]] = value
    return " ".join(event), facts


class JsonLines(logging.Formatter):
    """The formatter of a line as one JSON object.

    The object has `time`, `level`, `logger` and `event`, then the facts of the line.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as JSON, without a line end."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
        }
        try:
            line["event"], facts = facts_of(str(record.msg), record.args)
        except (TypeError, ValueError):
            # Not one of our templates.
            line["event"], facts = record.getMessage(), {}
        # A fact must not replace a field that every line has.
        line |= {key if key not in line else f"{key}_": value for key, value in facts.items()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _keeps_type(conversion: str, value: object) -> bool:
    """Returns whether JSON has this type and the template does not cut the value short."""
    if isinstance(value, str):
        return "." not in conversion
    return value is None or isinstance(value, (int, float, bool))
