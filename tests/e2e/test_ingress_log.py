"""Who ended a request that was not ended as it should is told by the ingress."""

import socket
import time
from contextlib import closing

from .ingress_log import IngressLog

LINE = (
    "<134>Nov 26 15:16:07 haproxy[14955]: 127.0.0.1:52622 [26/Nov/2026:15:16:07.402] http_frontend "
    'http-x/gw 0/0/0/{} - - {} 118/118/4/2/0 0/0 "POST /v1/x HTTP/1.1"\n'
)
STOPPED = b"<132>Nov 26 15:16:09 haproxy[14955]: Proxy stats stopped (cumulated conns: FE: 0)."


def test_only_those_that_somebody_cut_are_kept() -> None:
    log = IngressLog()
    with closing(log), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as haproxy:
        host, port = log.target.split(":")
        haproxy.connect((host, int(port)))
        for timers, end in (("9/99 200 8", "----"), ("-1/287 400 206", "CH--")):
            haproxy.send(LINE.format(timers, end).encode())
        haproxy.send(STOPPED)
        deadline_s = time.monotonic() + 60
        while not log.bad_ends():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    assert log.bad_ends() == [LINE.format("-1/287 400 206", "CH--").strip()]
