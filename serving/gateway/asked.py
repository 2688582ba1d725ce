"""What the edge knows of a request before it is rendered: enough to say who takes it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. `key` is whom it is of, or its own id where nobody is named.

    `name` is its `model` field; `None` where it gave none. One that `needs_engine` waits until an
    engine takes it; the others (counting tokens, for instance) are answered by the gateway alone.
    """

    name: str | None
    key: str
    needs_engine: bool = True
