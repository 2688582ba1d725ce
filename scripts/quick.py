"""`make quick`: lint, types and tests of what changed, in less than a minute for most changes.

Without an argument a change is what git sees in the working tree against HEAD, untracked files
included; `--since REV` counts from another commit. `--last N` plays what each of the last N commits
changed, on the tree as it is, and prints how long it took; the tests of these have to pass as well.
Which tests a change can reach: `tests/selection.py`. Only the fast ones are taken.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.selection import Selection, read_sources
from tests.unselected import module_markers, selects_nothing

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
# From here on a second process pays for what it imports again.
PARALLEL_FROM = 8


def main() -> None:
    """Ends with 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="quick.py")
    parser.add_argument("--fast", required=True, help="the expression of markers of fast tests")
    parser.add_argument("--since", default="HEAD", help="the commit to compare with")
    parser.add_argument("--last", type=int, help="measure so many commits up to that one")
    options = parser.parse_args()
    if options.last:
        sys.exit(measure(options.last, options.since, options.fast))
    changed = git("diff", "--name-only", options.since)
    changed += git("ls-files", "--others", "--exclude-standard")
    sys.exit(check(changed, options.fast))


def check(changed: Sequence[str], fast: str) -> int:
    """Everything for these paths: 0 if all is well."""
    if not changed:
        print("nothing has changed")
        return 0
    reading = subprocess.Popen(
        ["bash", "-c", " && ".join(readers(changed))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    tests = fast_tests(changed, fast)
    print(f"{len(changed)} files changed; {len(tests)} files of fast tests reach them", flush=True)
    failed = run_tests(tests, fast) if tests else 0
    said, _ = reading.communicate()
    print(said, end="")
    return failed or reading.returncode


def readers(changed: Iterable[str]) -> list[str]:
    """What reads the code, as shell commands; all of it takes seconds once mypy has its cache."""
    python = " ".join(path for path in changed if path.endswith(".py") and (ROOT / path).exists())
    lint = [f"{BIN}/ruff format --check {python}", f"{BIN}/ruff check {python}"] if python else []
    return [*lint, f"{BIN}/mypy", f"{BIN}/lint-imports"]


def fast_tests(changed: Sequence[str], fast: str) -> list[str]:
    """The files of tests that the change reaches, without those that have no fast test."""
    paths = git("ls-files", "--cached", "--others", "--exclude-standard")
    pyproject = (ROOT / "pyproject.toml").read_text()
    selection = Selection(read_sources(ROOT, {*paths, *changed}), paths, pyproject)
    lines = tomllib.loads(pyproject)["tool"]["pytest"]["ini_options"]["markers"]
    declared = frozenset(line.partition(":")[0] for line in lines)
    there = [path for path in selection.test_files(changed) if (ROOT / path).exists()]
    return [
        path
        for path in there
        if not selects_nothing(fast, module_markers((ROOT / path).read_text()), declared)
    ]


def run_tests(tests: Sequence[str], fast: str) -> int:
    """Runs the fast tests of these files, the nearest first; 0 if none failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", fast, "--hypothesis-profile", "quick"]
    if len(tests) >= PARALLEL_FROM:
        command += ["-n", str(os.cpu_count() or 1), "--dist", "loadfile"]
    code = subprocess.run([*command, *tests], cwd=ROOT, check=False).returncode
    # 5: every test of these files has a marker of its own that leaves it out.
    return 0 if code == 5 else code


def measure(num_commits: int, since: str, fast: str) -> int:
    """A line for each commit up to `since`, and the median; 1 if any of them failed."""
    failed, walls_s = 0, []
    print("commit     files  test files   wall s    CPU s")
    for commit in git("log", f"-{num_commits}", "--format=%h", since):
        changed = touched(commit)
        begun_s, before_s = time.monotonic(), cpu_s()
        done = subprocess.run(
            [sys.executable, "-c", _PLAY, fast, *changed],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        walls_s.append(time.monotonic() - begun_s)
        num_tests = len(fast_tests(changed, fast))
        row = f"{commit:10} {len(changed):5} {num_tests:11} {walls_s[-1]:8.1f}"
        print(
            f"{row} {cpu_s() - before_s:8.1f}",
            "" if done.returncode == 0 else " failed",
            flush=True,
        )
        if done.returncode:
            failed = 1
            print(done.stdout, done.stderr, sep="\n")
    print(f"median {statistics.median(walls_s):.1f} s, longest {max(walls_s):.1f} s")
    return failed


def touched(commit: str) -> list[str]:
    """What a commit changed, by the names that these files have now."""
    changed = git("diff", "--name-only", f"{commit}^", commit)
    moves = git("diff", "--name-status", "-M", "-l0", "--diff-filter=R", commit)
    names = dict(line.split("\t")[1:] for line in moves)
    return [names.get(path, path) for path in changed]


_PLAY = "import sys; from scripts.quick import check; sys.exit(check(sys.argv[2:], sys.argv[1]))"


def cpu_s() -> float:
    """Processor time of all children that have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def git(*arguments: str) -> list[str]:
    """The lines that git prints."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


if __name__ == "__main__":
    main()
