"""The records of runs: one line of JSON each, written as soon as the run is over.

Each says of which code it is, by a fingerprint (`sources`). A file goes on where it was broken off;
what is of other code than the present one is not taken as done. A line without its end was being
written when the run was broken off, and is not there.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from benchmarks.policies.jobs import Job


class PolicyRecord(msgspec.Struct, frozen=True):
    """What one run gave. `None` is what a lower bound has not, or no request was served for.

    `source` is the fingerprint of the code, empty where none was taken yet; `commit` is where the
    code was, which may have another name since.
    `later_slo_ratio` is of requests after the first hour. `num_lines` are those of batches, and
    `lines_spot_usd` what their tokens cost on spot. `wall_s` is how long the run took here.
    """

    case: str
    world: str
    policy: str
    value: float | None
    seed: int
    commit: str
    cost_usd: float | None
    slo_ratio: float | None = None
    later_slo_ratio: float | None = None
    served_ratio: float | None = None
    mean_slices: float | None = None
    num_requests: int | None = None
    ttft_p99_s: float | None = None
    tpot_p99_s: float | None = None
    num_lines: int | None = None
    num_lines_in_time: int | None = None
    lines_spot_usd: float | None = None
    wall_s: float = 0.0
    source: str = ""

    @property
    def job(self) -> Job:
        """What was to be run."""
        return Job(self.case, self.world, self.policy, self.value, self.seed)


class PolicyResults(msgspec.Struct, frozen=True):
    """Everything that a page is made of, and what has to be known to read it."""

    date: str
    commit: str
    machine: str
    python: str
    records: tuple[PolicyRecord, ...]


def read_lines(path: Path) -> Iterator[PolicyRecord]:
    """Yields the records of a file of lines; nothing if it is not there.

    Raises:
        msgspec.ValidationError: a whole line is no record.
    """
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield msgspec.json.decode(line, type=PolicyRecord)


def append(path: Path, record: PolicyRecord) -> None:
    """Adds a record at the end, behind what is whole."""
    whole = path.read_bytes() if path.exists() else b""
    path.write_bytes(whole[: whole.rfind(b"\n") + 1] + msgspec.json.encode(record) + b"\n")


def read_results(path: Path) -> PolicyResults:
    """The results in a file that `write_results` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=PolicyResults)


def write_results(path: Path, results: PolicyResults) -> None:
    """Writes the results, a record a line."""
    head = msgspec.to_builtins(results) | {"records": []}
    text = msgspec.json.format(msgspec.json.encode(head), indent=1).decode()
    lines = ",\n  ".join(msgspec.json.encode(each).decode() for each in results.records)
    path.write_text(text.replace('"records": []', f'"records": [\n  {lines}\n ]') + "\n", "utf-8")


def of_code(
    records: Iterable[PolicyRecord], source: Callable[[str], str]
) -> dict[Job, PolicyRecord]:
    """Returns the records by their job that are of the code of now; of two the later one.

    `source` is the fingerprint by the name of a policy.
    """
    return {each.job: each for each in records if each.source == source(each.policy)}
