"""Defines `slicewise explain`: why one request went where it went.

Only the gateway that had the request knows, and the proxy asks any of them: so it is asked until
that one answers, or no new one does.
"""

import datetime
import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict, ValidationError

from deployments.status.gateway import (
    DEFAULT_URL,
    ApiKeyOption,
    FleetUnavailableError,
    fetch_story,
)
from deployments.terminal import build_table, plain_lines, printable

# So often for each gateway that has answered so far: proxies go round, but not for us alone.
_ASKS_PER_GATEWAY = 6
_UNKNOWN, _UNUSABLE = 1, 2


class Story(BaseModel):
    """The part of a gateway's answer that is shown; what a newer one adds is ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    gateway: str
    request_id: str | None = None
    path: str = ""
    model: str = ""
    tenant: str = ""
    service_class: str = ""
    received_at_s: float = 0.0
    events: tuple[dict[str, Any], ...] = ()
    events_left_out: int = 0


def explain_command(
    *,
    request_id: Annotated[str, typer.Argument(help="As in the answer's header x-request-id.")],
    url: Annotated[str, typer.Option(help="Address of the Serve proxy.")] = DEFAULT_URL,
    api_key: ApiKeyOption = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="How long to wait, each time.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as it came.")] = False,
) -> None:
    """Show why a request went where it went: each wait, engine, move and end, with the reasons.

    A gateway remembers its last 5,000 requests. Exits with 1 if no gateway knows this one, and with
    2 if none answers.
    """
    try:
        story, body = find_story(lambda: fetch_story(url, request_id, api_key, timeout_s))
    except FleetUnavailableError as error:
        typer.echo(f"slicewise explain: {error}", err=True)
        raise typer.Exit(_UNUSABLE) from error
    if story.request_id is None:
        typer.echo(
            f"slicewise explain: no gateway knows request {printable(request_id)}, or no more;"
            " the id is in the header x-request-id of its answer",
            err=True,
        )
        raise typer.Exit(_UNKNOWN)
    if as_json:
        typer.echo(json.dumps(json.loads(body), indent=2))
        return
    typer.echo("\n".join(story_lines(story)))


def find_story(ask: Callable[[], str]) -> tuple[Story, str]:
    """Returns the story that `ask` finds at some gateway, and the text that it came as.

    It has no `request_id` if no gateway knows the request.

    Raises:
        FleetUnavailableError: as `ask` does, or its answer is none of a gateway.
    """
    gateways: set[str] = set()
    num_asked = 0
    while True:
        body = ask()
        num_asked += 1
        try:
            story = Story.model_validate_json(body)
        except ValidationError as error:
            words = "the answer is not a gateway's; is it older than this command?"
            raise FleetUnavailableError(words) from error
        gateways.add(story.gateway)
        if story.request_id is not None or num_asked >= _ASKS_PER_GATEWAY * len(gateways):
            return story, body


def story_lines(story: Story) -> Iterator[str]:
    """Returns it for people to read."""
    at = datetime.datetime.fromtimestamp(story.received_at_s, datetime.UTC)
    yield printable(
        f"request {story.request_id} at gateway {story.gateway}, received {at:%F %T.%f} UTC"
    )
    yield printable(
        f"{story.path}, model {story.model}, tenant {story.tenant}, class {story.service_class}"
    )
    yield ""
    rows = [
        (f"{event.get('in_s', 0):.3f} s", event.get("sequence", ""), _words(event))
        for event in story.events
    ]
    yield from plain_lines(build_table(("AFTER", "SEQUENCE", "WHAT"), rows, 3))
    if story.events_left_out:
        yield f"{story.events_left_out} events more were not kept"


def _words(event: dict[str, Any]) -> str:
    name = str(event.get("event"))
    try:
        if name in _TOLD:
            return _TOLD[name].format_map(event)
        if name in _TOLD_AT_LENGTH:
            return _TOLD_AT_LENGTH[name](event)
    except (KeyError, ValueError):  # what another version of a gateway tells
        pass
    return ", ".join((name, *(f"{fact} {event[fact]}" for fact in event if fact not in _SHOWN)))


def _dispatched(event: dict[str, Any]) -> str:
    where = event["compute_class"]
    if event["slice"] is not None:
        where += f", slice {event['slice']}"
    expected = event["expected_cached_tokens"]
    cached = "nothing known of its cache" if expected is None else f"{expected} of them cached"
    return (
        f"goes to {event['engine_id']} ({where}): {event['reason']}; {event['tokens']} tokens, "
        f"{cached}; before it {event['line_tokens']} tokens in line and {event['in_flight']} "
        f"sequences; {event['engines']} engines{_named(event)}"
    )


def _named(event: dict[str, Any]) -> str:
    count = event.get("blocks_named")  # an earlier gateway does not tell
    return f"; {count} blocks named" if count else ""


def _answered(event: dict[str, Any]) -> str:
    if event["client_left"]:
        return "its client has left"
    return "no answer was begun" if event["status"] is None else f"answered {event['status']}"


_SHOWN = frozenset({"event", "in_s", "sequence"})
_TOLD = {
    "admitted": "admitted",
    "refused": "refused, {code}: {reason}",
    "waits": "waits: {reason}",
    "found_cached": "{tokens} tokens were in the engine's cache",
    "first_token": "first token",
    "left": "leaves its engine ({cause}: {reason}) after {emitted_tokens} tokens",
    "goes_on": "goes on, after a pause of {paused_s:.3f} s",
    "unread": "its client left too much of the answer unread, and was ended",
    "ended": "ended, {outcome}, with {output_tokens} tokens",
}
_TOLD_AT_LENGTH = {"dispatched": _dispatched, "answered": _answered}
