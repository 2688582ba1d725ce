"""The classes of service of requests, and the `service_tier` by which a client asks for one. Pure.

OpenAI's tiers, by its API reference as read on 2026-11-25: `priority` is served before `default`,
and `flex` when there is room. `scale` is what `priority` is to those who bought capacity ahead.
"""

from enum import IntEnum, StrEnum


class ServiceClass(IntEnum):
    """The order in which requests that wait are given to engines."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2

    @property
    def label(self) -> str:
        """The name as metrics and tables have it."""
        return self.name.lower()


class ServiceTier(StrEnum):
    """What a key may be for, and what a request may ask for."""

    PRIORITY = "priority"
    DEFAULT = "default"
    FLEX = "flex"

    @property
    def service_class(self) -> ServiceClass:
        """The class that a request of the tier is of."""
        return _CLASSES[self]


_CLASSES = {
    ServiceTier.PRIORITY: ServiceClass.INTERACTIVE,
    ServiceTier.DEFAULT: ServiceClass.STANDARD,
    ServiceTier.FLEX: ServiceClass.BATCH,
}
# By the names that clients use. `standard_only` is Anthropic's; `auto` leaves it to the key.
_ASKED = {
    "priority": ServiceTier.PRIORITY,
    "scale": ServiceTier.PRIORITY,
    "default": ServiceTier.DEFAULT,
    "standard_only": ServiceTier.DEFAULT,
    "flex": ServiceTier.FLEX,
}
AUTO = "auto"
TIERS_ASKED = (AUTO, *_ASKED)


def tier_asked(value: str) -> ServiceTier | None:
    """Returns the tier that a request asks for; `None` if it leaves that to its key.

    Raises:
        ValueError: there is no such tier. `TIERS_ASKED` are allowed.
    """
    if value == AUTO:
        return None
    if value not in _ASKED:
        raise ValueError(f"{value[:40]!r}; allowed: {', '.join(TIERS_ASKED)}")
    return _ASKED[value]


def tier_of_key(granted: frozenset[ServiceTier]) -> ServiceTier:
    """Returns the tier of a request that asks for none: `default`, or else what the key has."""
    if ServiceTier.DEFAULT in granted:
        return ServiceTier.DEFAULT
    return ServiceTier.FLEX if ServiceTier.FLEX in granted else ServiceTier.PRIORITY
