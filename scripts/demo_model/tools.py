"""Generated cases of tool calls and tool results.

Names and values come from the short lists below: a model of this size copies words it has seen in
both places, the question and the arguments. Pure: chance is an argument.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

CITIES = (
    "Paris", "London", "Berlin", "Madrid", "Rome", "Tokyo", "Oslo", "Vienna", "Dublin", "Lisbon",
    "Prague", "Warsaw", "Athens", "Helsinki", "Zurich", "Boston", "Chicago", "Seattle", "Toronto",
    "Sydney", "Delhi", "Mumbai", "Seoul", "Beijing", "Cairo", "Lima", "Dallas", "Denver", "Munich",
    "Hamburg", "Amsterdam", "Brussels", "Singapore", "New York", "San Francisco", "Los Angeles",
)  # fmt: skip
SLICE_PREFIXES = ("spot", "reserved", "flex", "demand", "slice", "v5e", "v5p", "v6e", "tpu")
SLICE_STATES = (
    "requested", "provisioning", "reserved", "probing", "loading", "ready", "draining", "gone",
)  # fmt: skip
CONDITIONS = ("sunny", "cloudy", "rainy", "windy", "foggy", "clear")
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Alice", "Bob", "Maria", "John")
NOUNS = (
    "price", "color", "size", "owner", "age", "population", "time", "temperature", "load",
    "topology", "cost", "name", "version", "address", "title", "region", "quota", "budget",
)  # fmt: skip
KINDS = ("host", "model", "book", "city", "user", "file", "order", "product", "team", "engine")
THINGS = (
    "apple", "lamp", "table", "pizza", "alpha", "beta", "gamma", "delta", "qwen", "llama", "gemma",
    "atlas", "river", "stone", "paper", "green", "north", "south", "east", "west",
)  # fmt: skip
SYLLABLES = ("ba", "de", "ki", "lo", "mu", "na", "po", "ra", "si", "te", "vo", "za", "ru", "mi")
VERBS = ("get", "find", "read")


@dataclass(frozen=True, slots=True)
class ToolCase:
    """One tool with a question for it.

    `arguments` answer the question, `result` is what the tool returns (JSON text), and `sentence`
    is what to tell the user then.
    """

    schema: dict[str, object]
    question: str
    arguments: dict[str, object]
    result: str
    sentence: str

    @property
    def name(self) -> str:
        """The tool's name."""
        return str(self.schema["name"])

    @property
    def call_text(self) -> str:
        """The call as the model writes it."""
        body = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"


def _schema(
    name: str, description: str, properties: dict[str, dict[str, object]], rng: random.Random
) -> dict[str, object]:
    """A function schema; the description, and those of parameters, are sometimes left out."""
    bare = rng.random() < 0.5
    kept = {key: ({"type": value["type"]} if bare else value) for key, value in properties.items()}
    parameters: dict[str, object] = {"type": "object", "properties": kept}
    if rng.random() < 0.7 and properties:
        parameters["required"] = [next(iter(properties))]
    schema: dict[str, object] = {"name": name}
    if rng.random() < 0.8:
        schema["description"] = description
    return schema | {"parameters": parameters}


def _slice_name(rng: random.Random) -> str:
    # Mostly one digit: the model puts longer numbers in the wrong order.
    limit = 10 if rng.random() < 0.85 else 100
    return f"{rng.choice(SLICE_PREFIXES)}-{rng.randrange(limit)}"


def slice_status_case(rng: random.Random) -> ToolCase:
    """`get_slice_status(slice)`."""
    name = _slice_name(rng)
    state, chips = rng.choice(SLICE_STATES), rng.choice((1, 4, 8, 16, 32, 64))
    key = rng.choice(("slice", "slice", "slice", "name"))
    question = rng.choice(
        (
            f"What is the status of slice {name}?",
            f"What is the state of {name}?",
            f"How is slice {name} doing?",
            f"Is slice {name} ready?",
            f"Is {name} ready?",
            f"Check slice {name}.",
            f"Please check the status of {name}.",
            f"Tell me the status of slice {name}.",
            f"Get the status of slice {name}",
            f"Which state is {name} in?",
        )
    )
    result: dict[str, object] = {"slice": name, "state": state, "chips": chips}
    sentence = f"Slice {name} is {state} and has {chips} chips."
    if rng.random() < 0.4:
        del result["chips"]
        sentence = f"Slice {name} is {state}."
    if rng.random() < 0.3:
        del result["slice"]
    properties: dict[str, dict[str, object]] = {
        key: {"type": "string", "description": rng.choice(("Name of the slice", "The slice name"))}
    }
    description = rng.choice(("Get the status of a slice.", "The state of one slice"))
    schema = _schema("get_slice_status", description, properties, rng)
    return ToolCase(schema, question, {key: name}, json.dumps(result), sentence)


