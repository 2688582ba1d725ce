"""Defines `slicewise observe`: it runs Prometheus with our rules beside what serves here.

Owns its process, its folder and its configuration at start-up. Does not own the rules, nor what is
scraped.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer
import yaml

from deployments.observe.prometheus import (
    Settings,
    TargetError,
    configure,
    gateway_targets,
    plain_targets,
    target_file,
)
from deployments.start.ports import free_ports, is_free

DEFAULT_GATEWAY = "http://127.0.0.1:8000"
DEFAULT_EXPORTER = "127.0.0.1:9450"
_DEFAULT_PORT = 9090
_FOLDER = Path("deployments/prometheus")
# Ray's own name of the file; below the folder of a cluster that `slicewise serve` or `sim` started,
# or of any other.
_RAY_FILES = ("sw-*/ray", "ray")
_RAY_FILE = "prom_metrics_service_discovery.json"
_START_TIMEOUT_S = 30.0
_POLL_S = 0.2
_REFRESH_S = 5.0
_MISSING = (
    "there is no prometheus on the PATH. On Debian and Ubuntu:\n"
    "  sudo apt-get install --no-install-recommends prometheus\n"
    "That starts one of its own on port 9090, which you need not keep:\n"
    "  sudo systemctl disable --now prometheus"
)


def observe_command(
    *,
    gateways: Annotated[
        list[str] | None,
        typer.Option(
            "--gateway",
            help="Address of a gateway or of the Serve proxy; again for each. "
            f"[default: {DEFAULT_GATEWAY}]",
        ),
    ] = None,
    exporters: Annotated[
        list[str] | None,
        typer.Option(
            "--tpu-exporter",
            metavar="HOST:PORT",
            help=f"A TPU exporter; again for each. [default: {DEFAULT_EXPORTER}, once it answers]",
        ),
    ] = None,
    ray_discovery: Annotated[
        Path | None,
        typer.Option(help="Ray's service discovery file. [default: the newest on this machine]"),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="SLICEWISE_API_KEY", help="API key, where the gateways want one."),
    ] = None,
    config_dir: Annotated[
        Path, typer.Option(help="Folder with laptop.yml and the folder rules.")
    ] = _FOLDER,
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help=f"Port on 127.0.0.1. [default: {_DEFAULT_PORT}, or a free one]",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps the data. [default: one that goes at the end]"),
    ] = None,
    scrape_interval: Annotated[
        float | None, typer.Option(min=0.1, max=3600, help="Seconds. [default: as in laptop.yml]")
    ] = None,
) -> None:
    """Start Prometheus with our rules and alerts on this machine, until Ctrl-C."""
    program = shutil.which("prometheus")
    if program is None:
        _refuse(_MISSING)
    sources = _Sources(
        tuple(gateways or (DEFAULT_GATEWAY,)),
        tuple(exporters or ()),
        ray_discovery,
        Path(tempfile.gettempdir()),
    )
    with contextlib.ExitStack() as stack:
        if data_dir is None:
            made = tempfile.TemporaryDirectory(prefix="sw-prom-", ignore_cleanup_errors=True)
            data_dir = Path(stack.enter_context(made))
        folder = data_dir.absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _prepare(folder, config_dir, api_key, scrape_interval)
            sources.write(folder / "targets")
        except (OSError, yaml.YAMLError, TargetError) as error:
            _refuse(str(error))
        code = _Observer(program, folder, sources, port or _free_port()).run()
    raise typer.Exit(code)


def _prepare(folder: Path, config_dir: Path, key: str | None, interval_s: float | None) -> None:
    """Writes what Prometheus reads, except the targets."""
    rules = tuple(sorted((config_dir / "rules").absolute().glob("*.rules.yml")))
    if not rules:
        _refuse(f"there are no rules in {config_dir / 'rules'}; --config-dir names another folder")
    shipped = yaml.safe_load((config_dir / "laptop.yml").read_text(encoding="utf-8"))
    key_file = None
    if key:
        key_file = folder / "api-key"
        key_file.unlink(missing_ok=True)
        # No other user may read it, from the first moment on.
        with os.fdopen(os.open(key_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as out:
            out.write(key)
    (folder / "targets").mkdir(exist_ok=True)
    settings = Settings(rules, folder / "targets", key_file, interval_s)
    config = yaml.safe_dump(configure(shipped, settings))
    (folder / "prometheus.yml").write_text(config, encoding="utf-8")


@dataclass(slots=True)
class _Sources:
    """The sources to scrape. Empty `exporters` become the usual one once that answers."""

    gateways: tuple[str, ...]
    exporters: tuple[str, ...]
    ray_discovery: Path | None
    temporary: Path

    def write(self, folder: Path) -> None:
        """Writes the lists of targets as they are now; Prometheus reads them again by itself."""
        if not self.exporters and _answers(DEFAULT_EXPORTER):
            self.exporters = (DEFAULT_EXPORTER,)
        ray = self.ray_file()
        text = "[]"
        if ray is not None:
            with contextlib.suppress(OSError):  # its cluster has just ended
                text = ray.read_text(encoding="utf-8") or "[]"
        for job, targets in (
            ("gateway", gateway_targets(self.gateways)),
            ("tpu-exporter", plain_targets(self.exporters)),
            ("ray", text),
        ):
            _replace(folder / target_file(job), targets)

    def ray_file(self) -> Path | None:
        """Returns Ray's service discovery file; `None` when there is none."""
        if self.ray_discovery is not None:
            return self.ray_discovery
        found = [
            path
            for ray_file in _RAY_FILES
            for path in self.temporary.glob(f"{ray_file}/{_RAY_FILE}")
        ]
        return max(found, key=_written_at, default=None)

    def lines(self) -> Sequence[str]:
        exporters = ", ".join(self.exporters) or f"none; {DEFAULT_EXPORTER} once it answers"
        return (
            f"gateways: {', '.join(self.gateways)}",
            f"TPU exporters: {exporters}",
            f"Ray: {self.ray_file() or 'no service discovery file yet'}",
        )


