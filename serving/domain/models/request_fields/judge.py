"""Refuses the values that engines of a model ignore, lack or die of, by the closed table.

A request is judged twice: by the fields of its body at the edge, and by the records that vLLM made
of it, because two JSON parsers need not agree and vLLM fills one field from several. A value that
is not the client's, such as a penalty of the model's own `generation_config.json`, is no reason to
refuse a request (`ignored_defaults` tells an operator of it). Pure.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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
class _Rule:
    """What a value of one field must be to pass, and what its client is told."""

    name: str
    reason: str
    alias: Alias
    instead: str = ""

    def passes(self, value: object) -> bool:
        if value is None or _is_one_of(value, self.alias.neutral):
            return True
        key = self.alias.key
        return (
            key is not None
            and isinstance(value, Mapping)
            and _is_one_of(value.get(key), self.alias.passes)
        )

    def refuse(self, value: object) -> MalformedRequestError:
        passing = [_shown(each) for each in self.alias.neutral]
        passing += [f"{self.alias.key} {_shown(each)}" for each in self.alias.passes]
        allowed = f"{' or '.join(passing)}, or leave it out" if passing else "leave it out"
        advice = f"; {self.instead}" if self.instead else ""
        return MalformedRequestError(
            f"{self.name}: it is {_kind_of(value)}; {self.reason}. Allowed: {allowed}{advice}.",
            param=self.name,
            code="unsupported_parameter",
        )


class BodyJudge:
    """Judges the fields of bodies for the engines of one model."""

    def __init__(self, facts: EngineFacts) -> None:
        refused = {rule.name: rule for rule in _body_rules(facts)}
        self._by_route = {
            path: {rule.name: rule for rule in _unread_rules(path)} | refused for path in UNREAD
        }
        self._elsewhere = refused

    def names(self, path: str) -> Iterable[str]:
        """Returns the fields to look at in a body for the route `path`."""
        return self._by_route.get(path, self._elsewhere)

    def check(self, path: str, name: str, value: object) -> None:
        """Refuses `value` of the field `name`, as JSON has it, unless it is neutral.

        Raises:
            MalformedRequestError: engines do not honour it, or the route does not read it. The
                client must change the request.
        """
        rule = self._by_route.get(path, self._elsewhere)[name]
        if not rule.passes(value):
            raise rule.refuse(value)

    def refuses(self, name: str) -> bool:
        """Returns whether engines honour no value of the field `name` but neutral ones."""
        return name in self._elsewhere

    def refuse(self, name: str, asked_by: str) -> MalformedRequestError:
        """Returns the refusal of another field, `asked_by`, that asks for `name` in its way."""
        return MalformedRequestError(
            f"{asked_by}: it asks for {name}; {self._elsewhere[name].reason}. "
            "Allowed: leave it out.",
            param=asked_by,
            code="unsupported_parameter",
        )


class RecordJudge:
    """Judges vLLM's records of one type for the engines of one model.

    `defaults` are the values that vLLM puts into a request that says nothing. A field that the
    table does not know, as after an upgrade of vLLM, passes with its own default alone.
    """

    def __init__(
        self,
        fields: Iterable[FieldRow],
        facts: EngineFacts,
        record: type[msgspec.Struct],
        defaults: Mapping[str, object] = _NO_DEFAULTS,
    ) -> None:
        known = {field.name: field for field in fields}
        self._rules: dict[str, _Rule] = {}
        for name, field in known.items():
            outcome = field.refusal(facts)
            if outcome is not None:
                default = (defaults[name],) if name in defaults else ()
                self._rules[name] = _rule(field, outcome, more=default)
        for info in msgspec.structs.fields(record):
            if info.name not in known:
                alias = Alias(info.name, neutral=_default_of(info))
                self._rules[info.name] = _Rule(info.name, _UNKNOWN, alias)
        self._named = tuple(self._rules.items())

    def check(self, record: object) -> None:
        """Refuses a record in which a field has a value that engines do not honour.

        Raises:
            MalformedRequestError: one has. The client must change the request.
        """
        for name, rule in self._named:
            value = getattr(record, name)
            if value is not None and not rule.passes(value):
                raise rule.refuse(value)


def ignored_defaults(
    facts: EngineFacts, defaults: Mapping[str, object]
) -> Iterator[IgnoredDefault]:
    """Yields the defaults, by names of sampling fields, that engines with these facts ignore."""
    for field in SAMPLING:
        outcome = field.refusal(facts)
        value = defaults.get(field.name)
        if outcome is not None and not _rule(field, outcome).passes(value):
            yield IgnoredDefault(field.name, value, outcome.reason)


def _body_rules(facts: EngineFacts) -> Iterator[_Rule]:
    for field in _IN_BODIES:
        outcome = field.refusal(facts)
        if outcome is None:
            continue
        yield _rule(field, outcome)
        for alias in field.aliases:
            yield _Rule(alias.name, outcome.reason, alias, field.instead)


def _unread_rules(path: str) -> Iterator[_Rule]:
    for field in SAMPLING:
        if field.name in UNREAD[path]:
            neutral = Alias(field.name, neutral=field.neutral)
            yield _Rule(field.name, f"{path} does not read it", neutral)


def _rule(field: FieldRow, outcome: FieldOutcome, more: tuple[object, ...] = ()) -> _Rule:
    alias = Alias(field.name, neutral=(*field.neutral, *more))
    return _Rule(field.name, outcome.reason, alias, field.instead)


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


def _kind_of(value: object) -> str:
    kinds = (
        (bool, "a boolean"),
        (int | float, "a number"),
        (str, "a text"),
        (list | tuple, "a list"),
    )
    return next((words for kind, words in kinds if isinstance(value, kind)), "an object")
