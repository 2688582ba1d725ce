"""The `slicewise` command, through its front door; `/fleet` is answered by a real HTTP server."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from deployments.cli import COMMAND_GROUP, build_cli, needed
from deployments.status.durations import format_duration

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GOOD = """
http_options: {host: 127.0.0.1}
applications:
- name: main
  import_path: serving.app:build
  args:
    models:
    - name: demo
      source: models/demo
      deployments: [{compute_class: local, replicas: 2}]
- name: other
  route_prefix: /other
  import_path: somebody.else:app
"""
SCALED_BY = """
  autoscaling_policy:
    policy_function: autoscaling.serve_policy:SlicePolicy
    policy_kwargs:
      models:
        demo:
          profile:
            {model: demo, engine: paced, base_s: 0.02, per_sequence_s: 0.005, max_num_seqs: 16,
             per_prompt_token_s: 0.0, measured_on: "2026-11-21", source: an input}
          objectives: {ttft_s: 3.0, tpot_s: 0.05}
          classes: {local: {usd_per_slice_hour: 1.0, provisioning_s: 5.0}}
"""
FLEET = {
    "gateway": {"id": "gw-1", "uptime_s": 3725.2, "new_field": 1},
    "models": [
        {
            "name": "demo",
            "waiting": 3,
            "promised": 2,
            "line_tenants": [
                {"tenant": "acme", "service_class": "batch", "waiting": 2},
                {"tenant": "beta", "service_class": "standard", "waiting": 1},
            ],
            "line_mean_wait_s": {"interactive": 0.0512, "batch": 12.0},
            "refusals": {"overloaded": 12, "no_room_in_time": 3},
            "cache_forecast": {"found": 900, "missing": 100, "unforeseen": 50},
            "dispatches": {"only_one": 50, "cached": 140, "spread": 0, "waited": 10},
            "engines": [
                {
                    "engine_id": "e-1",
                    "compute_class": "v6e-spot",
                    "state": "ready",
                    "since_s": 59.9,
                    "num_running": 4,
                    "num_waiting": 0,
                    "kv_usage_ratio": 0.125,
                    "in_flight": 5,
                    "linked": True,
                },
                {"engine_id": None, "compute_class": "v6e-spot", "state": "loading", "since_s": 7},
            ],
        },
        {"name": "idle", "waiting": 0, "engines": []},
    ],
    "quotas": [
        {
            "tenant": "acme",
            "quota": "5,000,000 tokens per day of demo",
            "limit": 5_000_000,
            "used": 4_750_000,
            "refused": 1204,
        },
        {"tenant": "beta", "quota": "2.5 usd per hour", "limit": 2.5, "used": 0.0312},
        {"tenant": "beta", "quota": "8 concurrent", "limit": 8, "used": 0, "refused": 0},
    ],
}


def run(*arguments: str, commands: tuple[EntryPoint, ...] = ()) -> Result:
    return CliRunner().invoke(build_cli(commands), list(arguments))


def check(tmp_path: Path, text: str) -> Result:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    return run("config", "check", str(path))


@contextmanager
def gateway(
    body: str, status: int = 200, key: str | None = None, location: str | None = None
) -> Iterator[str]:
    """A server that gives this answer at `/fleet`, to those who know `key`; yields its address."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = key is None or self.headers["Authorization"] == f"Bearer {key}"
            code = status if self.path == "/fleet" else 404
            self.send_response(code if is_known else 401)
            if location is not None:
                self.send_header("Location", location)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_shipped_config_is_good_and_summarised() -> None:
    result = run("config", "check", str(ROOT / "serve_config.yaml"))
    assert result.exit_code == 0, result.output
    assert "engine-slicewise-demo-local (replicas: 2)" in result.output
    assert "asked of Ray 0.5 CPUs" in result.output
    assert "everybody who reaches 127.0.0.1" in result.output


def test_other_applications_are_left_alone(tmp_path: Path) -> None:
    result = check(tmp_path, GOOD)
    assert result.exit_code == 0, result.output
    assert "application main" in result.output
    assert "application other" not in result.output


# What replaces what in the good file, and the end of the one problem's line.
BAD_FILES = [
    (
        "source: models/demo",
        "sauce: models/demo",
        'applications[0].args.models[0].sauce: unknown key (value "models/demo"); '
        "did you mean 'source'?",
    ),
    (
        "source: models/demo",
        "source: models/demo\n      engine_args: {max_model_length: 2048}",
        "applications[0].args.models[0].engine_args.max_model_length: unknown key (value 2048); "
        "did you mean 'max_model_len'?",
    ),
    (
        "host: 127.0.0.1",
        "hosst: 127.0.0.1",
        "http_options.hosst: unknown key (value \"127.0.0.1\"); did you mean 'host'?",
    ),
    (
        "host: 127.0.0.1",
        "port: http",
        "http_options.port: Input should be a valid integer, unable to parse string as an integer "
        '(value "http"); see Ray Serve\'s config',
    ),
    (
        "host: 127.0.0.1",
        "host: 0.0.0.0",
        "applications[0].args.auth: no API keys, but http_options.host '0.0.0.0' is reached from "
        "other machines",
    ),
    ("  import_path: serving", "  import_path: nowhere", "applications: none is Slicewise's"),
    ("- name: main", "- name: main\n  name: twice", "the key 'name' is given twice"),
    ("applications:", "applications: [", "not readable as YAML"),
]


