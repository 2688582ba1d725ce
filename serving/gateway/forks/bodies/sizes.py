"""Which bodies are large: what the gateway's loop does not read, and what it still does. Pure.

The figures are of vLLM 0.32.0 on the project's 2-core machine, 2026-11-24: the loop stands for
66 ms to read 256 KiB of a chat's empty parts, for 60 us at each item of `/v1/responses`, for less
than 1 ms to read a prompt of 1 MiB that is one text, and for 3.5 us at each wrong entry of a
`logit_bias` (2026-11-25).
"""

from collections.abc import Mapping

from serving.config.api_keys import ModelRoute
from serving.domain.limits import KIB

# Bytes of a body, and of what is left of it when its prompt has been rendered; objects and lists;
# and fields and entries of objects.
LARGE_BYTES = 256 * KIB
LARGE_VALUES = 2_000
LARGE_VALUES_OF: Mapping[str, int] = {ModelRoute.RESPONSES: 250}
LARGE_NAMES = 5_000
# What is left may have more of them: what vLLM makes no record of costs little.
MOST_VALUES_LEFT = 20_000

# A body of so many bytes is rendered on the event loop: a tokenizer reads 2 to 3 MB in a second, so
# that takes less than a millisecond.
SHORT_BYTES = 2048
