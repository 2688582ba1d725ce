"""A server that answers as vLLM's frontend does, at once or one token after another.

It lies in place of a system that is compared: what is tested is the measuring, not the server.
"""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil

from benchmarks.servers import Server


@contextlib.contextmanager
def fake_chat_server(*, prompt_tokens: int = 64, status: int = 200) -> Iterator[Server]:
    """Answers with as many tokens as are asked for, two in each event of a read of its own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(prompt_tokens, status))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    host, port = server.server_address[:2]
    try:
        yield Server(f"http://{host!s}:{port}", lambda: {"gateway": [psutil.Process()]})
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(prompt_tokens: int, status: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # an event is one write

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert self.path == "/v1/chat/completions"
            assert body["stream"]
            self.send_response(status)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            for _ in range((body["max_tokens"] + 1) // 2):
                self._event({"choices": [{"delta": {"content": "ab"}}]})
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": body["max_tokens"]}
            self._event({"choices": [], "usage": usage})
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")

        def _event(self, event: object) -> None:
            self._chunk(b"data: %s\n\n" % json.dumps(event, separators=(",", ":")).encode())

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    return Handler