@pytest.mark.parametrize(("old", "new", "problem"), BAD_FILES)
def test_bad_file_is_refused_with_its_problem(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    assert old in GOOD
    result = check(tmp_path, GOOD.replace(old, new))
    assert result.exit_code == 1
    assert f"{tmp_path / 'serve.yaml'}: " in result.output
    assert problem in result.output


def test_problems_of_serve_and_of_the_application_are_listed_together(tmp_path: Path) -> None:
    text = GOOD.replace("host: 127.0.0.1", "port: http").replace("replicas: 2", "replicas: 0")
    result = check(tmp_path, text)
    assert result.exit_code == 1
    assert "http_options.port" in result.output
    assert "applications[0].args.models[0].deployments[0].replicas" in result.output


def test_empty_file_is_refused(tmp_path: Path) -> None:
    result = check(tmp_path, "")
    assert result.exit_code == 1
    assert "none is Slicewise's" in result.output


def test_missing_file_is_a_usage_error() -> None:
    assert run("config", "check", "no-such-file.yaml").exit_code == 2


def test_status_shows_engines_of_every_model() -> None:
    with gateway(json.dumps(FLEET)) as url:
        result = run("status", "--url", url)
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert lines == [
        "gateway gw-1, running for 1h02m",
        "nothing is wrong",
        "",
        "demo: 3 requests wait for an engine, and 2 refused ones may come back",
        "in line: acme 2 (batch), beta 1 (standard)",
        "mean wait for an engine in the last half minute: interactive 0.05 s, batch 12.00 s",
        "refused since this gateway started: overloaded 12, no_room_in_time 3",
        "of 1000 prompt tokens expected in prefix caches 90% were there",
        "engines were chosen 200 times: cached 70%, only_one 25%, waited 5%",
        "ENGINE COMPUTE CLASS STATE SINCE RUNNING WAITING KV IN FLIGHT",
        "e-1 v6e-spot ready 59s 4 0 12% 5",
        "- v6e-spot loading 7s - - - -",
        "",
        "idle: 0 requests wait for an engine",
        "no engines",
        "",
        "quotas, nearest to their limits first:",
        "TENANT QUOTA USED SHARE REFUSED",
        "acme 5,000,000 tokens per day of demo 4,750,000 95% 1,204",
        # Its gateway is too old to count what is refused.
        "beta 2.5 usd per hour 0.0312 1% -",
        "beta 8 concurrent 0 0% 0",
    ]


def test_status_as_json_is_the_answer_as_it_came_with_what_is_wrong() -> None:
    with gateway(json.dumps(FLEET)) as url:
        result = run("status", "--url", url, "--json")
    assert json.loads(result.output) == FLEET | {"findings": []}


def test_status_sends_the_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with gateway(json.dumps(FLEET), key="abc") as url:
        refused = run("status", "--url", url)
        by_option = run("status", "--url", url, "--api-key", "abc")
        monkeypatch.setenv("SLICEWISE_API_KEY", "abc")
        by_environment = run("status", "--url", f"{url}/")
    assert refused.exit_code == 2
    assert "SLICEWISE_API_KEY" in refused.output
    assert by_option.exit_code == by_environment.exit_code == 0


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("oops", 500, "HTTP 500"),
        ("<html>", 200, "not a fleet"),
        ('{"models": [{"name": "a", "waiting": 0}]}', 200, "models.0.engines, gateway"),
    ],
)
def test_status_says_what_is_wrong_with_an_answer(body: str, status: int, words: str) -> None:
    with gateway(body, status) as url:
        result = run("status", "--url", url)
    assert result.exit_code == 2
    assert words in result.output


def test_status_follows_no_redirect() -> None:
    with gateway(json.dumps(FLEET)) as other, gateway("", 302, location=f"{other}/fleet") as url:
        result = run("status", "--url", url, "--api-key", "abc")
    assert result.exit_code == 2
    assert "redirects" in result.output


def test_status_says_that_nobody_listens() -> None:
    with gateway("") as url:
        pass
    result = run("status", "--url", url)
    assert result.exit_code == 2
    assert "Connection refused" in result.output
    assert "serve run" in result.output


@pytest.mark.parametrize("url", ["file:///etc", "127.0.0.1:8000", "http://", "ftp://a"])
def test_status_takes_http_addresses_only(url: str) -> None:
    result = run("status", "--url", url)
    assert result.exit_code == 2
    assert "not an address" in result.output


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0s"),
        (59.9, "59s"),
        (60, "1m00s"),
        (3599, "59m59s"),
        (3600, "1h00m"),
        (183_600, "2d03h"),
    ],
)
def test_durations_have_two_units_at_most(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


def test_other_packages_add_commands() -> None:
    # Any function and any typer.Typer will do; these are at hand.
    where = "deployments.status.durations:format_duration"
    function = EntryPoint("age", where, "slicewise.commands")
    result = run("age", "61", commands=(function,))
    assert result.exit_code == 0, result.output
    assert run("--help", commands=(function,)).output.count("age") >= 1
    assert run("age", "61").exit_code == 2


def test_only_the_command_that_is_named_is_loaded() -> None:
    commands = [EntryPoint(name, "nowhere:nothing", COMMAND_GROUP) for name in ("one", "two")]
    assert [each.name for each in needed(["two", "--help"], commands)] == ["two"]
    assert needed(["serve", "two"], commands) == []
    for arguments in ([], ["--help"], ["three"]):
        assert needed(arguments, commands) == commands


def test_deployments_that_scale_need_a_policy(tmp_path: Path) -> None:
    scaling = GOOD.replace("replicas: 2", "min_replicas: 0, max_replicas: 3")
    refused = check(tmp_path, scaling)
    assert refused.exit_code == 1
    assert "applications[0].autoscaling_policy: missing" in refused.output
    accepted = check(tmp_path, scaling.replace("- name: main", f"- name: main{SCALED_BY}"))
    assert accepted.exit_code == 0, accepted.output
    assert "(replicas: 0 to 3)" in accepted.output
