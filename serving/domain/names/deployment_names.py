"""The names of the application's Serve deployments. A leaf, because scaling has to find them."""

import re

GATEWAY = "gateway"
DIRECTORY = "directory"
DASHBOARD = "dashboard"


def engine_deployment_name(model: str, compute_class: str) -> str:
    """Returns `engine-<model>-<compute class>`, of characters that are safe in Serve's names."""
    return f"engine-{re.sub(r'[^A-Za-z0-9._-]+', '-', model)}-{compute_class}"
