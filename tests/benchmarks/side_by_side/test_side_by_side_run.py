"""Pairs are measured in turns, resumed, and missed aloud."""

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.servers import Server
from benchmarks.side_by_side.at_commit import checkout_of
from benchmarks.side_by_side.command import chosen_by, go_on
from benchmarks.side_by_side.errors import BaselineMissingError, RecordsDifferError
from benchmarks.side_by_side.loads import SLICEWISE, SLICEWISE_SPINS, Comparison, Load
from benchmarks.side_by_side.records import Missing, Pair, Records
from benchmarks.side_by_side.run import MAX_TRIES, head_of, lacking, measure_pairs
from benchmarks.side_by_side.systems import Start
from tests.benchmarks.side_by_side.builders import HEAD, pair, records_with
from tests.benchmarks.side_by_side.fake_chat_server import fake_chat_server

BURST, STEADY = Load("burst", 2, 6), Load("steady", 2, 4, warmup_s=0.05, window_s=0.2)
COMPARISON = Comparison("pair", "ours", "theirs", (BURST, STEADY), warm_up=Load("warm-up", 1, 2))
BESIDE = Comparison("beside", "ours", "another", (BURST, STEADY), warm_up=Load("warm-up", 1, 2))
OTHER = Comparison("other", "ours", "nobody's", (BURST,), warm_up=Load("warm-up", 1, 2))


class Systems:
    """Starts a fake server for every system but `nobody's`; knows which were up, and when."""

    def __init__(
        self, faulty: str | None = None, num_faults: int | None = None, **answers: int
    ) -> None:
        self.started: list[str] = []
        self.num_up = self.most_up = 0
        self._faulty = faulty
        self._num_faults = num_faults
        self._answers = answers

    def start_of(self, system: str) -> Start:
        if system == "nobody's":
            raise BaselineMissingError("nobody has it")
        return lambda: self._up(system)

    @contextlib.contextmanager
    def _up(self, system: str) -> Iterator[Server]:
        self.started.append(system)
        num_starts = self.started.count(system)
        if system == self._faulty and num_starts <= (self._num_faults or num_starts):
            raise RuntimeError("it does not start")
        self.num_up += 1
        self.most_up = max(self.most_up, self.num_up)
        try:
            with fake_chat_server(**self._answers) as server:
                yield server
        finally:
            self.num_up -= 1


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records.open(tmp_path / "records.jsonl", HEAD)


def measured(
    records: Records, num_pairs: int, systems: Systems, *chosen: Comparison
) -> list[Pair | Missing]:
    noted: list[Pair | Missing] = []
    measure_pairs(records, num_pairs, chosen, systems.start_of, noted.append, patience_s=0)
    return noted


def test_systems_are_up_one_at_a_time_and_take_turns_in_going_first(records: Records) -> None:
    systems = Systems()
    pairs = measured(records, 3, systems, COMPARISON)
    assert systems.started == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert systems.most_up == 1
    assert [each.first for each in pairs if isinstance(each, Pair)] == ["ours", "theirs", "ours"]


def test_comparisons_of_the_same_system_share_its_visit(records: Records) -> None:
    systems = Systems()
    noted = measured(records, 2, systems, COMPARISON, BESIDE)
    assert systems.started == ["theirs", "ours", "another", "another", "ours", "theirs"]
    pairs = [each for each in noted if isinstance(each, Pair)]
    assert [(each.comparison, each.first) for each in pairs] == [
        ("pair", "theirs"),
        ("beside", "ours"),
        ("pair", "ours"),
        ("beside", "another"),
    ]
    assert pairs[0].ours == pairs[1].ours
    assert pairs[0].theirs != pairs[1].theirs


def test_baseline_that_does_not_start_leaves_the_other_its_pair(records: Records) -> None:
    systems = Systems(faulty="theirs", num_faults=1)
    noted = measured(records, 1, systems, COMPARISON, BESIDE)
    assert systems.started == ["theirs", "ours", "another", "ours", "theirs"]
    assert [(type(each), each.comparison) for each in noted] == [
        (Missing, "pair"),
        (Pair, "beside"),
        (Pair, "pair"),
    ]


