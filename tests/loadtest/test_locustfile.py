import json
import subprocess
import sys
from pathlib import Path

import pytest
from golden_server import golden_server

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]


def locust(url: str, *arguments: str) -> tuple[int, list[dict]]:
    """The exit code of a short run and what it counted."""
    command = [
        *(sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless"),
        *("-u", "3", "-r", "3", "-t", "6s", "-H", url, "--json", "--output-tokens", "5"),
        *arguments,
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_locust_counts_requests_and_their_ttft(api: str) -> None:
    with golden_server(models="ttft=20,dt=5", tokenizer=1) as golden:
        code, rows = locust(golden.url, "--api", api, "--input-tokens", "12")
        truths = golden.truth()["requests"]
    by_name = {row["name"]: row for row in rows}
    assert code == 0
    assert by_name.keys() == {"ttft=20,dt=5", "ttft"}
    whole, ttft = by_name["ttft=20,dt=5"], by_name["ttft"]
    assert whole["method"] == api.upper()
    assert whole["num_failures"] == 0
    # The last request of each user may be cut off by the end of the test.
    assert 0 <= len(truths) - whole["num_requests"] <= 3
    assert whole["num_requests"] <= ttft["num_requests"] <= len(truths)
    assert whole["min_response_time"] >= 40
    assert 20 <= ttft["min_response_time"] < whole["min_response_time"]
    assert {truth["prompt_tokens"] for truth in truths.values()} == {12}


@pytest.mark.long
def test_locust_lists_failures_by_kind() -> None:
    with golden_server(models="status=503") as golden:
        code, rows = locust(golden.url)
    assert code == 1
    (row,) = rows
    assert row["num_failures"] == row["num_requests"] > 0
