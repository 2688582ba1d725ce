"""Writes the configuration reference into a page, from the schema itself.

`python -m serving.config.reference --write docs/reference/configuration.md` replaces what stands
between the markers; `--check` fails when it differs. Owns the page's form, no fact on it. Part
`cluster` of a values file has its own, by the same code: `deployments.manifests.reference`.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from serving.config.application import AppConfig
from serving.config.schema import Schema, limit_text, resolve, type_text
from serving.config.vllm.vllm_rules import CLOSED_ARGS

START = "<!-- config-reference:start -->"
END = "<!-- config-reference:end -->"

_HEADER = ["| Field | Type | Default | Allowed | What it does |", "|---|---|---|---|---|"]
_UP_TO_DATE, _OUT_OF_DATE, _UNUSABLE = 0, 1, 2


class MarkersMissingError(Exception):
    """The page lacks the two markers, once each, in order. Put them where the reference belongs."""


def config_reference() -> str:
    """Returns the whole reference in markdown: one table per section, then closed arguments."""
    lines = schema_lines(AppConfig.model_json_schema(), "args")
    for section, complaints in CLOSED_ARGS.items():
        lines += [f"#### Not open in `models[].{section}`", ""]
        for complaint, reasons in complaints.items():
            by_reason: dict[str, list[str]] = {}
            for name, reason in reasons.items():
                by_reason.setdefault(reason, []).append(f"`{name}`")
            lines += [
                f"- {complaint}: {', '.join(names)} ({_cell(reason)})"
                for reason, names in by_reason.items()
            ]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def schema_lines(root: Schema, name: str) -> list[str]:
    """Returns a table for a model and one for each section in it.

    The outermost is called `name`.
    """
    lines = list(_section_lines("", root, root))
    return [f"#### `{name}`", *lines[1:]]


def with_reference(page: str, make: Callable[[], str] = config_reference) -> str:
    """Returns `page` with the present reference, which `make` returns, between its markers.

    Raises:
        MarkersMissingError: the page does not say where the reference belongs.
    """
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end) or START in rest or END in after:
        raise MarkersMissingError(f"expected one {START} and then one {END}")
    return f"{before}{START}\n\n{make()}\n{END}{after}"


def main(
    arguments: list[str] | None = None,
    make: Callable[[], str] = config_reference,
    module: str = "serving.config.reference",
) -> int:
    """Runs the command; returns 0 if PAGE is up to date, 1 if it is not, 2 if it is unusable."""
    parser = argparse.ArgumentParser(description="The configuration reference in a page.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", type=Path, metavar="PAGE", help="fail when PAGE is out of date")
    action.add_argument("--write", type=Path, metavar="PAGE", help="bring PAGE up to date")
    options = parser.parse_args(arguments)
    path: Path = options.check or options.write
    try:
        page = path.read_text(encoding="utf-8")
        wanted = with_reference(page, make)
    except (OSError, MarkersMissingError) as error:
        sys.stderr.write(f"{path}: {error}\n")
        return _UNUSABLE
    if options.write:
        path.write_text(wanted, encoding="utf-8")
    elif page != wanted:
        sys.stderr.write(
            f"{path}: the configuration reference is out of date; run "
            f"`python -m {module} --write {path}`\n"
        )
        return _OUT_OF_DATE
    return _UP_TO_DATE


def _section_lines(path: str, node: Schema, root: Schema) -> Iterator[str]:
    """Yields the table of one section, then those of the sections in it."""
    yield f"#### `{path}`"
    yield ""
    yield _cell(node["description"])
    yield ""
    yield from _HEADER
    sections: list[tuple[str, Schema]] = []
    for name, field in node["properties"].items():
        yield _row(name, field, name in node.get("required", []), root)
        below, suffix = _section_below(field, root)
        if below is not None:
            sections.append((f"{path}.{name}".lstrip(".") + suffix, below))
    yield ""
    for section_path, section in sections:
        yield from _section_lines(section_path, section, root)


def _row(name: str, field: Schema, is_required: bool, root: Schema) -> str:  # noqa: FBT001 a fact
    default = "required"
    if not is_required:
        section, suffix = _section_below(field, root)
        is_nested = section is not None and not suffix and field.get("default") is not None
        # What is made anew for each has none in the schema: an empty list.
        default = "its own" if is_nested else f"`{json.dumps(field.get('default', []))}`"
    cells = [f"`{name}`", type_text(field, root), default, limit_text(field, root)]
    return "| " + " | ".join(map(_cell, [*cells, field["description"]])) + " |"


def _section_below(field: Schema, root: Schema) -> tuple[Schema | None, str]:
    """Returns the section that a field holds, if any, and what its path has besides.

    That is `[]` where it holds a list of them, and `.NAME` where they have names.
    """
    for option in field.get("anyOf", [field]):
        node = resolve(option, root)
        section, suffix = node, ""
        if node.get("type") == "array":
            section, suffix = resolve(node["items"], root), "[]"
        elif isinstance(node.get("additionalProperties"), dict):
            section, suffix = resolve(node["additionalProperties"], root), ".NAME"
        if "properties" in section:
            return section, suffix
    return None, ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
