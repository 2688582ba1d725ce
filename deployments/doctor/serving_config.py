"""Checks if this environment would serve a serve_config.yaml, and if a gateway serves. Pure."""

from collections.abc import Iterator, Mapping

from deployments.doctor.cluster import WantedSlices
from deployments.doctor.findings import Finding, Unknown, error, note, ok, warning
from deployments.status.reports import ReportedFleet
from serving.config.check import CheckReport
from serving.config.slice_settings import slice_spec
from serving.config.slice_spec import slice_request

_NICENESS = "RAY_worker_niceness"


def check_settings(
    name: str, report: CheckReport | Unknown, environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Yields every problem of the file, and every variable that it reads and that is not set."""
    what = f"config {name}"
    if isinstance(report, Unknown):
        yield error(what, report.reason, "a serve_config.yaml", "give another file with --config")
        return
    for problem in report.problems:
        found = (
            problem.complaint if problem.value is None else f"{problem.complaint}: {problem.value}"
        )
        yield error(f"{what}: {problem.path}", found, problem.allowed, f"edit {name}")
    if report.problems:
        return
    yield ok(what, f"{len(report.applications)} application, no problems")
    for config in report.applications.values():
        for path, variable in (
            ("auth.keys_env", config.auth.keys_env),
            ("link.secret_env", config.link.secret_env),
        ):
            if variable is not None and not environment.get(variable):
                yield error(
                    f"{what}: {path}",
                    f"the environment variable {variable} is not set here",
                    "a value",
                    f"export {variable} before Ray starts, or give the pod its Secret",
                )


def wanted_slices(report: CheckReport) -> tuple[WantedSlices, ...]:
    """Returns what the deployments ask for at least; of those that scale, their minimum."""
    wanted = []
    for config in report.applications.values():
        for model in config.models:
            for deployment in model.deployments:
                spec = slice_spec(config, model, deployment)
                if spec is None:
                    continue
                name = model.deployment_name(deployment)
                number = (
                    deployment.min_replicas if deployment.is_autoscaled else deployment.replicas
                )
                total = (number or 0) * spec.num_slices
                wanted.append(WantedSlices(name, slice_request(spec), total))
    return tuple(wanted)


def check_gateway(url: str, fleet: ReportedFleet | Unknown) -> Finding:
    """Checks that a gateway answers, and that one of its engines is ready."""
    what = f"gateway {url}"
    if isinstance(fleet, Unknown):
        return error(what, fleet.reason, "the answer of /fleet", "`serve status`, then Serve's log")
    engines = [engine for model in fleet.models for engine in model.engines]
    if not engines:
        return note(what, "it has no engine", "right only while every model is scaled to zero")
    num_ready = sum(engine.state == "ready" for engine in engines)
    words = f"{num_ready} of {len(engines)} engines ready"
    if not num_ready:
        return warning(what, words, "at least one", "`slicewise status` says what each waits for")
    return ok(what, words)


def check_niceness(environment: Mapping[str, str], *, is_cluster: bool) -> Finding:
    """Checks the niceness of workers. Ray's 15 leaves every stream behind any other process."""
    found = environment.get(_NICENESS)
    if found == "0":
        return ok(_NICENESS, "0")
    if not is_cluster:
        return note(_NICENESS, "`slicewise serve` sets it by itself")
    return warning(
        _NICENESS, found or "not set", "0", f"export {_NICENESS}=0 wherever Ray is started"
    )
