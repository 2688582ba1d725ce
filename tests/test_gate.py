"""The jobs of `make test`: none of the tests is forgotten, and none is run twice."""

from pathlib import Path

from scripts.gate import Job, jobs

ROOT = Path(__file__).resolve().parents[1]


def runs(job: Job, path: str) -> bool:
    return path.startswith(job.paths) and not (job.ignored and path.startswith(job.ignored))


def test_every_test_that_starts_something_is_in_one_job() -> None:
    started = [job for job in jobs("fast", "starts") if job.markers == "starts"]
    assert len(started) > 3
    files = [f"{path.relative_to(ROOT)}" for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(files) > 100
    for path in files:
        assert len([job.name for job in started if runs(job, path)]) == 1, path


def test_fast_tests_are_one_job_of_all_files() -> None:
    (fast,) = (job for job in jobs("fast", "starts") if job.markers == "fast")
    assert (fast.paths, fast.ignored) == (("tests",), ())


def test_jobs_name_only_what_is_there() -> None:
    for job in jobs("fast", "starts"):
        for path in (*job.paths, *job.ignored):
            assert (ROOT / path).exists(), path
