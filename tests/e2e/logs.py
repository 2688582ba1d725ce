"""What an application has written to its logs."""

from collections.abc import Collection

from .application import RunningApplication


def logs_with(application: RunningApplication, words: Collection[str]) -> dict[str, str]:
    """Returns the log files that have one of `words`, each with the first line that does."""
    found = {}
    files = [application.log_path, *application.folder.rglob("logs/**/*")]
    read = [path for path in files if path.is_file()]
    assert len(read) > 1, "Ray has written no logs"
    for path in read:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if any(each in line for each in words):
                found[path.name] = line
                break
    return found
