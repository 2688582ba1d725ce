"""Renders what a Ray container reads: its variables, and the Secrets mounted into it.

No value of a Secret is here, only its name and key. Pure.
"""

from deployments.manifests.names import Json
from deployments.manifests.values import Values
from serving.config.ray_settings import HAPROXY_PROGRAM, RAY_SETTINGS

# Where both images have it (`deployments/images`).
_INGRESS_PROGRAM = "/opt/venv/bin/slicewise-haproxy"
# Keys in the Secrets. The first is KubeRay's word; source: its guide on authentication, read
# 2026-11-21.
TOKEN_KEY, API_KEYS_KEY, LINK_KEY = "auth_token", "api-keys", "link-secret"


def environment(values: Values, *, is_gateway: bool) -> list[Json]:
    """Returns the variables that Ray and the application read."""
    auth, link, secrets = values.app.auth, values.app.link, values.cluster.secrets
    entries: list[Json] = [{"name": name, "value": text} for name, text in RAY_SETTINGS.items()]
    entries.append({"name": HAPROXY_PROGRAM, "value": _INGRESS_PROGRAM})
    if secrets.api_keys is not None and auth.keys_env is not None and is_gateway:
        entries.append(from_secret(auth.keys_env, secrets.api_keys, API_KEYS_KEY))
    if secrets.link is not None and link.secret_env is not None:
        entries.append(from_secret(link.secret_env, secrets.link, LINK_KEY))
    if secrets.hugging_face is not None:
        entries.append(from_secret("HF_TOKEN", secrets.hugging_face, "token"))
    return entries


def _secret_files(values: Values, *, is_gateway: bool) -> list[tuple[str, str, str, str]]:
    """Returns volume, Secret, key and path of each secret that is read from a file."""
    auth, link, secrets = values.app.auth, values.app.link, values.cluster.secrets
    files = []
    if secrets.api_keys is not None and auth.keys_file is not None and is_gateway:
        files.append(("api-keys", secrets.api_keys, API_KEYS_KEY, auth.keys_file))
    if secrets.link is not None and link.secret_file is not None:
        files.append(("link-secret", secrets.link, LINK_KEY, link.secret_file))
    return files


def secret_volumes(values: Values, *, is_gateway: bool = True) -> list[Json]:
    """The volumes of Secrets that are read from files. The kubelet updates a changed one there."""
    return [
        {
            "name": volume,
            "secret": {
                "secretName": secret,
                "items": [{"key": key, "path": path.rpartition("/")[2]}],
                "defaultMode": 0o440,
            },
        }
        for volume, secret, key, path in _secret_files(values, is_gateway=is_gateway)
    ]


def secret_mounts(values: Values, *, is_gateway: bool) -> list[Json]:
    """Returns the mounts of `secret_volumes`."""
    return [
        {"name": volume, "mountPath": path.rpartition("/")[0], "readOnly": True}
        for volume, _, _, path in _secret_files(values, is_gateway=is_gateway)
    ]


def from_secret(name: str, secret: str, key: str) -> Json:
    """Returns a variable with the value of a Secret's key."""
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
