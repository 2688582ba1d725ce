"""What an application says of its scaling policy, against what it says of its models.

The policy reads its own settings (`autoscaling.policy_config`) and says what cannot be used. The
rest here is what fits neither side alone.
"""

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from serving.config.application import AppConfig
from serving.config.models import DeploymentConfig
from serving.config.rules import mapping_in, numbers_in
from serving.domain.capacity.objectives import DEFAULT_OBJECTIVES
from serving.domain.capacity.slice_profile import CapacityProfile, ProfileError, read_profile
from serving.domain.errors import Problem

_OUR_POLICIES = "autoscaling"
# The policy searches its files there.
_PROJECT_ROOT = Path(__file__).resolve().parents[2]


def policy_problems(
    path: str, application: Mapping[str, object], config: AppConfig
) -> Iterator[Problem]:
    """Yields a problem if deployments scale and the application names no policy.

    Serve's own policy would take every model to its minimum. It counts requests that Serve hands to
    engines, and Serve hands them none.
    """
    is_autoscaled = any(
        deployment.is_autoscaled for model in config.models for deployment in model.deployments
    )
    if is_autoscaled and not application.get("autoscaling_policy"):
        yield Problem(
            f"{path}.autoscaling_policy",
            "missing, and deployments have min_replicas and max_replicas",
            "needed: policy_function autoscaling.serve_policy:SlicePolicy with its policy_kwargs",
        )


def settings_problems(path: str, application: Mapping[str, object]) -> Iterator[Problem]:
    """Yields what the policy says of its own settings, if it is ours.

    It is made when the application runs already, and then scales nothing with settings that it
    cannot use. This package is below it, so it is found as Serve finds it, by its name. Somebody
    else's policy is not imported: it need not be installed here.
    """
    named = mapping_in(application, "autoscaling_policy")
    function, kwargs = named.get("policy_function"), mapping_in(named, "policy_kwargs")
    if not isinstance(function, str) or re.split("[.:]", function)[0] != _OUR_POLICIES:
        return
    at = f"{path}.autoscaling_policy"
    module, _, name = function.rpartition(":" if ":" in function else ".")
    try:
        policy = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        allowed = "needed: autoscaling.serve_policy:SlicePolicy"
        yield Problem(f"{at}.policy_function", f"cannot be imported: {error}", allowed, function)
        return
    for complaint in policy.complaints(kwargs):
        yield Problem(f"{at}.policy_kwargs", complaint, "see docs/reference/policy.md")


def objective_problems(
    path: str, application: Mapping[str, object], config: AppConfig
) -> Iterator[Problem]:
    """Yields models that are served by other objectives than their policy plans for.

    One that has none of its own need not repeat flat ones.
    """
    kwargs = mapping_in(mapping_in(application, "autoscaling_policy"), "policy_kwargs")
    for index, model in enumerate(config.models):
        given = mapping_in(mapping_in(mapping_in(kwargs, "models"), model.name), "objectives")
        per_token_s = given.get("ttft_per_prompt_token_s", 0.0)
        if not given or (model.objectives is None and not per_token_s):
            continue
        planned = given.get("ttft_s"), given.get("tpot_s"), per_token_s
        own = model.own_objectives or DEFAULT_OBJECTIVES
        if planned != (own.ttft_s, own.tpot_s, own.ttft_per_prompt_token_s):
            yield Problem(
                f"{path}.args.models[{index}].objectives",
                f"not those that the policy plans for, {dict(given)}",
                "allowed: the same in both places",
                f"{None if model.objectives is None else model.objectives.model_dump()}",
            )


def shape_problems(
    path: str, application: Mapping[str, object], config: AppConfig
) -> Iterator[Problem]:
    """Yields deployments whose slices are not those that their policy's profile is of.

    A class has a profile of its own, or the model's. What no profile says is not compared, nor what
    cannot be read: the policy tells of that.
    """
    for each in _planned(path, application, config):
        its_slice = each.deployment.slice
        shape = _profiled_shape(each.of_class.get("profile") or each.of_model.get("profile"))
        if its_slice is None or shape is None:
            continue
        own = its_slice.generation.value, its_slice.topology, its_slice.num_slices
        if own != shape:
            name = each.deployment.compute_class
            yield Problem(
                f"{each.path}.slice",
                f"not what the policy's profile for {name} is of, {_shape_words(shape)}",
                f"allowed: the same in both places; {each.path_of_class}.profile is for slices of "
                "another shape than the model's profile",
                _shape_words(own),
            )


def bound_problems(
    path: str, application: Mapping[str, object], config: AppConfig
) -> Iterator[Problem]:
    """Yields bounds of a class in the policy that none of its deployment's bounds meets.

    The deployment's would count, and whoever wrote the others would not know. What is no number is
    the policy's to refuse.
    """
    for each in _planned(path, application, config):
        least, most = numbers_in(each.of_class, "min_slices", "max_slices")
        fewest, greatest = each.deployment.min_replicas, each.deployment.max_replicas
        if least is not None and greatest is not None and least > greatest:
            yield Problem(
                f"{each.path}.max_replicas",
                "fewer than the slices that the policy keeps at least",
                f"allowed: at least {each.path_of_class}.min_slices, {least:g}",
                f"{greatest}",
            )
        if most is not None and fewest is not None and most < fewest:
            yield Problem(
                f"{each.path}.min_replicas",
                "more than the slices that the policy has at most",
                f"allowed: at most {each.path_of_class}.max_slices, {most:g}",
                f"{fewest}",
            )


class _Planned(NamedTuple):
    """A deployment, and what the policy says of its model and its class; empty for nothing."""

    path: str
    path_of_class: str
    deployment: DeploymentConfig
    of_model: Mapping[str, object]
    of_class: Mapping[str, object]


def _planned(path: str, application: Mapping[str, object], config: AppConfig) -> Iterator[_Planned]:
    kwargs = mapping_in(mapping_in(application, "autoscaling_policy"), "policy_kwargs")
    for index, model in enumerate(config.models):
        of_model = mapping_in(mapping_in(kwargs, "models"), model.name)
        for number, deployment in enumerate(model.deployments):
            name = deployment.compute_class
            yield _Planned(
                f"{path}.args.models[{index}].deployments[{number}]",
                f"policy_kwargs.models.{model.name}.classes.{name}",
                deployment,
                of_model,
                mapping_in(mapping_in(of_model, "classes"), name),
            )


def _profiled_shape(given: object) -> tuple[str, str, int] | None:
    """Returns generation, topology and number of slices of a profile; `None` if it has none."""
    try:
        if isinstance(given, str):
            profile = read_profile(_PROJECT_ROOT / given)
        else:
            profile = CapacityProfile.model_validate(given)
    except (ProfileError, ValidationError):
        return None
    if profile.generation is None or profile.topology is None:
        return None
    return profile.generation, profile.topology, profile.num_slices


def _shape_words(shape: tuple[str, str, int]) -> str:
    generation, topology, num_slices = shape
    return f"{generation} {topology}" + (f" x {num_slices}" if num_slices > 1 else "")
