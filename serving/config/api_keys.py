"""API keys in a file or a variable: plain ones, and records that say what each may do.

A plain entry is `[tenant] key`, divided by commas or line ends, and may do everything. A text that
begins with `keys:` (or `{`) is YAML with a record for each key, and may do what its record says.

Owns the form of both. Does not own who is let in (`serving.gateway.edge.auth`). Pure.
"""

import hashlib
import re
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

import yaml
from pydantic import AwareDatetime, BaseModel, BeforeValidator, Field, ValidationError

from serving.config.application import OpenField
from serving.config.schema import path_text, problems_of, shown
from serving.config.sections import STRICT_SECTION, Items, NonEmpty, load_yaml
from serving.domain.errors import Problem
from serving.domain.models.request_fields.service_class import ServiceTier
from serving.domain.usage.quotas import Period, Quota, QuotaKind

# It is a label's value in metrics, and a column's in tables.
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_NAME_FORM = "letters, digits and `._-`, up to 63 characters"
_Name = Annotated[str, Field(pattern=f"^{_NAME}$", json_schema_extra={"allowed": _NAME_FORM})]
# The fields of a record whose values may be shown. In any other there may be a key by mistake.
_SHOWN = frozenset(
    {"scopes", "models", "routes", "open_fields", "expires_at", "weight", "service_tiers", "quotas"}
)


class ModelRoute(StrEnum):
    """The routes that models answer, all of them by POST."""

    CHAT_COMPLETIONS = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    COUNT_TOKENS = "/v1/messages/count_tokens"
    EMBEDDINGS = "/v1/embeddings"
    V1_SCORE = "/v1/score"
    V1_RERANK = "/v1/rerank"
    V2_RERANK = "/v2/rerank"
    SCORE = "/score"
    RERANK = "/rerank"
    CLASSIFY = "/classify"
    POOLING = "/pooling"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"


class KeyScope(StrEnum):
    """What a key is for."""

    INFERENCE = "inference"  # the routes that models answer, and `/v1/models`
    METRICS = "metrics"  # `/metrics`
    FLEET = "fleet"  # `/fleet` and what is below it


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One API key, and what it may do. A plain key may do everything, for ever.

    `digest` is the key's SHA-256. `key` is the key itself, `None` where only its digest is known;
    it stays out of `repr`. `name` tells it from others, `tenant` is on whose account it asks;
    `None` where none is given. It may use `models` (and adapters) and `routes`; `None` means all.
    In a request it may set `open_fields`, beside those that everybody may. It ends at
    `expires_at_s`, in Unix seconds; `None` means never. Its requests may ask for `service_tiers`.
    While requests wait for engines, tenants share these in proportion to their keys' `weight`.
    `quotas` are its tenant's, with all of its keys together.
    """

    digest: bytes = field(repr=False)
    key: str | None = field(default=None, repr=False)
    name: str | None = None
    tenant: str | None = None
    scopes: frozenset[KeyScope] = frozenset(KeyScope)
    models: frozenset[str] | None = None
    routes: frozenset[ModelRoute] | None = None
    open_fields: frozenset[OpenField] = frozenset()
    expires_at_s: float | None = None
    weight: float = 1.0
    service_tiers: frozenset[ServiceTier] = frozenset(ServiceTier)
    quotas: tuple[Quota, ...] = ()


def read_keys(text: str) -> list[KeyRecord]:
    """Reads the keys of a file or a variable, plain or as records; `#` starts a comment line.

    A plain key stands alone, or behind its tenant's name and a space. No key has a space in it.

    Raises:
        ValueError: an entry is of another form. The message names what, and shows no key.
    """
    lines = [line.strip() for line in text.splitlines()]
    entries = [line for line in lines if line and not line.startswith("#")]
    if entries and (entries[0].startswith("{") or re.match(r"keys:(\s|$)", entries[0])):
        return _read_records(text)
    parts = (part.split() for line in entries for part in line.split(","))
    return [_plain_key(words) for words in parts if words]


def _plain_key(words: list[str]) -> KeyRecord:
    if len(words) > 2:
        raise ValueError(f"an API key is one word, or two with its tenant's name; not {len(words)}")
    *tenants, key = words
    if tenants and re.fullmatch(_NAME, tenants[0]) is None:
        # The message does not show it: it may be a key with the name behind it.
        raise ValueError(f"the name in front of an API key is none; allowed: {_NAME_FORM}")
    return KeyRecord(_digest(key), key, tenant=tenants[0] if tenants else None)


def _digest(key: str) -> bytes:
    # A fast hash on purpose: keys are long random strings, not passwords, and each request pays for
    # it.
    return hashlib.sha256(key.encode()).digest()


# -- records --


def _text_or_time(value: object) -> object:
    # YAML makes a time of what looks like one. A bare number would pass as seconds since 1970.
    if isinstance(value, str | datetime):
        return value
    raise ValueError("no time")


class _Section(BaseModel):
    model_config = STRICT_SECTION


class QuotaEntry(_Section):
    """One bound on what a tenant uses. Exactly one of the amounts is given."""

    requests: Annotated[int, Field(ge=1)] | None = None
    """Requests that are let in. One that is refused for want of room does not count."""
    tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of prompts, cached ones included, and of outputs."""
    chip_seconds: Annotated[float, Field(gt=0)] | None = None
    """Seconds of chips, as the slice ledger counts them for the tenant."""
    usd: Annotated[float, Field(gt=0)] | None = None
    """US dollars: those chip-seconds at the `usd_per_chip_hour` of their compute classes."""
    concurrent: Annotated[int, Field(ge=1)] | None = None
    """Requests in flight."""
    per: Annotated[Period, Field(strict=False)] | None = None
    """The span in which it counts, whenever it begins; left out with `concurrent`."""
    models: Annotated[tuple[NonEmpty, ...], Items, Field(min_length=1)] | None = None
    """The models that it is for, together. Left out: all."""

    @property
    def amounts(self) -> dict[QuotaKind, float]:
        """The amounts that are given, by what they count."""
        found = {kind: getattr(self, kind) for kind in QuotaKind}
        return {kind: amount for kind, amount in found.items() if amount is not None}

    def quota(self) -> Quota:
        """Returns the bound; the entry follows the rules."""
        ((kind, limit),) = self.amounts.items()
        models = None if self.models is None else frozenset(self.models)
        return Quota(kind, limit, self.per, models)


