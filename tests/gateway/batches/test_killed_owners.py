"""Owners of a batch are killed, one after the other: every line once."""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from serving.gateway.batches.records import Batch, BatchStatus, FilePurpose, KeyOfBatch, StoredFile
from serving.gateway.batches.store import BatchStore
from tests.artifacts.object_store.servers import BUCKET, client_variables, strict_bucket

from .owner_process import store_at

__all__ = ["strict_bucket"]

pytestmark = pytest.mark.process

PROJECT_ROOT = Path(__file__).parents[3]
PATH = "/v1/completions"
# Each owner that is killed has answered so many.
NUM_PER_OWNER = 200
DEADLINE_S = 600.0


def lines(num_lines: int) -> bytes:
    requests = (
        {"custom_id": f"line-{each}", "method": "POST", "url": PATH, "body": {"prompt": each}}
        for each in range(num_lines)
    )
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


def start_owner(place: str, *limit: int) -> subprocess.Popen[bytes]:
    command = (sys.executable, "-m", "tests.gateway.batches.owner_process", place)
    command += tuple(map(str, limit))
    return subprocess.Popen(command, cwd=PROJECT_ROOT)


@dataclass(frozen=True, slots=True)
class Case:
    """Where a batch is kept, how many lines it has, and how many of its owners are killed."""

    kind: str
    num_lines: int = 10_000
    num_kills: int = 10


CASES = [
    Case("folder"),
    Case("gs", 2_500, 3),
    *(pytest.param(Case(kind), marks=pytest.mark.long) for kind in ("s3", "gs")),
]


@pytest.fixture(params=CASES, ids=lambda case: f"{case.kind}-{case.num_lines}")
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def place(
    case: Case, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """A folder, or a bucket that loses every fiftieth of its answers."""
    if case.kind == "folder":
        return str(tmp_path)
    bucket = request.getfixturevalue("strict_bucket")
    monkeypatch.setattr(bucket, "lose_every", 50)
    for name, value in client_variables(bucket.url).items():
        monkeypatch.setenv(name, value)
    return f"{case.kind}://{BUCKET}/{tmp_path.name}"


@pytest.fixture
def store(case: Case, place: str) -> Iterator[BatchStore]:
    opened = store_at(place)
    content = opened.new_content()
    text = lines(case.num_lines)
    content.write(text)
    file = StoredFile("file-1", "a", "in", FilePurpose.BATCH, len(text), 0.0, None)
    opened.add_file(file, content, 10**9)
    content.discard()
    now_s = time.time()
    key = KeyOfBatch("", None)
    opened.add_batch(Batch("b1", "a", key, PATH, "file-1", "24h", now_s, now_s + 86_400))
    yield opened
    opened.close()


def test_each_line_is_answered_once_over_kills(case: Case, place: str, store: BatchStore) -> None:
    def when_answered(num_lines: int) -> Batch:
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            batch = store.batch("a", "b1")
            assert batch is not None
            if batch.num_answered >= num_lines or batch.has_ended:
                return batch
            assert time.monotonic() < deadline_s, f"{batch.num_answered} lines, and no more"
            time.sleep(0.01)

    # However late a kill comes, there are lines for those that come after.
    share = case.num_lines // (case.num_kills + 1)
    owner = start_owner(place, share)
    try:
        num_before = 0
        for num_killed in range(1, case.num_kills + 1):
            assert not when_answered(num_before + NUM_PER_OWNER).has_ended
            owner.kill()
            owner.wait()
            num_before = when_answered(0).num_answered
            is_last = num_killed == case.num_kills
            owner = start_owner(place) if is_last else start_owner(place, share)
        deadline_s = time.monotonic() + DEADLINE_S
        while not (batch := when_answered(case.num_lines)).has_ended:
            assert time.monotonic() < deadline_s, "all is answered, and it has not ended"
            time.sleep(0.01)
    finally:
        owner.kill()
        owner.wait()
    assert batch.status is BatchStatus.COMPLETED
    assert (batch.num_completed, batch.error_file_id) == (case.num_lines, None)
    with store.open_content("a", str(batch.output_file_id)) as content:
        answers = [json.loads(line) for line in content]
    ids = Counter(answer["custom_id"] for answer in answers)
    assert ids == Counter(f"line-{each}" for each in range(case.num_lines))
    assert all(
        answer["custom_id"] == f"line-{answer['response']['body']['prompt']}" for answer in answers
    )
    owners = {answer["response"]["request_id"].partition("-")[0] for answer in answers}
    assert len(owners) == case.num_kills + 1
