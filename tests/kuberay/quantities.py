"""Kubernetes' quantities, as far as our manifests write them: cores and bytes."""

import re
from fractions import Fraction

_BINARY = {f"{letter}i": 1024**power for power, letter in enumerate("KMGTP", start=1)}
_DECIMAL = {"m": Fraction(1, 1000)} | {"k": 1000, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS: dict[str, Fraction | int] = {"": 1} | _BINARY | _DECIMAL


def cores(text: str) -> Fraction:
    """A number of cores, such as `4` or `500m`.

    Raises:
        ValueError: it is no quantity.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", str(text))
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is no quantity: a number with one of {sorted(_UNITS)}")
    return Fraction(found[1]) * _UNITS[found[2]]


def num_bytes(text: str) -> int:
    """A number of bytes, such as `16Gi`."""
    return int(cores(text))


def in_gibibytes(total: int) -> str:
    """Bytes as Kubernetes writes a sum of such quantities: in the largest unit that is whole."""
    for unit, size in reversed(_BINARY.items()):
        if total and total % size == 0:
            return f"{total // size}{unit}"
    return str(total)
