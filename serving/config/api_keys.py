"""The form of API keys in a file or a variable: `[tenant] key`, divided by commas or line ends.

Owns the form of a key and of a tenant's name. Does not own who is let in
(`serving.gateway.edge.auth`). Pure.
"""

import re
from dataclasses import dataclass, field

# It is a label's value in metrics, and a column's in tables.
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_TENANT_FORM = "letters, digits and `._-`, up to 63 characters"


@dataclass(frozen=True, slots=True)
class NamedKey:
    """The key of a tenant; the tenant is `None` where none is named.

    The key stays out of `repr`.
    """

    key: str = field(repr=False)
    tenant: str | None = None


def read_keys(text: str) -> list[NamedKey]:
    """Reads the keys of a file or a variable; `#` starts a comment line.

    A key stands alone, or behind its tenant's name and a space. No key has a space in it.

    Raises:
        ValueError: an entry is of another form, or its name is. The message shows no key.
    """
    lines = (line.strip() for line in text.splitlines())
    parts = (part.split() for line in lines if not line.startswith("#") for part in line.split(","))
    return [_named_key(words) for words in parts if words]


def _named_key(words: list[str]) -> NamedKey:
    if len(words) == 1:
        return NamedKey(words[0])
    if len(words) > 2:
        raise ValueError(f"an API key is one word, or two with its tenant's name; not {len(words)}")
    tenant, key = words
    if _TENANT.fullmatch(tenant) is None:
        # The message does not show it: it may be a key with the name behind it.
        raise ValueError(f"the name in front of an API key is none; allowed: {_TENANT_FORM}")
    return NamedKey(key, tenant)
