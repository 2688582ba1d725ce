"""Reads request traces as rows: when a request came, its length, what it shares with others.

Owns the file formats and every check of their rows. Does not own how a trace is played (`schedule`)
nor ServeGen's laws, which are no requests (`servegen`). Reads files; the rest is pure. Imports no
more than numpy, so that a simulator may read the same traces.
"""

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from loadtest.planned_request import PromptBlock

# Tokens of a hash id's block. Source: Mooncake's FAST25 release, read 2026-11-21.
MOONCAKE_BLOCK_TOKENS = 512
# The step of the released arrivals, of which 99 % lie within 3 ms of a multiple (measured
# 2026-11-21).
MOONCAKE_GRID_S = 3.0
_GRID_JITTER_MS = 10

_AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# In seconds after this instant a double keeps steps of 100 ns, in seconds after 1970 it does not.
_NEAR = datetime(2023, 1, 1, tzinfo=UTC)
_NUM_SERVEGEN_COLUMNS = 6


class TraceError(ValueError):
    """Reports an unusable trace. The message names file, line, field, value and what is allowed."""


class TraceFormat(StrEnum):
    """The format of a file of traffic."""

    AZURE = "azure"  # CSV of Azure's LLM inference traces, 2023
    MOONCAKE = "mooncake"  # JSON lines with hash ids of shared blocks
    JSONL = "jsonl"  # JSON lines of our own, or of anyone's who has a prompt or two lengths
    SERVEGEN = "servegen"  # laws of clients, no requests


@dataclass(frozen=True, slots=True)
class TraceRow:
    """The row of one request of a trace.

    `offset_s` is seconds after the first row's instant, `None` where the file has no times.
    `input_tokens` and `output_tokens` are `None` where the file does not count them. `blocks` are
    empty where nothing is known of sharing; otherwise they make up `input_tokens`. `session` ties
    rows that follow each other in one conversation; their `input_tokens` are then those that the
    turn adds. `think_time_s` is the wait before a later turn, `None` if not given. `text` is the
    verbatim prompt.
    """

    offset_s: float | None
    input_tokens: int | None
    output_tokens: int | None
    blocks: tuple[PromptBlock, ...] = ()
    session: str | None = None
    think_time_s: float | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """The rows in the order of their arrival; `path` is for messages.

    `grid_s` is the step that arrivals were rounded down to, `None` if they were not.
    """

    path: Path
    format: TraceFormat
    rows: tuple[TraceRow, ...]
    grid_s: float | None = None

    @property
    def offsets_s(self) -> npt.NDArray[np.float64]:
        """The arrivals in ascending order: f64[row].

        Raises:
            TraceError: the trace has no times.
        """
        found = [row.offset_s for row in self.rows if row.offset_s is not None]
        if len(found) < len(self.rows):
            raise TraceError(f"{self.path}: it says no times (offset_s or timestamp)")
        return np.array(found, dtype=np.float64)

    def spread(self, rng: np.random.Generator) -> "Trace":
        """The trace with arrivals off their grid: uniform over each step, in the same order.

        Played as it stands, a rounded trace would be bursts that were never sent.
        """
        if self.grid_s is None:
            return self
        offsets_s = self.offsets_s
        instants, firsts, counts = np.unique(offsets_s, return_index=True, return_counts=True)
        # Released instants lie a few ms off the grid; no row may overtake the next step's.
        widths = np.minimum(np.diff(instants, append=np.inf), self.grid_s)
        spread_s = offsets_s + np.repeat(widths, counts) * rng.random(len(offsets_s))
        for first, count in zip(firsts, counts, strict=True):
            spread_s[first : first + count].sort()
        rows = tuple(
            replace(row, offset_s=float(at_s))
            for row, at_s in zip(self.rows, spread_s, strict=True)
        )
        return replace(self, rows=rows, grid_s=None)


