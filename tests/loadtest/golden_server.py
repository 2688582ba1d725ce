"""An OpenAI server whose every token time is known: what a load test reports is checked against it.

It paces streams as the name of the asked model says (`ttft=50,dt=20,clump=4`, see `Behaviour`) and
keeps for each request when it was read and when its token events were written, on the monotonic
clock that all processes of this machine share (`GET /truth`). So a client's error is known exactly,
whatever else the machine does. It parses just enough HTTP.

As a program it serves on a free port and prints it: `python golden_server.py [--stall-after S]`.
"""

import argparse
import asyncio
import heapq
import itertools
import json
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import uvloop

from serving.domain.tokens.paced import LETTERS, paced_tokens

_NS_PER_MS = 1_000_000
_TEXT = "é"  # two bytes, so that an event can be torn within a character
# What a chat template adds to a message here.
CHAT_OVERHEAD = 4


@dataclass(frozen=True)
class Behaviour:
    """How one request is answered. Times are in milliseconds; 0 and "" are the plain answer."""

    ttft: int = 50
    dt: int = 20
    clump: int = 1  # tokens per event
    ends: str = "\n"  # of lines: "crlf"
    tear: int = 0  # writes each event in two halves, a millisecond apart
    ping: int = 0  # a comment before each event
    kind: str = ""  # "reasoning", "tools", "empty": what the deltas carry instead of content
    usage: str = "last"  # "beside": in every event, "none"
    fault: str = ""  # see `Stream._break`
    status: int = 200  # of the first `times` attempts of a request
    times: int = 1_000_000
    retry: str = ""  # Retry-After
    wrong: int = 0  # the position of a token that is not the one a paced engine gives

    @classmethod
    def of(cls, model: str) -> "Behaviour":
        """What a model's name asks for; names without `=` are plain."""
        given = dict(part.split("=") for part in model.split(",") if "=" in part)
        known = {field.name: field.type for field in fields(cls)}
        return cls(**{key: known[key](value) for key, value in given.items()})


@dataclass
class Truth:
    """What happened to a request, in monotonic nanoseconds."""

    received_ns: int
    peer: int  # the client's port
    written_ns: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    body: dict = field(default_factory=dict)
    headers: dict = field(default_factory=dict)


