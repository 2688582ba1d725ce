"""Compares two runs: what came out differently, and what was measured otherwise."""

import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from deployments.first_run.order import RULES
from deployments.first_run.results import StageResult, parse_result

_RESULT = "result.json"


class RunUnreadableError(Exception):
    """A folder or archive is not that of a run; the message says why."""


def read_run(place: Path) -> dict[str, StageResult]:
    """Returns the results of a run by stage, from its folder or its archive.

    Raises:
        RunUnreadableError: it is neither, or has no results.
    """
    try:
        texts = dict(_archived(place) if place.is_file() else _in_folder(place))
        found = {result.stage: result for result in map(_parsed, texts.values())}
    except (OSError, tarfile.TarError, ValueError) as error:
        raise RunUnreadableError(f"{place}: {error}") from error
    if not found:
        raise RunUnreadableError(f"{place}: no stage's {_RESULT} in it")
    return found


def compare_runs(
    before: Mapping[str, StageResult], after: Mapping[str, StageResult]
) -> list[tuple[str, str, str, str]]:
    """Returns rows of stage, what, before and after, for all that differs. Pure."""
    rows = []
    for rule in RULES:
        old, new = before.get(rule.stage), after.get(rule.stage)
        if old is None and new is None:
            continue
        was, is_now = ("not run" if each is None else each.outcome.value for each in (old, new))
        if was != is_now:
            rows.append((rule.stage.value, "outcome", was, is_now))
        measured = [
            {} if each is None else {item.what: item.measured for item in each.measurements}
            for each in (old, new)
        ]
        for what in dict.fromkeys([*measured[0], *measured[1]]):
            was, is_now = (one.get(what, "-") for one in measured)
            if was != is_now:
                rows.append((rule.stage.value, what, was, is_now))
    return rows


def _in_folder(folder: Path) -> Iterator[tuple[str, str]]:
    for rule in RULES:
        path = folder / rule.stage / _RESULT
        if path.exists():
            yield rule.stage, path.read_text(encoding="utf-8")


def _archived(path: Path) -> Iterator[tuple[str, str]]:
    with tarfile.open(path) as archive:
        for entry in archive:
            file = archive.extractfile(entry) if entry.name.endswith(f"/{_RESULT}") else None
            if file is not None:
                yield entry.name, file.read().decode()


def _parsed(text: str) -> StageResult:
    return parse_result(json.loads(text))