def detect_format(path: Path) -> TraceFormat:
    """The format of a file, found by its first line; a folder is ServeGen's.

    Raises:
        TraceError: it cannot be read, or is in none of the formats.
    """
    if path.is_dir():
        return TraceFormat.SERVEGEN
    first = next(_lines(path), (0, ""))[1].lstrip("\ufeff").strip()
    if tuple(first.split(",")) == _AZURE_HEADER:
        return TraceFormat.AZURE
    if first.startswith("{"):
        keys = _json_object(path, 1, first).keys()
        is_mooncake = {"timestamp", "input_length", "output_length"} <= keys
        return TraceFormat.MOONCAKE if is_mooncake else TraceFormat.JSONL
    if len(first.split(",")) == _NUM_SERVEGEN_COLUMNS:
        return TraceFormat.SERVEGEN
    header = ",".join(_AZURE_HEADER)
    raise TraceError(
        f"{path}, line 1: {first[:60]!r} begins no known trace; allowed: the header {header}, "
        "a JSON object, or six columns of a ServeGen client"
    )


def read_trace(path: Path) -> Trace:
    """The requests of a file, in whichever format it is.

    Raises:
        TraceError: it cannot be read, a row is wrong, or it holds laws and no requests.
    """
    found = detect_format(path)
    match found:
        case TraceFormat.AZURE:
            rows, grid_s = _azure_rows(path), None
        case TraceFormat.MOONCAKE:
            rows, grid_s = _mooncake_rows(path)
        case TraceFormat.JSONL:
            rows, grid_s = _jsonl_rows(path), None
        case TraceFormat.SERVEGEN:
            raise TraceError(f"{path}: laws of ServeGen's clients, which are no requests")
    if not rows:
        raise TraceError(f"{path}: no requests in it; allowed: at least one")
    return Trace(path, found, _from_zero(path, rows), grid_s)


def _azure_rows(path: Path) -> list[TraceRow]:
    rows = []
    for number, line in _lines(path):
        if number == 1:
            continue
        fields = dict(zip(_AZURE_HEADER, next(csv.reader([line])), strict=False))
        source = _TraceLine(path, number, fields)
        at_s = source.instant_s("TIMESTAMP")
        rows.append(TraceRow(at_s, source.count("ContextTokens"), source.count("GeneratedTokens")))
    return rows


def _mooncake_rows(path: Path) -> tuple[list[TraceRow], float | None]:
    rows = []
    instants_ms: list[float] = []
    for number, line in _lines(path):
        source = _TraceLine(path, number, _json_object(path, number, line))
        at_ms = source.number("timestamp")
        num_tokens = source.count("input_length")
        instants_ms.append(at_ms)
        blocks = _hashed_blocks(source, num_tokens)
        rows.append(
            TraceRow(at_ms / 1000, num_tokens, source.count("output_length"), blocks=blocks)
        )
    return rows, _grid_s(instants_ms)