class Stream:
    """One answer being paced."""

    def __init__(self, server: "GoldenServer", transport, body: dict, truth: Truth, is_chat: bool):
        self.behaviour = Behaviour.of(body["model"])
        self.transport = transport
        self.truth = truth
        self.is_chat = is_chat
        self.server = server
        self.total = num_asked(body)
        self.token_ids: list[int] = []
        self.prompt_token_ids: list[int] | None = None
        if body.get("return_token_ids"):
            prompt = server.words.tokenize(body)["tokens"]
            self.token_ids = paced_tokens(prompt, self.total, LETTERS)
            self.prompt_token_ids = prompt
            if self.behaviour.wrong:
                self.token_ids[self.behaviour.wrong] = 0
        self.num_sent = 0
        self.first_ns = 0
        self.is_over = False

    def begin(self, now_ns: int) -> None:
        self.first_ns = now_ns + self.behaviour.ttft * _NS_PER_MS
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        self.transport.write((head + "transfer-encoding: chunked\r\n\r\n").encode())
        if self.is_chat:
            self._write([{"index": 0, "delta": {"role": "assistant", "content": ""}}])

    @property
    def due_ns(self) -> int:
        return self.first_ns + self.num_sent * self.behaviour.dt * _NS_PER_MS

    def write_due(self, now_ns: int) -> None:
        """Writes the events that are due."""
        while not self.is_over and self.due_ns <= now_ns:
            if self.transport.is_closing() or self._break():
                self.is_over = True
                return
            num_tokens = min(self.behaviour.clump, self.total - self.num_sent)
            self.truth.written_ns.append(time.monotonic_ns())
            self.num_sent += num_tokens
            self._write([self._choice(num_tokens)])
            if self.num_sent == self.total:
                self._end()
                self.is_over = True

    def _choice(self, num_tokens: int) -> dict:
        text = _TEXT * num_tokens
        ids = self.token_ids[self.num_sent - num_tokens : self.num_sent]
        if not self.is_chat:
            return {"index": 0, "text": text, "token_ids": ids, "finish_reason": None}
        delta = {
            "": {"content": text},
            "reasoning": {"content": None, "reasoning_content": text},
            "tools": {"tool_calls": [{"index": 0, "function": {"arguments": text}}]},
            "empty": {"content": ""},
        }[self.behaviour.kind]
        return {"index": 0, "delta": delta, "token_ids": ids, "finish_reason": None}

    def _end(self) -> None:
        reason = None if self.behaviour.fault == "nofinish" else "length"
        last = {"index": 0, "delta": {}} if self.is_chat else {"index": 0, "text": ""}
        self._write([last | {"finish_reason": reason}])
        if self.behaviour.usage == "last":
            self._write([], usage=True)
        if self.behaviour.fault != "nodone":
            done = b"data: [DONE]" if self.behaviour.fault == "noblank" else b"data: [DONE]\n\n"
            self._write_chunk(done)
        self.transport.write(b"0\r\n\r\n")

    def _break(self) -> bool:
        """Does the fault that was asked for, in the middle; whether the stream is over by it."""
        fault = self.behaviour.fault
        if fault not in ("error", "errorevent", "fin", "reset", "silence", "garbage"):
            return False
        if self.num_sent < self.total // 2:
            return False
        if fault == "error":
            self._write_chunk(b'data: {"error": {"message": "engine died", "code": 500}}\n\n')
            self.transport.write(b"0\r\n\r\n")
        elif fault == "errorevent":
            self._write_chunk(b'event: error\ndata: {"message": "engine died"}\n\n')
        elif fault == "garbage":
            self._write_chunk(b"data: {]\n\n")
        elif fault == "fin":
            self.transport.close()
        elif fault == "reset":
            connection = self.transport.get_extra_info("socket")
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.transport.abort()
        return True

    def _write(self, choices: list, *, usage: bool = False) -> None:
        message: dict = {"id": "golden", "model": "golden", "choices": choices}
        if self.is_chat and not self.num_sent:
            message["prompt_token_ids"] = self.prompt_token_ids
        if usage or self.behaviour.usage == "beside":
            message["usage"] = {
                "prompt_tokens": self.truth.prompt_tokens,
                "completion_tokens": self.num_sent,
                "prompt_tokens_details": {"cached_tokens": 1},
            }
        data = json.dumps(message, ensure_ascii=False).encode()
        ping = b": ping\n\n" if self.behaviour.ping else b""
        self._write_chunk(ping + b"data: " + data + b"\n\n")

    def _write_chunk(self, event: bytes) -> None:
        if self.behaviour.ends == "crlf":
            event = event.replace(b"\n", b"\r\n")
        torn = event.find(_TEXT.encode()) + 1  # after the first of the character's two bytes
        if self.behaviour.tear and torn:
            self._write_raw(event[:torn])
            time.sleep(0.001)
            event = event[torn:]
        self._write_raw(event)

    def _write_raw(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


@dataclass(frozen=True)
class Options:
    """Of the whole server. `num_slots` answers are paced at once, the others queue (0: no bound).

    `stall_after_s` after the first request the whole process stands still for `stall_for_s`: it
    accepts, reads and writes nothing.
    """

    num_slots: int = 0
    stall_after_s: float = 0.0
    stall_for_s: float = 0.0
    models: str = "golden"
    fleet: str = ""  # JSON
    tokenizer: int = 0


class GoldenServer:
    """Paces all streams and keeps the truth."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.words = Words()
        self.truths: dict[str, Truth] = {}
        self.attempts: Counter[str] = Counter()
        self.stall_ns: tuple[int, int] | None = None
        self._due: list[tuple[int, int, Stream]] = []
        self._numbers = itertools.count()
        self._waiting: deque[Stream] = deque()
        self._num_running = 0
        self._is_ticking = False
        self._has_begun = False

    def add(self, stream: Stream) -> None:
        if not self._has_begun and self.options.stall_for_s:
            self._has_begun = True
            loop = asyncio.get_running_loop()
            loop.call_later(self.options.stall_after_s, self._stall)
        self._waiting.append(stream)
        self._admit()
        if not self._is_ticking:
            self._is_ticking = True
            self._tick()

    def _admit(self) -> None:
        limit = self.options.num_slots or len(self._waiting) + self._num_running
        while self._waiting and self._num_running < limit:
            stream = self._waiting.popleft()
            self._num_running += 1
            stream.begin(time.monotonic_ns())
            heapq.heappush(self._due, (stream.due_ns, next(self._numbers), stream))

    def _tick(self) -> None:
        now_ns = time.monotonic_ns()
        while self._due and self._due[0][0] <= now_ns:
            _, _, stream = heapq.heappop(self._due)
            stream.write_due(now_ns)
            if stream.is_over:
                self._num_running -= 1
                self._admit()
            else:
                heapq.heappush(self._due, (stream.due_ns, next(self._numbers), stream))
        self._is_ticking = bool(self._due)
        if self._is_ticking:
            asyncio.get_running_loop().call_later(0.001, self._tick)

    def _stall(self) -> None:
        began_ns = time.monotonic_ns()
        time.sleep(self.options.stall_for_s)
        self.stall_ns = (began_ns, time.monotonic_ns())


class Connection(asyncio.Protocol):
    """As much of HTTP/1.1 as a client of ours needs."""

    def __init__(self, server: GoldenServer) -> None:
        self.server = server
        self.buffer = b""

    def connection_made(self, transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            first, *lines = self.buffer[:end].decode("latin1").split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            length = int(headers.get("content-length", 0))
            if len(self.buffer) < end + 4 + length:
                return
            body = self.buffer[end + 4 : end + 4 + length]
            self.buffer = self.buffer[end + 4 + length :]
            self._answer(first.split()[1], headers, json.loads(body) if body else {})

    def _answer(self, path: str, headers: dict[str, str], body: dict) -> None:
        server = self.server
        if path.endswith("/completions"):
            self._complete(headers, body, is_chat=path.endswith("/chat/completions"))
        elif path == "/truth":
            truths = {key: asdict(truth) for key, truth in server.truths.items()}
            self._respond(200, {"requests": truths, "stall_ns": server.stall_ns})
        elif path == "/v1/models":
            names = server.options.models.split(";")
            self._respond(200, {"object": "list", "data": [{"id": name} for name in names]})
        elif path == "/fleet" and server.options.fleet:
            self._respond(200, json.loads(server.options.fleet))
        elif path == "/tokenize" and server.options.tokenizer:
            self._respond(200, server.words.tokenize(body))
        elif path == "/detokenize" and server.options.tokenizer:
            self._respond(200, {"prompt": server.words.detokenize(body["tokens"])})
        else:
            self._respond(404, {"error": "not here"})

    def _complete(self, headers: dict[str, str], body: dict, *, is_chat: bool) -> None:
        # Other people's clients name no request; all that is known of one is then when it came.
        request_id = headers.get("x-request-id", f"unnamed-{len(self.server.truths)}")
        peer = self.transport.get_extra_info("peername")[1]
        truth = Truth(time.monotonic_ns(), peer, body=body, headers=headers)
        truth.prompt_tokens = self.server.words.tokenize(body)["count"]
        self.server.truths[request_id] = truth
        self.server.attempts[request_id] += 1
        behaviour = Behaviour.of(body["model"])
        refused = self.server.attempts[request_id] <= behaviour.times
        if behaviour.status != 200 and refused:
            more = {"retry-after": behaviour.retry} if behaviour.retry else {}
            self._respond(behaviour.status, {"error": {"message": "refused"}}, more)
        elif behaviour.fault == "html":
            self._respond(200, {}, {"content-type": "text/html"})
        elif behaviour.fault == "jsonerror":
            self._respond(200, {"error": {"message": "no such thing"}})
        elif behaviour.fault == "json":
            choice = {"index": 0, "message": {"content": "all"}, "finish_reason": "length"}
            usage = {"prompt_tokens": 1, "completion_tokens": num_asked(body)}
            self._respond(200, {"choices": [choice], "usage": usage})
        elif behaviour.fault == "hangup":
            self.transport.close()
        else:
            self.server.add(Stream(self.server, self.transport, body, truth, is_chat))

    def _respond(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        lines = {"content-type": "application/json", "content-length": str(len(data))}
        head = "".join(f"{key}: {value}\r\n" for key, value in (lines | (headers or {})).items())
        self.transport.write(f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + data)


def num_asked(body: dict) -> int:
    """The length of the answer, by either of the API's names for it."""
    return body["max_tokens"] if "max_tokens" in body else body["max_completion_tokens"]


def content_text(content: str | list) -> str:
    """A message's text, plain or in parts."""
    return content if isinstance(content, str) else " ".join(each["text"] for each in content)


class Words:
    """A tokenizer to which every word is a token, numbered in the order they are first seen."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def tokenize(self, body: dict) -> dict:
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            tokens = prompt
        elif prompt is not None:
            tokens = self._of(prompt)
        else:
            texts = [content_text(each["content"]) for each in body["messages"]]
            tokens = [token for text in texts for token in self._of(text)]
            tokens = [0] * CHAT_OVERHEAD * len(body["messages"]) + tokens
        return {"tokens": tokens, "count": len(tokens), "max_model_len": 1_000_000}

    def detokenize(self, tokens: list[int]) -> str:
        words = list(self._ids)
        return " ".join(words[token] for token in tokens)

    def _of(self, text: str) -> list[int]:
        return [self._ids.setdefault(word, len(self._ids)) for word in text.split()]


@dataclass(frozen=True)
class Golden:
    """A golden server in a process of its own."""

    url: str

    def truth(self) -> dict:
        """What it knows of all requests so far: `requests` by id, and `stall_ns`."""
        with urllib.request.urlopen(f"{self.url}/truth", timeout=10) as response:
            return json.load(response)


@contextmanager
def golden_server(**options: object) -> Iterator[Golden]:
    """Starts one with these `Options` and ends it."""
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    command = [sys.executable, str(Path(__file__)), *arguments]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            assert process.stdout is not None
            yield Golden(f"http://127.0.0.1:{int(process.stdout.readline())}")
        finally:
            process.terminate()


async def _serve(options: Options) -> None:
    server = GoldenServer(options)
    listening = await asyncio.get_running_loop().create_server(
        lambda: Connection(server), "127.0.0.1", 0, backlog=4096
    )
    sys.stdout.write(f"{listening.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await listening.serve_forever()


def _parsed() -> Options:
    parser = argparse.ArgumentParser()
    for option in fields(Options):
        parser.add_argument(
            f"--{option.name.replace('_', '-')}", type=option.type, default=option.default
        )
    return Options(**vars(parser.parse_args()))


if __name__ == "__main__":
    uvloop.run(_serve(_parsed()))