def test_comparison_may_want_fewer_pairs_than_the_others(records: Records) -> None:
    few = replace(COMPARISON, num_pairs=1)
    assert len(measured(records, 3, Systems(), few, replace(BESIDE, num_pairs=2))) == 3
    assert list(lacking(records, 3, [few])) == []


def test_reading_has_what_the_server_gave(records: Records) -> None:
    (found,) = measured(records, 1, Systems(), COMPARISON)
    assert isinstance(found, Pair)
    burst, steady = found.theirs.readings
    assert (burst.load, steady.load) == ("burst", "steady")
    assert (burst.num_answers, burst.num_tokens, burst.num_events) == (2, 12, 6)
    assert burst.tokens_per_event == 2
    assert steady.window_s == pytest.approx(0.2, abs=0.15)
    assert steady.num_tokens > 4
    assert burst.errors == steady.errors == {}
    assert set(steady.cpu_s) == {"gateway", "client"}
    assert burst.ttft_ms is not None
    assert 0 < burst.ttft_ms[0] <= burst.ttft_ms[1]


def test_run_that_was_broken_off_measures_only_what_is_left(records: Records) -> None:
    measured(records, 2, Systems(), COMPARISON)
    systems = Systems()
    (found,) = measured(records, 3, systems, COMPARISON)
    assert found.turn == 2
    assert systems.started == ["ours", "theirs"]


def test_pair_that_was_broken_off_is_measured_whole(records: Records) -> None:
    def interrupted(system: str) -> Start:
        if system == "theirs":
            raise KeyboardInterrupt
        return Systems().start_of(system)

    with pytest.raises(KeyboardInterrupt):
        measure_pairs(records, 1, [COMPARISON], interrupted, list[Pair | Missing]().append, 0)
    systems = Systems()
    measured(records, 1, systems, COMPARISON)
    assert systems.started == ["ours", "theirs"]


def test_missing_baseline_is_named_and_the_others_go_on(records: Records) -> None:
    chosen = (OTHER, COMPARISON)
    noted = measured(records, 2, Systems(), *chosen)
    assert [type(each) for each in noted] == [Missing, Missing, Pair, Pair]
    assert list(lacking(records, 2, chosen)) == [("other", "0 of 2 pairs; nobody's: nobody has it")]


def test_run_with_a_missing_baseline_fails_and_the_page_names_it(
    tmp_path: Path, records: Records
) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- begin: measured --><!-- end: measured -->\n")

    def start_of(system: str) -> Start:
        raise BaselineMissingError(f"nobody has {system}")

    chosen = chosen_by("now,vllm-spins")
    with pytest.raises(SystemExit) as ended:
        go_on(records, 1, chosen, start_of, page)
    reason = f"{SLICEWISE}: nobody has {SLICEWISE}"
    assert str(ended.value).splitlines() == [
        f"missing: now: 0 of 1 pairs; {reason}",
        f"missing: vllm-spins: 0 of 1 pairs; {SLICEWISE_SPINS}: nobody has {SLICEWISE_SPINS}",
    ]
    assert f"- now: 0 of 15 pairs. {reason}" in page.read_text()


def test_run_that_has_all_its_pairs_ends_well(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- begin: measured --><!-- end: measured -->\n")
    chosen = chosen_by("now")
    go_on(records_with(tmp_path, pair(chosen[0])), 1, chosen, Systems().start_of, page)
    assert "| now | Slicewise | Slicewise at a07807c | 1 |" in page.read_text()


def test_comparison_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="no comparison later; allowed: now, gateways, ray-direct"):
        chosen_by("now,later")


def test_server_that_does_not_start_is_missing(records: Records) -> None:
    systems = Systems(faulty="theirs")
    for missing in measured(records, 2, systems, COMPARISON):
        assert isinstance(missing, Missing)
        assert (missing.system, missing.reason) == ("theirs", "it does not start")
    assert systems.started == ["ours", "theirs"] * MAX_TRIES


