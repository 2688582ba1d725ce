"""The reference of the scaling policy's settings, from the schema itself.

`python -m scripts.policy_reference --write docs/reference/policy.md`, or `--check`. The page looks
as the reference of `serve_config.yaml` does.
"""

import sys

from autoscaling.policy_config import PolicyConfig
from serving.config.reference import main as reference_main
from serving.config.reference import schema_lines


def policy_reference() -> str:
    """The whole reference in markdown: one table per section."""
    lines = schema_lines(PolicyConfig.model_json_schema(), "policy_kwargs")
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Writes or checks the reference. Returns 0: up to date, 1: out of date, 2: no place for it."""
    return reference_main(arguments, policy_reference, "scripts.policy_reference")


if __name__ == "__main__":
    sys.exit(main())
