"""Makes Serve replace a deployment's replicas only when their own configuration changes.

Serve (2.60) gives every deployment of an application that comes from a file one version: a digest
of all of the application's `args`. So a changed byte anywhere would replace every replica there is:
the engines of all models, the gateways with all their streams, the directory. The code that makes
the deployments knows which of them a change concerns, so it sets the version. The rest that Serve
compares (the actor's resources, `user_config`, numbers of replicas) stays Serve's.
"""

from typing import Any

import ray
from pydantic import ConfigDict, PrivateAttr
from ray import serve
from ray.serve._private.config import DeploymentConfig

from serving.domain.models.model_version import digest_of


class _PinnedConfig(DeploymentConfig):
    """The configuration of one deployment, with a version that Serve's own does not replace."""

    model_config = ConfigDict(validate_assignment=True, arbitrary_types_allowed=True)
    _pinned: str | None = PrivateAttr(default=None)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "version" and self._pinned is not None:
            value = self._pinned
        super().__setattr__(name, value)


def version_of(settings: object) -> str:
    """Returns the version of a deployment with these settings, under this runtime environment."""
    runtime_env = ray.get_runtime_context().runtime_env if ray.is_initialized() else {}
    return digest_of([settings, dict(runtime_env)])


def pin_version(deployment: serve.Deployment, settings: object) -> serve.Deployment:
    """Returns the deployment with a version of its own: a digest of `settings`, a value of JSON.

    Its replicas are replaced when `settings` changes. They are also replaced when the application's
    runtime environment changes, because their code comes from there.
    """
    version = version_of(settings)
    ours = deployment._deployment_config
    fields = {name: getattr(ours, name) for name in DeploymentConfig.model_fields}
    pinned = _PinnedConfig.model_construct(**fields)
    pinned._pinned = pinned.version = version
    deployment._deployment_config = pinned
    return deployment
