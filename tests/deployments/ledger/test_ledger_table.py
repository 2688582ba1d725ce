"""From a ledger over the gateways' pages to a table, and the command that prints it."""

import csv
import io
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import typer
from prometheus_client import CollectorRegistry, Counter
from typer.testing import CliRunner

from deployments.ledger.command import ledger_command
from deployments.ledger.table import LedgerPageError, hours_table, merge, parse_page, to_csv
from deployments.terminal import plain_lines
from serving.domain.slice_lifecycle import SliceLifecycle, SliceState, Transition
from serving.domain.slice_records import SliceRecord, Snapshot
from serving.gateway.metrics.ledger import LedgerCollector, is_busy
from serving.ledger.ledger import Ledger
from serving.link.messages import EngineLoad
from tests.gateway.rendered import rendered

HOUR_S = 3600
CHIPS = 8


def hour_long_ledger(began_s: float = 0.0) -> Ledger:
    """Half an hour of provisioning and an hour of serving on spot; an hour of idling elsewhere."""
    ledger = Ledger(round(began_s * 1000))
    lives = {
        "spot": ((SliceState.REQUESTED, began_s), (SliceState.READY, began_s + HOUR_S / 2)),
        "reserved": ((SliceState.READY, began_s + HOUR_S / 2),),
    }
    snapshot = Snapshot(
        "v",
        tuple(
            SliceRecord(
                *(name, "chat", name),
                SliceLifecycle(
                    tuple(Transition(state, at_s, "") for state, at_s in transitions), f"s-{name}"
                ),
                *("v6e", "2x4"),
                engine_id=name,
            )
            for name, transitions in lives.items()
        ),
    )
    busy = {"spot": True, "reserved": False}
    ledger.observe(snapshot, busy, round((began_s + 1.5 * HOUR_S) * 1000))
    return ledger


def page(
    ledger: Ledger, gateway_id: str, prices: Mapping[str, float], output_tokens: float = 0
) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LedgerCollector(ledger, prices))
    tokens = Counter("slicewise_output_tokens", "T.", ["model", "compute_class"], registry=registry)
    tokens.labels("chat", "spot").inc(output_tokens)
    return rendered([registry], gateway_id).decode()


PRICES = {"spot": 1.5}


def test_page_has_chip_seconds_cost_and_present_chips() -> None:
    text = page(hour_long_ledger(), "g", PRICES)
    spot = 'compute_class="spot",gateway="g",model="chat"'
    assert f'slicewise_ledger_chip_seconds_total{{{spot},state="serving"}} 28800.0' in text
    assert f'slicewise_ledger_cost_usd_total{{{spot},state="serving"}} 12.0' in text
    assert f'slicewise_ledger_cost_usd_total{{{spot},state="provisioning"}} 0.0' in text
    assert f'slicewise_ledger_chips{{{spot},state="serving"}} 8.0' in text
    assert 'slice="s-spot",state="serving"} 28800.0' in text
    assert 'slicewise_ledger_start_time_seconds{gateway="g"} 0.0' in text


def test_class_without_a_price_has_no_cost() -> None:
    text = page(hour_long_ledger(), "g", PRICES)
    costs = [line for line in text.splitlines() if line.startswith("slicewise_ledger_cost")]
    assert costs
    assert not [line for line in costs if "reserved" in line]


def test_row_has_the_price_of_a_million_output_tokens() -> None:
    rows = merge([parse_page(page(hour_long_ledger(), "g", PRICES, 4_000_000))])
    reserved, spot = rows
    assert (spot.usd, spot.usd_per_million_output_tokens) == (12.0, 3.0)
    assert (reserved.usd, reserved.usd_per_million_output_tokens) == (None, None)


def test_gateways_add_their_tokens_and_never_their_chips() -> None:
    old, young = hour_long_ledger(), hour_long_ledger(began_s=60.0)
    pages = [
        parse_page(page(young, "g2", PRICES, 1_000_000)),
        parse_page(page(old, "g1", PRICES, 2_000_000)),
        parse_page(page(old, "g1", PRICES, 2_000_000)),  # the proxy gave the same one again
    ]
    _, spot = merge(pages)
    assert (spot.started_at_s, spot.usd, spot.output_tokens) == (0.0, 12.0, 3_000_000)


