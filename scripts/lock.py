"""Writes the pinned lists of packages: `requirements/{cpu,dev,libtpu,tpu-sim}.lock`.

pip resolves; this script leaves out what CPU does not need and writes the rest with exact versions.
The lists are installed with `--no-deps`, so what is left out stays out. With `--keep` every pin
that stands stays as it is, and only what is new is resolved.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements"

# Name: why it is left out.
LEFT_OUT = {
    "triton": "GPU kernels, 1 GB",
    "torchvision": "its index build is linked to CUDA and breaks transformers beside CPU torch",
    "torchaudio": "as torchvision",
    "torchcodec": "as torchvision",
    "fastapi-cloud-cli": "uploads to a hosted service; comes with vLLM's fastapi[standard]",
    "sentry-sdk": "only for fastapi-cloud-cli",
    "agent-detector": "only for fastapi-cloud-cli",
    "rignore": "only for fastapi-cloud-cli",
    "fastar": "only for fastapi-cloud-cli",
    "detect-installer": "only for fastapi-cloud-cli",
}


def resolve(*inputs: Path, kept: tuple[Path, ...] = ()) -> dict[str, str]:
    """Package versions that satisfy all `inputs` together, by normalised name.

    Those that a list in `kept` pins stay at that version.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--quiet", "--report", report.name]
        for path in inputs:
            command += ["-r", str(path)]
        for path in kept:
            command += ["-c", str(path)]
        subprocess.run(command, check=True)
        installs = json.loads(Path(report.name).read_text())["install"]
    names = (
        (entry["metadata"]["name"].lower().replace("_", "-"), entry["metadata"]["version"])
        for entry in installs
    )
    return {name: version for name, version in sorted(names) if name not in LEFT_OUT}


def exact(path: Path) -> dict[str, str]:
    """The pins in a list that is not resolved, by normalised name."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {name.lower().replace("_", "-"): version for name, version in pins}


def write(path: Path, head: str, versions: dict[str, str]) -> None:
    """One pin per line, under a comment."""
    lines = [f"# {head} Written by `make lock`; install with --no-deps.", ""]
    lines += [f"{name}=={version}" for name, version in versions.items()]
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    """All lists, the second without what the first already has."""
    parser = argparse.ArgumentParser(prog="lock.py")
    parser.add_argument("--keep", action="store_true", help="leave every pin that stands as it is")
    locks = (REQUIREMENTS / "cpu.lock", REQUIREMENTS / "dev.lock")
    kept = locks if parser.parse_args().keep else ()
    cpu = resolve(REQUIREMENTS / "cpu.in", kept=kept)
    both = resolve(REQUIREMENTS / "cpu.in", REQUIREMENTS / "dev.in", kept=kept)
    clashes = {name for name in cpu if both.get(name) != cpu[name]}
    if clashes:
        sys.exit(f"dev.in changes versions of cpu.in: {', '.join(sorted(clashes))}")
    pinned = exact(REQUIREMENTS / "cpu.pins")
    default = dict(sorted((cpu | pinned).items()))
    write(REQUIREMENTS / "cpu.lock", "The embedded default, x86-64, Python 3.11.", default)
    dev = {name: version for name, version in both.items() if name not in cpu}
    write(REQUIREMENTS / "dev.lock", "Checks, tests and benchmarks.", dev)
    libtpu = REQUIREMENTS / "libtpu.lock"
    kept = (libtpu,) if kept and libtpu.exists() else ()
    alone = resolve(REQUIREMENTS / "libtpu.in", kept=kept)
    write(libtpu, "The runtime of a TPU, in a folder of its own.", alone)
    # After the two lists that it takes versions from.
    simulated = resolve(REQUIREMENTS / "tpu-sim.in") | pinned
    simulated |= exact(REQUIREMENTS / "tpu-sim.pins")
    head = "tpu-inference on JAX CPU, x86-64, Python 3.11; vllm-tpu itself is in the Makefile."
    write(REQUIREMENTS / "tpu-sim.lock", head, dict(sorted(simulated.items())))


if __name__ == "__main__":
    main()