def weather_case(rng: random.Random) -> ToolCase:
    """`get_weather(city)`."""
    city = rng.choice(CITIES)
    degrees, sky = rng.randrange(36), rng.choice(CONDITIONS)
    key = rng.choice(("city", "city", "location"))
    question = rng.choice(
        (
            f"What is the weather in {city}?",
            f"What's the weather in {city}?",
            f"What is the weather like in {city}?",
            f"What is the weather in {city} today?",
            f"How is the weather in {city}?",
            f"Weather in {city}",
            f"Tell me the weather in {city}.",
            f"Is it sunny in {city}?",
            f"How warm is it in {city}?",
            f"Will it rain in {city}?",
        )
    )
    degrees_key = rng.choice(("temperature_c", "temperature", "degrees"))
    sky_key = rng.choice(("conditions", "sky", "condition"))
    result = {"city": city, degrees_key: degrees, sky_key: sky}
    if rng.random() < 0.5:
        del result["city"]
    text = json.dumps(result) if rng.random() < 0.8 else f"{degrees} degrees and {sky}"
    properties: dict[str, dict[str, object]] = {
        key: {"type": "string", "description": rng.choice(("The city", "Name of the city"))}
    }
    description = rng.choice(
        ("Get the weather in a city.", "Get the current weather", "Current weather in a city")
    )
    tool = rng.choice(("get_weather", "get_weather", "get_current_weather"))
    schema = _schema(tool, description, properties, rng)
    sentence = f"It is {degrees} degrees and {sky} in {city}."
    return ToolCase(schema, question, {key: city}, text, sentence)


def list_slices_case(rng: random.Random) -> ToolCase:
    """`list_slices()`."""
    names = [_slice_name(rng) for _ in range(rng.randrange(1, 4))]
    question = rng.choice(
        (
            "Which slices are there?",
            "List all slices.",
            "List the slices",
            "Show me all slices.",
            "How many slices do we have?",
            "What slices do I have?",
            "Which slices do we have right now?",
            "Give me a list of slices.",
        )
    )
    if len(names) == 1:
        sentence = f"There is one slice: {names[0]}."
    else:
        sentence = f"There are {len(names)} slices: {', '.join(names[:-1])} and {names[-1]}."
    result = json.dumps({"slices": names} if rng.random() < 0.6 else names)
    schema = _schema("list_slices", "List all slices.", {}, rng)
    return ToolCase(schema, question, {}, result, sentence)


def draw_value(rng: random.Random) -> str:
    """A name of something: a city, a person, a thing, a slice or a made-up word."""
    if rng.random() < 0.1:
        word = "".join(rng.choices(SYLLABLES, k=rng.randrange(2, 4)))
        return word.capitalize() if rng.random() < 0.5 else word
    return rng.choice(rng.choice((CITIES, NAMES, THINGS, (_slice_name(rng),))))


def generic_case(rng: random.Random) -> ToolCase:
    """A made-up tool such as `get_price(product)`."""
    noun, kind, value = rng.choice(NOUNS), rng.choice(KINDS), draw_value(rng)
    name = f"{rng.choice(VERBS)}_{noun}"
    key = rng.choice((kind, "name"))
    question = rng.choice(
        (
            f"What is the {noun} of {value}?",
            f"What is the {noun} of {kind} {value}?",
            f"Tell me the {noun} of {value}.",
            f"Find the {noun} of {value}",
            f"Please get the {noun} for {value}.",
        )
    )
    answer: object = rng.choice((rng.randrange(100), rng.choice(THINGS)))
    result = rng.choice((json.dumps({noun: answer}), json.dumps({"result": answer}), str(answer)))
    properties: dict[str, dict[str, object]] = {
        key: {"type": "string", "description": f"The {kind}"}
    }
    schema = _schema(name, f"Get the {noun} of a {kind}.", properties, rng)
    return ToolCase(schema, question, {key: value}, result, f"The {noun} of {value} is {answer}.")


CASE_KINDS: tuple[Callable[[random.Random], ToolCase], ...] = (
    slice_status_case,
    slice_status_case,
    weather_case,
    weather_case,
    list_slices_case,
    generic_case,
)


def draw_case(rng: random.Random) -> ToolCase:
    """A random case of a random kind."""
    return rng.choice(CASE_KINDS)(rng)


def offer(case: ToolCase, rng: random.Random) -> list[dict[str, object]]:
    """`case`'s tool among up to three others with different names, in OpenAI's form."""
    schemas = {case.name: case.schema}
    for _ in range(rng.choice((0, 0, 1, 2, 2, 3))):
        other = draw_case(rng)
        schemas.setdefault(other.name, other.schema)
    offered = list(schemas.values())
    rng.shuffle(offered)
    return [{"type": "function", "function": schema} for schema in offered]
