"""Generated requests for small JSON documents, so that a grammar meets a model that knows JSON.

Pure: chance is an argument.
"""

import json
import random

from scripts.demo_model.tools import CITIES, NAMES, SLICE_STATES, THINGS

Value = str | int | bool
FIELDS: dict[str, tuple[Value, ...]] = {
    "name": NAMES + THINGS,
    "slice": ("spot-1", "spot-2", "reserved-1", "v6e-4", "slice-7"),
    "state": SLICE_STATES,
    "chips": (1, 4, 8, 16, 32),
    "hosts": (1, 2, 4, 8),
    "city": CITIES,
    "age": (7, 21, 30, 42, 65),
    "count": (1, 2, 3, 10),
    "topology": ("2x4", "4x4", "2x2x1", "4x8"),
    "generation": ("v5e", "v5p", "v6e", "7x"),
    "ready": (True, False),
    "answer": ("yes", "no", "a slice", "the gateway"),
    "port": (8000, 8001),
    "price": (1, 2, 5, 20),
}
OPENINGS = (
    "As JSON: {facts}.",
    "Write this as JSON: {facts}.",
    "Give me JSON with {facts}.",
    "Reply in JSON. {facts}.",
    "Make a JSON object with {facts}.",
    "{facts}. Answer as JSON.",
)
REQUESTS = (
    "Give me a JSON object with the keys {keys}.",
    "Return JSON with {keys}.",
    "Reply with a JSON object that has {keys}.",
    "Make up a JSON document with {keys}.",
)


def draw_json_case(rng: random.Random) -> tuple[str, str]:
    """A question and the JSON text that answers it, in one line."""
    keys = rng.sample(sorted(FIELDS), rng.randrange(1, 4))
    if rng.random() < 0.5:
        # Without given values there must be one right answer: the first value of each field.
        document = {key: FIELDS[key][0] for key in keys}
        return rng.choice(REQUESTS).format(keys=_join(keys)), json.dumps(document)
    document = {key: rng.choice(FIELDS[key]) for key in keys}
    joiner = rng.choice((" is ", ": ", " = "))
    facts = _join([f"{key}{joiner}{_plain(value)}" for key, value in document.items()])
    return rng.choice(OPENINGS).format(facts=facts), json.dumps(document)


def _plain(value: Value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
