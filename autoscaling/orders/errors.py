"""The refusal of an order."""


class OrdersUnusableError(Exception):
    """What was asked for cannot be ordered; the message says why, and what can."""
