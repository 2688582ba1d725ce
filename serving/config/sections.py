"""What the sections of `serve_config.yaml` share: strictness, kinds of values, and YAML. Pure."""

from typing import Annotated

import yaml
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


def load_yaml(text: str) -> object:
    """Returns the one document in `text`.

    Raises:
        yaml.YAMLError: it is not one YAML document, or has a key twice; the message says where.
    """
    # The one in C: a gateway reads its keys on the loop that every stream is on.
    loader = yaml.CSafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _refuse_repeated_keys(root, set())
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _refuse_repeated_keys(node: yaml.Node, seen: set[int]) -> None:
    """Refuses repeated keys, of which YAML silently keeps the last; `seen` are visited nodes."""
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            _refuse_repeated_keys(entry, seen)
        return
    names: set[tuple[str, str]] = set()
    for key, value in node.value:
        name = (key.tag, str(key.value))
        if name in names:
            problem = f"the key {key.value!r} is given twice"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        names.add(name)
        _refuse_repeated_keys(value, seen)
