"""`slicewise explain`: which gateway is asked, and how what it knows of a request is told."""

import itertools
import json
from collections.abc import Callable, Iterator

import pytest

from deployments.status.explain import Story, find_story, story_lines
from deployments.status.gateway import FleetUnavailableError
from serving.gateway.telemetry.request_story import Because, EngineChoice, RequestStory


def of_gateways(*names: str, knows: str = "") -> Callable[[], str]:
    """A proxy in front of gateways, one after the other; `knows` is the one that had the request.

    There are no more answers than a client may want.
    """
    turns: Iterator[str] = itertools.islice(itertools.cycle(names), 100)

    def ask() -> str:
        name = next(turns)
        known = {"request_id": "mine"} if name == knows else {"error": {"code": "unknown_request"}}
        return json.dumps({"gateway": name, **known})

    return ask


@pytest.mark.parametrize("knows", [f"g{number}" for number in range(16)])
def test_every_gateway_is_asked_until_one_knows_the_request(knows: str) -> None:
    names = [f"g{number}" for number in range(16)]
    story, body = find_story(of_gateways(*names, knows=knows))
    assert (story.gateway, story.request_id) == (knows, "mine")
    assert json.loads(body)["gateway"] == knows


@pytest.mark.parametrize("names", [["g1"], ["g1", "g2"], [f"g{number}" for number in range(16)]])
def test_where_no_gateway_knows_it_the_search_ends(names: list[str]) -> None:
    assert find_story(of_gateways(*names))[0].request_id is None


@pytest.mark.parametrize("body", ["", "[]", '{"error": {}}', '{"gateway": "g", "events": 5}'])
def test_answer_of_something_else_is_an_error(body: str) -> None:
    with pytest.raises(FleetUnavailableError, match="not a gateway's"):
        find_story(lambda: body)


def told() -> list[str]:
    story = RequestStory("mine", "/v1/completions", "demo", "acme", "standard", 10.0)
    story.tell("admitted", 10.001)
    story.tell("waits", 10.002, sequence=0, reason="no engine has room for it")
    choice = EngineChoice(Because.CACHED, 4, 700, 512, 300, 7)
    engine = {"engine_id": "e1", "compute_class": "spot", "slice": "a-0"}
    story.tell("dispatched", 10.5, sequence=0, **engine, **choice.facts(), blocks_named=48)
    story.tell("found_cached", 10.6, sequence=0, tokens=512)
    story.tell("first_token", 10.6, sequence=0)
    story.tell("left", 11.0, sequence=0, cause="lost", reason="silent", emitted_tokens=20)
    choice = EngineChoice(Because.LEAST_TO_DO, 3, 720, line_tokens=40, num_in_flight=5)
    engine = {"engine_id": "e2", "compute_class": "reserved", "slice": None}
    story.tell("dispatched", 11.0, sequence=0, **engine, **choice.facts())
    story.tell("goes_on", 11.25, sequence=0, paused_s=0.25)
    story.tell("ended", 12.0, sequence=0, outcome="stop", output_tokens=64)
    story.tell("answered", 12.0, status=200, client_left=False)
    described = {"gateway": "g1", **story.described(1_790_000_000.0)}
    lines = story_lines(Story.model_validate_json(json.dumps(described)))
    return [" ".join(line.split()) for line in lines]


def test_a_story_is_told_in_words() -> None:
    assert told() == [
        "request mine at gateway g1, received 2026-09-21 14:13:30.000000 UTC",
        "/v1/completions, model demo, tenant acme, class standard",
        "",
        "AFTER SEQUENCE WHAT",
        "0.001 s admitted",
        "0.002 s 0 waits: no engine has room for it",
        "0.500 s 0 goes to e1 (spot, slice a-0): for what it has cached (512 tokens); 700 tokens,"
        " 512 of them cached; before it 300 tokens in line and 7 sequences; 4 engines; 48"
        " blocks named",
        "0.600 s 0 512 tokens were in the engine's cache",
        "0.600 s 0 first token",
        "1.000 s 0 leaves its engine (lost: silent) after 20 tokens",
        "1.000 s 0 goes to e2 (reserved): least to do there (40 tokens in line, 5 sequences); 720"
        " tokens, nothing known of its cache; before it 40 tokens in line and 5 sequences; 3"
        " engines",
        "1.250 s 0 goes on, after a pause of 0.250 s",
        "2.000 s 0 ended, stop, with 64 tokens",
        "2.000 s answered 200",
    ]


def test_what_another_version_tells_is_shown_as_it_is_and_cannot_command_the_terminal() -> None:
    events = [{"in_s": 1.0, "event": "rewound", "by": "\x1b[2J"}, {"event": "left", "in_s": 2}]
    story = Story(gateway="g", request_id="mine", events=tuple(events), events_left_out=3)
    *_, rewound, left, more = list(story_lines(story))
    assert rewound.endswith("rewound, by ?[2J")
    assert left.endswith("left")
    assert more == "3 events more were not kept"