class _Observer:
    def __init__(self, program: str, folder: Path, sources: _Sources, port: int) -> None:
        self._program = program
        self._folder = folder
        self._sources = sources
        self._address = f"127.0.0.1:{port}"
        self._log = folder / "prometheus.log"
        self._stopping = False

    def run(self) -> int:
        """Runs Prometheus. Returns the exit code: 0 after Ctrl-C, 1 when Prometheus failed."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        with self._log.open("wb") as log:
            child = subprocess.Popen(
                [
                    self._program,
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={self._address}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches this command alone, which then ends Prometheus.
                start_new_session=True,
            )
        try:
            return self._watch(child)
        finally:
            child.terminate()
            try:
                child.wait(_START_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            typer.echo("slicewise: stopped")

    def _watch(self, child: subprocess.Popen[bytes]) -> int:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        is_ready, refresh_at_s = False, time.monotonic() + _REFRESH_S
        while not self._stopping:
            if child.poll() is not None or (not is_ready and time.monotonic() > deadline_s):
                typer.echo("slicewise: Prometheus does not run:", err=True)
                lines = self._log.read_text(errors="replace").splitlines()[-20:]
                typer.echo("\n".join(lines), err=True)
                return 1
            if not is_ready and _is_ready(self._address):
                is_ready = True
                self._print_targets()
            if time.monotonic() >= refresh_at_s:
                refresh_at_s = time.monotonic() + _REFRESH_S
                self._sources.write(self._folder / "targets")
            time.sleep(_POLL_S)
        return 0

    def _print_targets(self) -> None:
        typer.echo(f"slicewise: Prometheus on http://{self._address}, alerts on /alerts; it reads")
        for line in self._sources.lines():
            typer.echo(f"  {line}")
        typer.echo("Ctrl-C stops it.")

    def _on_signal(self, *_: object) -> None:
        self._stopping = True


def _replace(path: Path, text: str) -> None:
    """Writes a file in one step, when it changes."""
    with contextlib.suppress(OSError):
        if path.read_text(encoding="utf-8") == text:
            return
    aside = path.with_suffix(".new")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=0.5).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    """The usual port of Prometheus, or another one when that is taken."""
    if is_free("127.0.0.1", _DEFAULT_PORT):
        return _DEFAULT_PORT
    try:
        return free_ports(1)[0]
    except OSError as error:
        _refuse(str(error))


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"slicewise observe: {reason}", err=True)
    raise typer.Exit(1)
