"""Runs a closed loop of OpenAI users in Locust itself, with its web page or without.

    locust -f loadtest/locustfile.py --headless -u 4 -r 2 -t 10s -H http://127.0.0.1:8000

Locust gets two events for each request when it is over: the request itself, and its TTFT. For
reliable numbers use `slicewise loadtest`, which needs no users to keep a rate and judges itself.
"""

import os
import random
import time
import uuid
from argparse import ArgumentParser, Namespace
from functools import cache

from locust import User, events, task
from locust.env import Environment

from loadtest.client.body import BodyMaker
from loadtest.client.http_client import Client
from loadtest.client.limits import Limits
from loadtest.client.prompt_source import ServerPrompts, find_prompts
from loadtest.client.sender import RunClock, Sender
from loadtest.client.server_models import choose_models
from loadtest.errors import ErrorKind
from loadtest.planned_request import Api, PlannedRequest, PromptBlock
from loadtest.records import RequestRecord
from loadtest.run.locust_events import fire_request

# A user whose request failed waits so long: a server that is gone is not to be hammered.
_PAUSE_S = 1.0


@events.init_command_line_parser.add_listener
def _add_arguments(parser: ArgumentParser, **_: object) -> None:
    parser.add_argument("--model", default="", help="model or adapter; left out: the first")
    parser.add_argument("--api", choices=[api.value for api in Api], default=Api.CHAT.value)
    parser.add_argument("--input-tokens", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--output-tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--api-key-env", default="", help="variable that has the API key")


class OpenAiUser(User):
    """Asks, reads the whole answer, asks again."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        options = _options(environment)
        if not self.host:
            raise ValueError("no host; allowed: -H http://HOST:PORT, or the field of the page")
        api_key = os.environ[options.api_key_env] if options.api_key_env else None
        self._model, prompts = _model_and_prompts(self.host, options.model, api_key)
        self._client = Client(self.host, Limits(), random.Random(self._model), api_key)
        self._sender = Sender(
            self._client,
            BodyMaker(prompts, wants_token_ids=False),
            checker=None,
            clock=RunClock(worker=0, start_s=time.monotonic()),
            write=self._take,
        )

    def on_stop(self) -> None:
        """Closes its connection."""
        self._client.close()

    @task
    def ask(self) -> None:
        """Sends one request and reads its whole answer."""
        options = _options(self.environment)
        request_id = uuid.uuid4().hex
        planned_request = PlannedRequest(
            request_id=request_id,
            offset_s=None,
            model=self._model,
            api=Api(options.api),
            blocks=(PromptBlock(request_id, options.input_tokens),),
            output_tokens=options.output_tokens,
        )
        request = self._sender.prepare(planned_request, None)
        if self._sender.send(planned_request, request, time.monotonic(), None) is None:
            time.sleep(_PAUSE_S)  # Locust has made it one that lets the others run

    def _take(self, record: RequestRecord) -> None:
        # The end of a test is no failure of the requests that were under way.
        if record.error != ErrorKind.UNFINISHED:
            fire_request(self.environment.events.request, record, with_ttft=True)


def _options(environment: Environment) -> Namespace:
    options: Namespace | None = environment.parsed_options
    if options is None:
        raise ValueError("Locust was started without its command line, which has the options")
    return options


@cache
def _model_and_prompts(host: str, model: str, api_key: str | None) -> tuple[str, ServerPrompts]:
    """The model that is asked and what its prompts are made of: the same for all users."""
    chosen = choose_models(host, api_key, [model] if model else [])[0]
    return chosen, ServerPrompts.of(find_prompts(host, [chosen], api_key))