def test_pair_whose_server_did_not_start_once_is_measured(records: Records) -> None:
    systems = Systems(faulty="theirs", num_faults=1)
    noted = measured(records, 1, systems, COMPARISON)
    assert [type(each) for each in noted] == [Missing, Pair]
    assert list(lacking(records, 1, [COMPARISON])) == []


def test_nothing_lacks_when_all_pairs_are_there(records: Records) -> None:
    measured(records, 1, Systems(), COMPARISON)
    assert list(lacking(records, 1, [COMPARISON])) == []
    assert list(lacking(records, 2, [COMPARISON])) == [("pair", "1 of 2 pairs; not measured")]


@pytest.mark.parametrize(
    ("answers", "shown"), [({"status": 503}, "503"), ({"prompt_tokens": 65}, r"\(65, 6\)")]
)
def test_wrong_answers_are_counted_by_what_was_said(
    records: Records, answers: dict[str, int], shown: str
) -> None:
    (found,) = measured(records, 1, Systems(**answers), COMPARISON)
    assert isinstance(found, Pair)
    burst, steady = found.ours.readings
    assert sum(burst.errors.values()) == 2
    assert burst.num_tokens == steady.num_tokens == 0
    assert all(re.search(shown, words) for words in burst.errors)


@pytest.fixture
def checkout(tmp_path: Path) -> Callable[..., str]:
    """A repository with one commit, and `git` in it."""
    root = tmp_path / "repository"
    root.mkdir()

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.com"]
        command = ["git", *identity, *arguments]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "--quiet")
    (root / "Makefile").write_text("setup:\n\t@mkdir -p $(VENV) && touch $(VENV)/made\n")
    (root / ".gitignore").write_text(".bench/\n.venv/\n")
    (root / "docs").mkdir()
    (root / "docs" / "page.md").write_text("old\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    return git


def test_other_commit_is_built_beside_and_kept(
    tmp_path: Path, checkout: Callable[..., str]
) -> None:
    root, commit = tmp_path / "repository", checkout("rev-parse", "--short=7", "HEAD")
    folder = checkout_of(root, commit)
    assert (folder / ".venv" / "made").exists()
    assert checkout_of(root, commit) == folder
    assert checkout("status", "--porcelain") == ""


def test_other_commit_that_was_changed_is_refused(
    tmp_path: Path, checkout: Callable[..., str]
) -> None:
    root, commit = tmp_path / "repository", checkout("rev-parse", "--short=7", "HEAD")
    (checkout_of(root, commit) / "Makefile").write_text("setup:\n")
    with pytest.raises(BaselineMissingError, match="has changes"):
        checkout_of(root, commit)


@pytest.mark.usefixtures("checkout")
def test_commit_that_is_not_there_is_a_missing_baseline(tmp_path: Path) -> None:
    with pytest.raises(BaselineMissingError, match="git worktree add"):
        checkout_of(tmp_path / "repository", "a07807c")


def test_run_is_of_a_commit_and_nothing_else(tmp_path: Path, checkout: Callable[..., str]) -> None:
    root = tmp_path / "repository"
    # The page of the run before is no part of what is measured.
    (root / "docs" / "page.md").write_text("new\n")
    head = head_of(root, [COMPARISON], "make bench")
    assert head.commit == checkout("rev-parse", "--short=7", "HEAD")
    (root / "Makefile").write_text("setup:\n")
    with pytest.raises(RecordsDifferError, match="Makefile"):
        head_of(root, [COMPARISON], "make bench")


@pytest.mark.parametrize(
    ("name", "is_same"),
    [
        ("docs/page.md", True),
        ("README.md", True),
        ("tests/test_it.py", True),
        ("Makefile", False),
        ("serving/it.py", False),
        ("tests/e2e/application.py", False),
    ],
)
def test_code_of_a_run_is_what_is_measured(
    tmp_path: Path, checkout: Callable[..., str], name: str, is_same: bool
) -> None:
    root = tmp_path / "repository"
    before = head_of(root, [COMPARISON], "make bench")
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text("another\n")
    checkout("add", ".")
    checkout("commit", "--quiet", "-m", "second")
    after = head_of(root, [COMPARISON], "make bench")
    assert after.commit != before.commit
    assert (after.code == before.code) is is_same
