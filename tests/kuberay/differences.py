"""Where the emulation does not do what the real programs did, each with its reason.

An entry that is needed no more fails the conformance test that it is for.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """A difference that is known: `scenario` and `moment` by name, and where, as paths begin."""

    scenario: str
    moment: str
    path: str
    reason: str


KNOWN: tuple[Difference, ...] = ()
