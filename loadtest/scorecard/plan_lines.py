"""A plan, whatever is in it, as lines of dotted names and values. Pure."""

from collections.abc import Iterator, Mapping


def plan_lines(plan: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every value that is set, with its dotted name, in the order of the plan."""
    for key, value in plan.items():
        if isinstance(value, Mapping):
            yield from plan_lines(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", str(value)
