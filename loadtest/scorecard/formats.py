"""Formats values, the same in the table, the page and every sentence. `None` is a dash. Pure."""

import math

DASH = "\N{EN DASH}"


def format_seconds(value: float | None) -> str:
    """Returns a duration to three digits: 850 µs, 42.1 ms, 1.27 s, 75 s."""
    if value is None:
        return DASH
    size = abs(value)
    if size < 0.9995e-3:
        return f"{value * 1e6:.0f} µs" if value else "0 ms"
    if size < 0.9995:
        return f"{format_number(value * 1e3)} ms"
    return f"{format_number(value)} s"


def format_number(value: float | None) -> str:
    """Formats three digits, or all before the point; thousands apart."""
    if value is None:
        return DASH
    size = abs(value)
    # A tick of an axis is whole but for the last bits.
    if size >= 99.95 or math.isclose(value, round(value), rel_tol=1e-9):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}" if size >= 0.9995 else f"{value:.3g}"


def format_ratio(value: float | None) -> str:
    """Returns a share in per cent; never 100 % for less than all, nor 0 % for more than nothing."""
    if value is None:
        return DASH
    percent = value * 100
    digits = 1 if 1 <= percent <= 99 or percent in (0, 100) else 3
    text = f"{percent:.{digits}f}".rstrip("0").rstrip(".")
    if text == "100" and value < 1:
        text = ">99.999"
    elif text == "0" and value > 0:
        text = "<0.001"
    return f"{text} %"


def format_usd(value: float | None) -> str:
    """Returns an amount of money."""
    if value is None:
        return DASH
    return f"{value:,.2f} USD" if value >= 0.995 or not value else f"{value:.3g} USD"


def counted(number: int, noun: str) -> str:
    """Formats a count with its noun: `1 request`, `2,000 requests`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
