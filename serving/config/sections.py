"""What the sections of `serve_config.yaml` share: their strictness, and kinds of values. Pure."""

from typing import Annotated

from pydantic import ConfigDict, Field

ENV_NAME_WORDS = "letters, digits and `_`, not starting with a digit"
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
OptionalEnvName = Annotated[EnvName | None, Field(json_schema_extra={"allowed": ENV_NAME_WORDS})]
NonEmpty = Annotated[str, Field(min_length=1, json_schema_extra={"allowed": "not empty"})]
# Lists become tuples, which is why these alone are not strict; their items are.
Items = Field(strict=False)
# The pydantic settings of every section.
STRICT_SECTION = ConfigDict(
    frozen=True,
    extra="forbid",
    strict=True,
    allow_inf_nan=False,
    use_attribute_docstrings=True,
)