def _hashed_blocks(source: "_TraceLine", num_tokens: int) -> tuple[PromptBlock, ...]:
    """Returns one block for each hash id, the last with what remains; none without ids."""
    ids = source.fields.get("hash_ids")
    if ids is None:
        return ()
    needed = -(-num_tokens // MOONCAKE_BLOCK_TOKENS)
    if not isinstance(ids, list) or not all(type(hash_id) is int for hash_id in ids):
        source.refuse("hash_ids", "a list of whole numbers")
    if len(ids) != needed:
        source.refuse(
            "hash_ids",
            f"{needed} ids, one for each {MOONCAKE_BLOCK_TOKENS} of {num_tokens} tokens",
        )
    lengths = [MOONCAKE_BLOCK_TOKENS] * (needed - 1)
    lengths.append(num_tokens - MOONCAKE_BLOCK_TOKENS * (needed - 1))
    return tuple(PromptBlock(f"h{hash_id}", n) for hash_id, n in zip(ids, lengths, strict=True))


def _grid_s(instants_ms: list[float]) -> float | None:
    step_ms = MOONCAKE_GRID_S * 1000
    off_ms = [min(at % step_ms, -at % step_ms) for at in instants_ms]
    near = sum(offset_ms <= _GRID_JITTER_MS for offset_ms in off_ms)
    # By chance that holds for 1 of 150 rows.
    return MOONCAKE_GRID_S if near > 0.9 * len(instants_ms) else None


def _jsonl_rows(path: Path) -> list[TraceRow]:
    """Reads lines with `prompt`, `messages` or `input_tokens`; ignores unknown keys."""
    rows = []
    for number, line in _lines(path):
        source = _TraceLine(path, number, _json_object(path, number, line))
        has = source.fields.keys()
        text = _text(source)
        input_tokens = source.count("input_tokens") if "input_tokens" in has else None
        if text is None and input_tokens is None:
            raise TraceError(
                f"{path}, line {number}: nothing to send; allowed: prompt, messages or input_tokens"
            )
        time_key = next((key for key in ("offset_s", "timestamp") if key in has), None)
        session = source.fields.get("session")
        if session is not None and not isinstance(session, str | int):
            source.refuse("session", "a name")
        rows.append(
            TraceRow(
                offset_s=source.number(time_key) if time_key else None,
                input_tokens=input_tokens,
                output_tokens=source.count("output_tokens") if "output_tokens" in has else None,
                session=None if session is None else str(session),
                think_time_s=source.number("think_time_s") if "think_time_s" in has else None,
                text=text,
            )
        )
    return rows


def _text(source: "_TraceLine") -> str | None:
    """The prompt, or the text of the last message; `None` if the row has neither."""
    if "prompt" in source.fields:
        prompt = source.fields["prompt"]
        if not isinstance(prompt, str) or not prompt:
            source.refuse("prompt", "a text that is not empty")
        return str(prompt)
    if "messages" not in source.fields:
        return None
    match source.fields["messages"]:
        case [*_, {"content": str(content)}] if content:
            return content
        case [*_, {"content": [*parts]}] if texts := [
            part["text"]
            for part in parts
            if isinstance(part, dict) and isinstance(part.get("text"), str)
        ]:
            return "\n".join(texts)
    source.refuse("messages", "a list whose last message has a text in `content`")


def _from_zero(path: Path, rows: list[TraceRow]) -> tuple[TraceRow, ...]:
    """Returns rows by time, counted from the first; in file order where there are no times."""
    times = [row.offset_s for row in rows if row.offset_s is not None]
    if not times:
        return tuple(rows)
    if len(times) < len(rows):
        raise TraceError(f"{path}: some rows have a time and some have none; allowed: all or none")
    first_s = min(times)
    order = sorted(range(len(rows)), key=times.__getitem__)
    return tuple(replace(rows[index], offset_s=times[index] - first_s) for index in order)


@dataclass(frozen=True, slots=True)
class _TraceLine:
    """The fields of one line and its place."""

    path: Path
    line: int
    fields: dict[str, Any]  # whatever the file holds

    def count(self, key: str) -> int:
        """Returns a whole number of tokens, at least 1."""
        value = self.fields.get(key)
        if isinstance(value, str) and value.isascii() and value.isdigit():
            value = int(value)
        if type(value) is not int or value < 1:
            self.refuse(key, "a whole number, at least 1")
        return int(value)

    def number(self, key: str) -> float:
        """Returns a finite number, at least 0."""
        value = self.fields.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, "a number, at least 0")
        if not math.isfinite(value) or value < 0:
            self.refuse(key, "a number, at least 0")
        return float(value)

    def instant_s(self, key: str) -> float:
        """Returns a time without a zone, in seconds after `_NEAR`."""
        value = self.fields.get(key)
        try:
            # Python takes six decimals; the seventh is in steps of 100 ns.
            whole, _, decimals = str(value).partition(".")
            at = datetime.strptime(whole, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
            return (at - _NEAR).total_seconds() + float(f"0.{decimals or 0}")
        except ValueError:
            self.refuse(key, "a time such as 2023-11-16 18:15:46.6805900")

    def refuse(self, key: str, allowed: str) -> NoReturn:
        """Raises the error that names which field of which line is wrong."""
        value = repr(self.fields[key])[:60] if key in self.fields else "missing"
        raise TraceError(f"{self.path}, line {self.line}: {key} is {value}; allowed: {allowed}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, each with its number, which counts from 1."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, line in enumerate(file, 1):
                if stripped := line.strip():
                    yield number, stripped
    except OSError as error:
        raise TraceError(f"{path}: it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: it is no text in UTF-8: {error.reason}") from error


def _json_object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}, line {number}: not JSON: {error.msg}") from error
    if not isinstance(value, dict):
        raise TraceError(f"{path}, line {number}: {line[:60]!r}; allowed: a JSON object")
    return value
