"""Finds the rules by which values are refused that engines of a model ignore, lack or die of.

A request is judged twice (`gateway.edge.fields`): by the fields of its body at the edge, and by the
records that vLLM made of it, because two JSON parsers need not agree and vLLM fills one field from
several. A value that is not the client's, such as a penalty of the model's own
`generation_config.json`, is no reason to refuse a request (`ignored_defaults` tells an operator of
it). Pure.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import msgspec

from serving.domain.errors import MalformedRequestError
from serving.domain.models.request_fields.records import REQUEST
from serving.domain.models.request_fields.rules import Alias, EngineFacts, FieldRow, FieldOutcome
from serving.domain.models.request_fields.routes import UNREAD
from serving.domain.models.request_fields.sampling import SAMPLING

_NO_DEFAULTS: Mapping[str, object] = MappingProxyType({})
_UNKNOWN = "it is in no table of this version, so no engine is known to honour it"

# The fields that a body has under the same name. Pooling's are made by vLLM alone.
_IN_BODIES = (*SAMPLING, *REQUEST)
_UNREAD = frozenset[str]().union(*UNREAD.values())

# Every field of bodies that some engine refuses or some route does not read: what whoever reads a
# body has to keep of it.
BODY_FIELDS: tuple[str, ...] = tuple(
    name
    for field in _IN_BODIES
    if field.may_be_refused or field.name in _UNREAD
    for name in (field.name, *(alias.name for alias in field.aliases))
)


@dataclass(frozen=True, slots=True)
class IgnoredDefault:
    """A default of a model, or of its operator, that its engines do not honour."""

    field: str
    value: object
    reason: str


@dataclass(frozen=True, slots=True)
class ValueRule:
    """What a value of one field must be to pass, and what its client is told.

    `default` is the plain value that the field of a record has when nothing is asked.
    """

    name: str
    reason: str
    alias: Alias
    instead: str = ""
    default: object = None

    def passes(self, value: object) -> bool:
        """Returns whether `value` asks for nothing."""
        if value is None or _is_one_of(value, self.alias.neutral):
            return True
        key = self.alias.key
        return (
            key is not None
            and isinstance(value, Mapping)
            and _is_one_of(value.get(key), self.alias.passes)
        )

    def refuse(self, value: object) -> MalformedRequestError:
        """Returns the refusal of `value`."""
        passing = [_shown(each) for each in self.alias.neutral]
        passing += [f"{self.alias.key} {_shown(each)}" for each in self.alias.passes]
        allowed = f"{' or '.join(passing)}, or leave it out" if passing else "leave it out"
        advice = f"; {self.instead}" if self.instead else ""
        return MalformedRequestError(
            f"{self.name}: it is {kind_of(value)}; {self.reason}. Allowed: {allowed}{advice}.",
            param=self.name,
            code="unsupported_parameter",
        )


def body_rules(facts: EngineFacts) -> Mapping[str, ValueRule]:
    """Returns the rules of fields of bodies, by name, that engines with `facts` do not honour."""
    return {rule.name: rule for rule in _body_rules(facts)}


def unread_rules(path: str) -> Mapping[str, ValueRule]:
    """Returns the rules of sampling fields, by name, that the route `path` does not read."""
    unread = UNREAD.get(path, frozenset())
    return {
        field.name: ValueRule(
            field.name, f"{path} does not read it", Alias(field.name, neutral=field.neutral)
        )
        for field in SAMPLING
        if field.name in unread
    }


def record_rules(
    fields: Iterable[FieldRow],
    facts: EngineFacts,
    record: type[msgspec.Struct],
    defaults: Mapping[str, object] = _NO_DEFAULTS,
) -> tuple[ValueRule, ...]:
    """Returns the rules of vLLM's records of one type, for engines with `facts`.

    `defaults` are the values that vLLM puts into a request that says nothing. A field that the
    table does not know, as after an upgrade of vLLM, passes with its own default alone.
    """
    known = {field.name: field for field in fields}
    rules = []
    for info in msgspec.structs.fields(record):
        field, own = known.get(info.name), _default_of(info)
        default = own[0] if own else None
        if field is None:
            alias = Alias(info.name, neutral=own)
            rules.append(ValueRule(info.name, _UNKNOWN, alias, default=default))
            continue
        outcome = field.refusal(facts)
        if outcome is not None:
            more = (defaults[info.name],) if info.name in defaults else ()
            rules.append(replace(_rule(field, outcome, more), default=default))
    return tuple(rules)


def ignored_defaults(
    facts: EngineFacts, defaults: Mapping[str, object]
) -> Iterator[IgnoredDefault]:
    """Yields the defaults, by names of sampling fields, that engines with these facts ignore."""
    for field in SAMPLING:
        outcome = field.refusal(facts)
        value = defaults.get(field.name)
        if outcome is not None and not _rule(field, outcome).passes(value):
            yield IgnoredDefault(field.name, value, outcome.reason)


def _body_rules(facts: EngineFacts) -> Iterator[ValueRule]:
    for field in _IN_BODIES:
        outcome = field.refusal(facts)
        if outcome is None:
            continue
        yield _rule(field, outcome)
        for alias in field.aliases:
            yield ValueRule(alias.name, outcome.reason, alias, field.instead)


def _rule(field: FieldRow, outcome: FieldOutcome, more: tuple[object, ...] = ()) -> ValueRule:
    alias = Alias(field.name, neutral=(*field.neutral, *more))
    return ValueRule(field.name, outcome.reason, alias, field.instead)


def _default_of(info: msgspec.structs.FieldInfo) -> tuple[Any, ...]:
    """Returns the default of a record's field; nothing if there is none."""
    if info.default is not msgspec.NODEFAULT:
        return (info.default,)
    if info.default_factory is not msgspec.NODEFAULT:
        return (info.default_factory(),)
    return ()


def _is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    for each in allowed:  # noqa: SIM110 - a generator takes twice as long, for each field
        # `False` is no 0: as log-probabilities, 0 asks for those of the chosen token.
        if value == each and isinstance(value, bool) == isinstance(each, bool):
            return True
    return False


def _shown(value: object) -> str:
    return json.dumps(value, default=str)


def kind_of(value: object) -> str:
    """Returns what a value is, as clients read it."""
    kinds = (
        (bool, "a boolean"),
        (int | float, "a number"),
        (str, "a text"),
        (list | tuple, "a list"),
    )
    return next((words for kind, words in kinds if isinstance(value, kind)), "an object")
