"""The secret that both ends of every token link prove to each other."""

import os
import secrets

from ray.experimental import internal_kv

from serving.artifacts.model_source import resolve_file
from serving.config.application import LinkConfig

_KEY = b"slicewise:link-secret-hex"
_NUM_BYTES = 32


def cluster_secret(link: LinkConfig) -> bytes:
    """Returns the configured secret, or else a random one shared by this Ray cluster.

    A configured one may have several lines while it is replaced; see `serving.link.handshake`.
    The first caller makes the random one and keeps it in Ray's own key-value store. So every part
    of the application, and every later deployment of it, finds the same. Code that can read that
    store can already run code in the cluster.

    Raises:
        OSError: the configured file cannot be read.
        ValueError: a named source is empty.
    """
    if link.secret_file is not None:
        return _not_empty(resolve_file(link.secret_file).read_bytes().strip(), link.secret_file)
    if link.secret_env is not None:
        return _not_empty(os.environ.get(link.secret_env, "").encode(), link.secret_env)
    internal_kv._internal_kv_put(_KEY, secrets.token_hex(_NUM_BYTES).encode(), overwrite=False)
    secret: bytes = internal_kv._internal_kv_get(_KEY)
    return secret


def _not_empty(secret: bytes, source: str) -> bytes:
    if not secret:
        raise ValueError(f"the link secret in {source!r} is empty")
    return secret