class KeyEntry(_Section):
    """One record of a file with API keys."""

    name: _Name
    """What the key is called in refusals and logs; unique in the file."""
    key: (
        Annotated[str, Field(pattern=r"^\S+$", json_schema_extra={"allowed": "no spaces"})] | None
    ) = None
    """The key. Either it or its digest is given."""
    sha256: (
        Annotated[
            str,
            Field(pattern=r"^[0-9a-f]{64}$", json_schema_extra={"allowed": "64 digits 0-9 a-f"}),
        ]
        | None
    ) = None
    """The key's SHA-256, so that the file does not hold the key."""
    tenant: _Name | None = None
    """On whose account it asks. Several keys may name one."""
    scopes: Annotated[
        tuple[Annotated[KeyScope, Field(strict=False)], ...], Items, Field(min_length=1)
    ] = (KeyScope.INFERENCE,)
    """What it is for."""
    models: Annotated[tuple[NonEmpty, ...], Items, Field(min_length=1)] | None = None
    """The models and adapters that it may use, by name. Left out: all."""
    routes: (
        Annotated[
            tuple[Annotated[ModelRoute, Field(strict=False)], ...], Items, Field(min_length=1)
        ]
        | None
    ) = None
    """The models' routes that it may use. Left out: all."""
    open_fields: Annotated[tuple[Annotated[OpenField, Field(strict=False)], ...], Items] = ()
    """Fields that steer engines and that its requests may set, beside `gateway.open_fields`."""
    expires_at: (
        Annotated[
            AwareDatetime,
            BeforeValidator(_text_or_time),
            Field(
                strict=False,
                json_schema_extra={"allowed": "a time with its zone such as 2027-01-31T00:00:00Z"},
            ),
        ]
        | None
    ) = None
    """When it ends. Left out: never."""
    weight: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Its tenant's share of engines while requests wait, in proportion to others'. One tenant's
    keys have one weight."""
    service_tiers: Annotated[
        tuple[Annotated[ServiceTier, Field(strict=False)], ...], Items, Field(min_length=1)
    ] = (ServiceTier.DEFAULT, ServiceTier.FLEX)
    """What its requests may ask for in `service_tier`. One that asks for nothing is of `default`,
    or of what there is in its place."""
    quotas: Annotated[tuple[QuotaEntry, ...], Items] = ()
    """What its tenant may use, with all of its keys together: all of them have the same."""


class KeyFile(_Section):
    """A file with records of API keys."""

    keys: Annotated[tuple[KeyEntry, ...], Items]
    """The keys."""


def _read_records(text: str) -> list[KeyRecord]:
    try:
        parsed = load_yaml(text)
    except yaml.MarkedYAMLError as error:
        # Not the error itself, which shows the line.
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ValueError(f"not readable as YAML{line}") from None
    except yaml.YAMLError:
        raise ValueError("not readable as YAML") from None
    try:
        entries = KeyFile.model_validate(parsed).keys
    except ValidationError as error:
        problems = [_without_keys(problem) for problem in problems_of(error, _schema())]
        raise ValueError("; ".join(map(str, problems))) from None
    problems = _rule_problems(entries)
    if problems:
        raise ValueError("; ".join(map(str, problems)))
    return [_record_of(entry) for entry in entries]


def _schema() -> dict[str, Any]:
    return KeyFile.model_json_schema()


def _without_keys(problem: Problem) -> Problem:
    """Returns the problem without its value, unless it is of a field in which no key can be."""
    fields = re.findall(r"\.(\w+)", problem.path)
    if fields and fields[0] in _SHOWN:
        return problem
    return Problem(problem.path, problem.complaint, problem.allowed)


def _rule_problems(entries: tuple[KeyEntry, ...]) -> list[Problem]:
    """Returns what is wrong between the fields of a record, and between records."""
    problems = []
    names: dict[str, str] = {}
    digests: dict[bytes, str] = {}
    weights: dict[str | None, tuple[str, float]] = {}  # of each tenant, as first given
    tenants: dict[str | None, tuple[str, tuple[QuotaEntry, ...]]] = {}  # quotas likewise
    for index, entry in enumerate(entries):
        path = path_text(("keys", index))
        if (entry.key is None) == (entry.sha256 is None):
            complaint = "missing" if entry.key is None else "sha256 is given as well"
            problems.append(Problem(f"{path}.key", complaint, "allowed: either key or sha256"))
            continue
        limited = [name for name in ("models", "routes", "open_fields") if getattr(entry, name)]
        if KeyScope.INFERENCE not in entry.scopes:
            complaint = "without effect, because the key is not for inference"
            allowed = "allowed: only with the scope inference"
            problems += [Problem(f"{path}.{name}", complaint, allowed) for name in limited]
        first = names.setdefault(entry.name, path)
        if first != path:
            complaint = f"already the name of {first}"
            value = shown("", entry.name)
            problems.append(Problem(f"{path}.name", complaint, "allowed: one record each", value))
        first = digests.setdefault(_digest_of(entry), path)
        if first != path:
            allowed = "allowed: each key once"
            problems.append(Problem(f"{path}.key", f"already the key of {first}", allowed))
        problems += _quota_problems(entry, path)
        if KeyScope.INFERENCE not in entry.scopes:
            continue
        first, quotas = tenants.setdefault(entry.tenant, (path, entry.quotas))
        if set(quotas) != set(entry.quotas):
            complaint = f"other ones than those of {first}, of the same tenant"
            problems.append(Problem(f"{path}.quotas", complaint, "allowed: the same"))
        weight_path, weight = weights.setdefault(entry.tenant, (path, entry.weight))
        if weight != entry.weight:
            complaint = f"another one than that of {weight_path}, of the same tenant"
            value = shown("", entry.weight)
            problems.append(Problem(f"{path}.weight", complaint, f"allowed: {weight:g}", value))
    return problems


def _quota_problems(entry: KeyEntry, path: str) -> list[Problem]:
    """Returns what is wrong with the quotas of one record."""
    problems = []
    if entry.quotas and (entry.tenant is None or KeyScope.INFERENCE not in entry.scopes):
        allowed = "allowed: only with a tenant, and with the scope inference"
        problems.append(Problem(f"{path}.quotas", "without effect", allowed))
    seen: dict[str, str] = {}
    for index, quota in enumerate(entry.quotas):
        at = f"{path}.quotas[{index}]"
        if len(quota.amounts) != 1:
            complaint = "no amount" if not quota.amounts else "several amounts"
            allowed = f"allowed: exactly one of {', '.join(QuotaKind)}"
            problems.append(Problem(at, complaint, allowed))
            continue
        is_concurrent = QuotaKind.CONCURRENT in quota.amounts
        if is_concurrent == (quota.per is not None):
            complaint = "without effect with concurrent" if is_concurrent else "missing"
            allowed = "allowed: left out" if is_concurrent else f"allowed: {', '.join(Period)}"
            problems.append(Problem(f"{at}.per", complaint, allowed))
            continue
        first = seen.setdefault(quota.quota().key, at)
        if first != at:
            allowed = "allowed: one amount for the same span and models"
            problems.append(Problem(at, f"bounds what {first} bounds", allowed))
    return problems


def _digest_of(entry: KeyEntry) -> bytes:
    assert entry.key is not None or entry.sha256 is not None
    return bytes.fromhex(entry.sha256 or "") if entry.key is None else _digest(entry.key)


def _record_of(entry: KeyEntry) -> KeyRecord:
    return KeyRecord(
        _digest_of(entry),
        entry.key,
        name=entry.name,
        tenant=entry.tenant,
        scopes=frozenset(entry.scopes),
        models=None if entry.models is None else frozenset(entry.models),
        routes=None if entry.routes is None else frozenset(entry.routes),
        open_fields=frozenset(entry.open_fields),
        expires_at_s=None if entry.expires_at is None else entry.expires_at.timestamp(),
        weight=entry.weight,
        service_tiers=frozenset(entry.service_tiers),
        quotas=tuple(quota.quota() for quota in entry.quotas),
    )
