"""What a PromQL expression reads: metrics, label matchers and labels of groupings.

A lexer and no parser: Prometheus itself judges the grammar (`test_alert_rules`,
`test_queries_live`). Here the names have to be found, fast and without a process.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""
    (?P<space>\s+|\#[^\n]*)
  | (?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|`[^`]*`)
  | (?P<number>0x[0-9a-fA-F]+|(?:\d+(?:ms|[smhdwy]))+|\d*\.?\d+(?:[eE][+-]?\d+)?)
  | (?P<name>[a-zA-Z_][a-zA-Z0-9_:]*)
  | (?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^=<>(){}\[\],:@])
    """,
    re.VERBOSE,
)
_AGGREGATORS = frozenset(
    {"sum", "min", "max", "avg", "group", "stddev", "stdvar", "count", "count_values"}
    | {"bottomk", "topk", "quantile"}
)
_GROUPINGS = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
_WORDS = frozenset({"and", "or", "unless", "offset", "bool", "inf", "nan"})


class PromqlError(ValueError):
    """A text that is no PromQL."""


@dataclass(frozen=True, slots=True)
class Matcher:
    """`label` compared with `text`."""

    label: str
    sign: str
    text: str

    @property
    def values(self) -> list[str]:
        """The values that a matcher names; a pattern of alternatives names each."""
        return self.text.split("|") if "~" in self.sign else [self.text]


@dataclass(frozen=True, slots=True)
class Selector:
    """One metric that is read."""

    metric: str
    matchers: tuple[Matcher, ...] = ()


@dataclass(slots=True)
class Reads:
    """All that an expression names."""

    selectors: list[Selector] = field(default_factory=list)
    grouped_by: set[str] = field(default_factory=set)


def reads(expression: str) -> Reads:
    """What the expression names."""
    tokens = list(_tokens(expression))
    found, at = Reads(), 0
    while at < len(tokens):
        kind, text = tokens[at]
        following = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        if kind == "name" and text.lower() in _GROUPINGS:
            if following != "(":
                at += 1
                continue
            end = tokens.index(("sign", ")"), at)
            found.grouped_by |= {word for form, word in tokens[at:end][1:] if form == "name"}
            at = end
        elif kind == "name" and _is_metric(text, following):
            matchers, at = _matchers(tokens, at + 1)
            found.selectors.append(Selector(text, matchers))
            continue
        elif text == "{":
            raise PromqlError(f"a selector without a metric in {expression!r}")
        at += 1
    return found


def _is_metric(text: str, following: str) -> bool:
    lower = text.lower()
    if lower in _WORDS:
        return False
    if lower in _AGGREGATORS and (following == "(" or following.lower() in _GROUPINGS):
        return False
    return following != "("


def _matchers(tokens: list[tuple[str, str]], at: int) -> tuple[tuple[Matcher, ...], int]:
    """The matchers that begin at `at`, if any do, and where to go on."""
    if at >= len(tokens) or tokens[at][1] != "{":
        return (), at
    end = tokens.index(("sign", "}"), at)
    inside = [text for _, text in tokens[at + 1 : end] if text != ","]
    if len(inside) % 3:
        raise PromqlError(f"not a list of matchers: {inside}")
    triples = zip(inside[::3], inside[1::3], inside[2::3], strict=True)
    return tuple(Matcher(label, sign, text[1:-1]) for label, sign, text in triples), end + 1


def _tokens(expression: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        if match is None:
            raise PromqlError(f"cannot read {expression[at : at + 20]!r} in {expression!r}")
        kind = str(match.lastgroup)
        if kind != "space":
            yield kind, match.group()
        at = match.end()
