"""Names of the batch lane's objects. Pure.

    tenants/TENANT              what files and batches a tenant has (`catalog`)
    contents/ID                 the content of a file
    batches/BATCH/head          a batch, its lease, and which answers it has (`head`)
    batches/BATCH/answers/T-N   the Nth answers that were written in term T
    open/UNTIL-TIME-TENANT-BATCH
                                empty: the batch has not ended, or is not settled yet

TENANT is a digest, since a tenant's name may have any characters. UNTIL is when the window of a
batch is over, TIME when it was made; both sort as numbers do. An earlier build left UNTIL out.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from serving.gateway.batches.records import Batch

TENANTS, CONTENTS, BATCHES, OPEN = "tenants", "contents", "batches", "open"
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_DIGITS = 32
_MARKER = re.compile(
    rf"open/(?:[0-9]{{15}}-)?([0-9]{{15}})-([0-9a-f]{{{_DIGITS}}})-([A-Za-z0-9_-]{{1,128}})"
)


@dataclass(frozen=True, slots=True)
class OpenMarker:
    """What the name of an open batch says. `tenant` is the tenant's digest."""

    name: str
    made_at_s: float
    tenant: str
    batch_id: str


def is_id(text: str) -> bool:
    """Returns whether a text that a client may have sent is fit for a part of a name."""
    return _ID.fullmatch(text) is not None


def digest_of(tenant: str) -> str:
    """Returns what stands for a tenant in names."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:_DIGITS]


def catalog_name(tenant: str) -> str:
    """Returns the name of a tenant's catalog."""
    return f"{TENANTS}/{digest_of(tenant)}"


def content_name(content_id: str) -> str:
    """Returns the name of a content."""
    return f"{CONTENTS}/{content_id}"


def head_name(batch_id: str) -> str:
    """Returns the name of a batch's head."""
    return f"{BATCHES}/{batch_id}/head"


def batch_of(name: str) -> str | None:
    """Returns the batch that an object is of; `None` if it is of none."""
    folder, _, rest = name.partition("/")
    return rest.partition("/")[0] if folder == BATCHES else None


def answers_name(batch_id: str, term: int, number: int) -> str:
    """Returns the name of some of a batch's answers."""
    return f"{BATCHES}/{batch_id}/answers/{term}-{number}"


def answers_folder(batch_id: str) -> str:
    """Returns where all answers of a batch are, also those that are not its head's."""
    return f"{BATCHES}/{batch_id}/answers"


def marker_name(batch: Batch) -> str:
    """Returns the name that says that a batch is open."""
    until_ms, made_ms = (round(each * 1000) for each in (batch.expires_at_s, batch.created_at_s))
    return f"{OPEN}/{until_ms:015d}-{made_ms:015d}-{digest_of(batch.tenant)}-{batch.batch_id}"


def marker_of(name: str) -> OpenMarker | None:
    """Returns what the name of an open batch says; `None` if it is none of ours."""
    found = _MARKER.fullmatch(name)
    if found is None:
        return None
    made_ms, tenant, batch_id = found.groups()
    return OpenMarker(name, int(made_ms) / 1000, tenant, batch_id)


def in_turn(markers: Iterable[OpenMarker]) -> list[OpenMarker]:
    """Returns open batches, which come in the order of their names, one of each tenant in turn."""
    places: Counter[str] = Counter()
    placed = []
    for marker in markers:
        placed.append((places[marker.tenant], marker))
        places[marker.tenant] += 1
    return [marker for _, marker in sorted(placed, key=lambda each: each[0])]
