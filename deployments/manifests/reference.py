"""The reference of part `cluster` of a values file, from the schema itself.

`python -m deployments.manifests.reference --write docs/operate/deploy-gke.md`, or `--check`. The
page looks as the reference of `serve_config.yaml` does.
"""

import sys

from deployments.manifests.cluster_config import ClusterConfig
from serving.config.reference import main as reference_main
from serving.config.reference import schema_lines


def cluster_reference() -> str:
    """The whole reference in markdown: one table per section."""
    lines = schema_lines(ClusterConfig.model_json_schema(), "cluster")
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Writes or checks the reference. Returns 0: up to date, 1: out of date, 2: no place for it."""
    return reference_main(arguments, cluster_reference, "deployments.manifests.reference")


if __name__ == "__main__":
    sys.exit(main())
