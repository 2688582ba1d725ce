"""The account of the head pod, with the rights that KubeRay and our manifests give it."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from control_plane.api import Api, RefusedByServerError, reference, wait

from tests.deployments.manifests.examples import shipped_folder

from .objects import RAYSERVICE, raycluster
from .ray_services import rights

Json = dict[str, Any]


def kuberay_rules() -> list[Json]:
    """What KubeRay grants where the autoscaler is on."""
    cluster = raycluster()
    cluster["metadata"]["uid"] = "of-nobody"
    (role,) = [each for each in rights(cluster) if each["kind"] == "Role"]
    return list(role["rules"])


@cache
def _rendered_rules() -> tuple[Json, ...]:
    roles = [each.body for each in shipped_folder("example.yaml").manifests if each.kind == "Role"]
    (role,) = [each for each in roles if each["metadata"]["name"].endswith("-slice-provisioner")]
    return tuple(role["rules"])


def rendered_rules() -> list[Json]:
    """What `slicewise render` grants besides, for a RayService of the name that is used here."""
    return [
        rule | ({"resourceNames": [RAYSERVICE]} if "resourceNames" in rule else {})
        for rule in _rendered_rules()
    ]


def head_rules() -> list[Json]:
    """What the head's account may do: what KubeRay and we grant."""
    return [*kuberay_rules(), *rendered_rules()]


def make_account(api: Api, namespace: str, name: str, rules: Sequence[Json]) -> None:
    """Makes a service account that may do what `rules` say, and waits until it may."""
    api.apply(reference("ServiceAccount", namespace, name))
    if not rules:
        return
    role = reference("Role", namespace, f"{name}-of-tests")
    api.apply(role | {"rules": list(rules)})
    binding = reference("RoleBinding", namespace, f"{name}-of-tests")
    binding["roleRef"] = {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "Role",
        "name": role["metadata"]["name"],
    }
    binding["subjects"] = [{"kind": "ServiceAccount", "name": name, "namespace": namespace}]
    api.apply(binding)
    user = f"system:serviceaccount:{namespace}:{name}"

    def may_list_pods() -> bool:
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "metadata": {},
            "spec": {
                "user": user,
                "resourceAttributes": {
                    "namespace": namespace,
                    "verb": "list",
                    "resource": "pods",
                },
            },
        }
        try:
            return bool(api.create(review)["status"]["allowed"])
        except RefusedByServerError:
            return False

    wait(may_list_pods, f"{user} has its rights")
