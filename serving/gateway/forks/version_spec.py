"""What the fork server of one version of a model has to know. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

# Makes its tasks; by name, because a gateway has no use for what it imports.
TASKS = "serving.gateway.forks.version_tasks:make_tasks"


class VersionSpec(msgspec.Struct, frozen=True):
    """One version of a model, as `frontend_config` and `build_frontend` take it.

    `max_model_len` is in tokens. Without `has_grammars` none are compiled;
    `keeps_grammars` is of `build_frontend`.
    """

    model: str
    names: Sequence[str]
    engine_args: Mapping[str, Any]
    frontend_args: Mapping[str, Any]
    adapters: Sequence[tuple[str, str]]
    supported_tasks: tuple[str, ...]
    max_model_len: int
    has_grammars: bool
    keeps_grammars: bool
