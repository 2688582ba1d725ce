"""What the owner of engines leaves to its successor: engines, their slices and the agents there.

Each engine host keeps it as bytes. Owns its form. Pure.
"""

from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from serving.domain.inventory import Slice
from serving.domain.slice_records import HostRecord


class DeedError(ValueError):
    """The deed is not in this version's form, because another version wrote it. Take a slice."""


@dataclass(frozen=True, slots=True)
class DeedSlice:
    """One of the slices: its hosts, and the address of each one's agent, by worker id."""

    whole: Slice
    hosts: tuple[HostRecord, ...]
    agents: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class DeedEngine:
    """One of the engines. `actor` is the name of its host in Ray, `control` where that listens."""

    engine_id: str
    address: tuple[str, int]
    control: tuple[str, int]
    actor: str


@dataclass(frozen=True, slots=True)
class EngineDeed:
    """The engines and their slices; without slices, on the class `local`, `group_id` is `None`.

    There are several engines where a slice is divided, and one in all other cases.
    """

    engines: tuple[DeedEngine, ...]
    group_id: str | None
    slices: tuple[DeedSlice, ...]


_DEED = TypeAdapter(EngineDeed)


def encode_deed(deed: EngineDeed) -> bytes:
    """Returns the deed as it is stored."""
    return _DEED.dump_json(deed)


def decode_deed(text: bytes) -> EngineDeed:
    """Returns the stored deed.

    Raises:
        DeedError: another version wrote it.
    """
    try:
        return _DEED.validate_json(text)
    except ValidationError as error:
        raise DeedError(f"the deed of the engines: {error}") from error
