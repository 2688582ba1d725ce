"""Ten owners of a batch of 10,000 lines are killed, one after the other: every line once."""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.gateway.batches.records import Batch, BatchStatus, FilePurpose, KeyOfBatch, StoredFile
from serving.gateway.batches.sqlite_store import SqliteBatchStore

pytestmark = pytest.mark.process

PROJECT_ROOT = Path(__file__).parents[3]
PATH = "/v1/completions"
NUM_LINES, NUM_KILLS = 10_000, 10
# Each owner that is killed has answered so many, and leaves enough for the others.
NUM_PER_OWNER = 200
DEADLINE_S = 600.0


def lines() -> bytes:
    requests = (
        {"custom_id": f"line-{each}", "method": "POST", "url": PATH, "body": {"prompt": each}}
        for each in range(NUM_LINES)
    )
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


def start_owner(folder: Path) -> subprocess.Popen[bytes]:
    command = (sys.executable, "-m", "tests.gateway.batches.owner_process", str(folder))
    return subprocess.Popen(command, cwd=PROJECT_ROOT)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteBatchStore]:
    opened = SqliteBatchStore(tmp_path)
    content = opened.new_content()
    text = lines()
    content.write(text)
    file = StoredFile("file-1", "a", "in", FilePurpose.BATCH, len(text), 0.0, None)
    opened.add_file(file, content, 10**9)
    content.discard()
    now_s = time.time()
    key = KeyOfBatch("", None)
    opened.add_batch(Batch("b1", "a", key, PATH, "file-1", "24h", now_s, now_s + 86_400))
    yield opened
    opened.close()


def test_each_line_is_answered_once_over_ten_kills(tmp_path: Path, store: SqliteBatchStore) -> None:
    def when_answered(num_lines: int) -> Batch:
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            batch = store.batch("a", "b1")
            assert batch is not None
            if batch.num_answered >= num_lines or batch.has_ended:
                return batch
            assert time.monotonic() < deadline_s, f"{batch.num_answered} lines, and no more"
            time.sleep(0.01)

    owner = start_owner(tmp_path)
    try:
        num_before = 0
        for _ in range(NUM_KILLS):
            assert not when_answered(num_before + NUM_PER_OWNER).has_ended
            owner.kill()
            owner.wait()
            num_before = when_answered(0).num_answered
            owner = start_owner(tmp_path)
        deadline_s = time.monotonic() + DEADLINE_S
        while not (batch := when_answered(NUM_LINES)).has_ended:
            assert time.monotonic() < deadline_s, "all is answered, and it has not ended"
            time.sleep(0.01)
    finally:
        owner.kill()
        owner.wait()
    assert batch.status is BatchStatus.COMPLETED
    assert (batch.num_completed, batch.error_file_id) == (NUM_LINES, None)
    with store.open_content(str(batch.output_file_id)) as content:
        answers = [json.loads(line) for line in content]
    ids = Counter(answer["custom_id"] for answer in answers)
    assert ids == Counter(f"line-{each}" for each in range(NUM_LINES))
    assert all(
        answer["custom_id"] == f"line-{answer['response']['body']['prompt']}" for answer in answers
    )
    owners = {answer["response"]["request_id"].partition("-")[0] for answer in answers}
    assert len(owners) == NUM_KILLS + 1
