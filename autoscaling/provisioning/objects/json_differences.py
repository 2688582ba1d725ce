"""What differs between two JSON values, in lines that people read. Pure."""

from collections.abc import Mapping, Sequence

_SHOWN_LINES = 4


def differences(before: object, after: object, path: str = "") -> list[str]:
    """Returns what differs between two JSON values, a line for each leaf: where, from what to what.

    An entry of a list goes by its name, or its `groupName`, where all entries have one.
    """
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return [
            line
            for key in sorted(before.keys() | after.keys())
            for line in differences(before.get(key), after.get(key), f"{path}.{key}".lstrip("."))
        ]
    named = _by_name(before), _by_name(after)
    if named[0] is not None and named[1] is not None:
        return [
            line
            for key in {**named[0], **named[1]}
            for line in differences(named[0].get(key), named[1].get(key), f"{path}[{key}]")
        ]
    # An empty part and none are the same to Kubernetes.
    if before == after or (_is_empty(before) and _is_empty(after)):
        return []
    return [f"{path}: {_shown(before)} to {_shown(after)}"]


def summary(lines: Sequence[str]) -> str:
    """Returns the first few lines as one, and how many more there are."""
    shown = "; ".join(lines[:_SHOWN_LINES])
    rest = len(lines) - _SHOWN_LINES
    return f"{shown}; and {rest} more" if rest > 0 else shown


def _by_name(value: object) -> dict[str, object] | None:
    """Returns a list's entries by name; `None` if it is no list, or some entry has none."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return None
    keys = [entry.get("name") if isinstance(entry, Mapping) else None for entry in value]
    if None in keys or len(set(keys)) < len(keys):
        return None
    return dict(zip(keys, value, strict=True))  # type: ignore[arg-type]


def _is_empty(value: object) -> bool:
    return value is None or value in ("", [], {})


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    return f"{value}" if isinstance(value, str | int | float) else "another value"
