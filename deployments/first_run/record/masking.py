"""Takes secrets out of text that leaves the machine. Pure.

Two ways, because neither knows all: values that the environment and the configuration hold under
names of secrets, wherever they turn up; and what looks like a key of Hugging Face, Google, AWS or
OpenAI, or like the value of a header or setting that is called one.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "***"
# Shorter values are words such as `true` and `none`, and would blot out half of a log.
MIN_SECRET_LENGTH = 6
_SECRET_NAME = re.compile(
    r"(?i)(token|secret|password|passwd|credential|private|api[_-]?keys?|access[_-]?keys?|_key)$"
    r"|(?i:^keys?$)|(?i:auth(orization)?$)"
)
# Names that end like a secret's and have a place or a mode as their value.
_NO_SECRET = re.compile(r"(?i)(_path|_file|_mode|_env|_dir|_name)$")
_LOOKS = re.compile(
    r"hf_[A-Za-z0-9]{16,}"
    r"|sk-[A-Za-z0-9_-]{16,}"
    r"|AIza[A-Za-z0-9_-]{20,}"
    r"|ya29\.[A-Za-z0-9_-]{16,}"
    r"|AKIA[A-Z0-9]{12,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----",
    re.DOTALL,
)
_SET = re.compile(
    r"(?i)\b(authorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic)\s+|bearer\s+"
    r"|[\w-]*(?:token|secret|password|api[_-]?key)[\"']?\s*[:=]\s*[\"']?)"
    r"(?!null\b|none\b|true\b|false\b)([A-Za-z0-9+/_.~=-]{12,})"
)


def is_secret_name(name: str) -> bool:
    """Returns whether a variable or field of this name holds a secret."""
    return bool(_SECRET_NAME.search(name)) and not _NO_SECRET.search(name)


def secrets_of(environment: Mapping[str, str], settings: object = None) -> tuple[str, ...]:
    """Returns the values that must not leave, longest first.

    `settings` is a parsed configuration, whose fields are looked at by their names too.
    """
    found = {value for name, value in environment.items() if is_secret_name(name)}
    found |= set(_of_settings(settings))
    return tuple(sorted((each for each in found if _can_hide(each)), key=len, reverse=True))


def mask(text: str, secrets: Iterable[str]) -> str:
    """Returns the text without the secrets, and without what looks like one."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    text = _LOOKS.sub(MASK, text)
    return _SET.sub(lambda match: match[1] + MASK, text)


def mask_environment(environment: Mapping[str, str], secrets: Iterable[str]) -> dict[str, str]:
    """Returns the variables, the values of secrets masked whatever their length."""
    known = tuple(secrets)
    return {
        name: MASK if is_secret_name(name) and value else mask(value, known)
        for name, value in sorted(environment.items())
    }


def _can_hide(value: str) -> bool:
    return len(value) >= MIN_SECRET_LENGTH


def _of_settings(settings: object) -> Iterable[str]:
    if isinstance(settings, Mapping):
        known: Mapping[Any, Any] = settings
        for name, value in known.items():
            if isinstance(value, str) and is_secret_name(str(name)):
                yield value
            else:
                yield from _of_settings(value)
    elif isinstance(settings, list):
        for each in settings:
            yield from _of_settings(each)