def test_csv_reads_back_with_every_state_as_a_column() -> None:
    text = to_csv(merge([parse_page(page(hour_long_ledger(), "g", PRICES, 1_000_000))]), 99.5)
    reserved, spot = csv.DictReader(io.StringIO(text))
    assert (spot["read_at_s"], spot["serving_chip_seconds"], spot["usd"]) == (
        "99.500",
        "28800.0",
        "12.0",
    )
    assert (spot["lost_chip_seconds"], spot["output_tokens"]) == ("0.0", "1000000")
    assert (reserved["usd"], reserved["usd_per_million_output_tokens"]) == ("", "")


def test_table_is_in_chip_hours_and_prints_no_escape() -> None:
    text = page(hour_long_ledger(), "g", PRICES, 1_000_000).replace("chat", "\x1b[31mchat")
    rows = merge([parse_page(text)])
    table = [line.split() for line in plain_lines(hours_table(rows))]
    assert table[0][:3] == ["MODEL", "COMPUTE", "CLASS"]
    assert table[2] == [
        "?[31mchat",
        "spot",
        "4.00",
        *4 * ["0.00"],
        "8.00",
        *3 * ["0.00"],
        *2 * ["12.00"],
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "0 times"),
        ("up 1\n", "0 times"),
        ("<html>", "not a metrics page"),
        ("slicewise_ledger_start_time_seconds 1\nslicewise_output_tokens_total 1\n", "'model'"),
    ],
)
def test_page_without_a_ledger_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(LedgerPageError, match=complaint):
        parse_page(text)


@pytest.mark.parametrize(
    ("num_in_flight", "load", "expected"),
    [
        (0, None, False),
        (1, None, True),
        (0, EngineLoad(0, 0, 0.5), False),
        (0, EngineLoad(1, 0), True),
        (0, EngineLoad(0, 1), True),
    ],
)
def test_engine_is_busy_with_anybodys_requests(
    num_in_flight: int, load: EngineLoad | None, *, expected: bool
) -> None:
    assert is_busy(num_in_flight, load) == expected


# -- the command --


@contextmanager
def serving(status: int, body: str) -> Iterator[tuple[str, list[str]]]:
    """A gateway that answers everything so; its address, and what it was asked with which key."""
    asked: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.path} {self.headers['Authorization']}")
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_args: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def invoke(*arguments: str) -> tuple[int, str, str]:
    cli = typer.Typer()
    cli.command()(ledger_command)
    result = CliRunner().invoke(cli, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_command_prints_the_table_of_a_gateway() -> None:
    with serving(200, page(hour_long_ledger(), "g", PRICES)) as (url, asked):
        code, out, _ = invoke("--url", f"{url}/", "--api-key", "secret")
    assert (code, asked) == (0, ["/metrics Bearer secret"])
    assert "tokens of 1 gateway(s)" in out.splitlines()[0]
    assert [line.split()[:2] for line in out.splitlines()[2:]] == [
        ["chat", "reserved"],
        ["chat", "spot"],
    ]


def test_command_prints_csv() -> None:
    with serving(200, page(hour_long_ledger(), "g", PRICES)) as (url, _):
        code, out, _ = invoke("--url", url, "--csv")
    assert code == 0
    assert [row["compute_class"] for row in csv.DictReader(io.StringIO(out))] == [
        "reserved",
        "spot",
    ]


@pytest.mark.parametrize(
    ("status", "body", "complaint"),
    [
        (401, "", "wants an API key"),
        (302, "", "HTTP 302"),
        (200, "up 1\n", "0 times"),
    ],
)
def test_command_says_what_is_wrong_with_an_answer(status: int, body: str, complaint: str) -> None:
    with serving(status, body) as (url, asked):
        code, _, err = invoke("--url", url, "--api-key", "secret")
    assert code == 2
    assert complaint in err
    assert len(asked) == 1  # a redirect is not followed, least of all with the key


@pytest.mark.parametrize(
    "url", ["ftp://gateway", "gateway:8000", "http://gateway:port", "http://["]
)
def test_command_refuses_what_is_no_address(url: str) -> None:
    code, _, err = invoke("--url", url)
    assert code == 2
    assert "not an address" in err
