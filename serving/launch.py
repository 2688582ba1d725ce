"""`slicewise serve`: runs `serve run` on a Ray cluster of its own, tells of it, and ends it all.

Owns the environment of what it starts, the messages at start-up, and the end: whatever ends this
command, nothing it started goes on. Everything else is `serve run`'s.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
import yaml

# `serve run` stops its replicas one after the other, each with a drain; after that it is killed.
STOP_TIMEOUT_S = 30.0
_POLL_S = 0.5
_EXPLAINED_WAIT_S = 20.0


def child_environment(inherited: Mapping[str, str], ray_folder: str) -> dict[str, str]:
    """What `serve run` is started with; a variable the user has set wins.

    `ray_folder` keeps this cluster apart from any other on the machine. Ray's sockets lie below it,
    and their paths may have at most 107 bytes.
    """
    ours = {
        "RAY_ADDRESS": "local",
        "RAY_TMPDIR": ray_folder,
        # With a token file in the user's folder Ray would otherwise ask for it on some paths only.
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Replicas serve HTTP themselves, with HAProxy in front: no Python proxy on a token's way.
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # The gateway's code runs in the loop that serves its HTTP: no thread change per chunk.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return {**ours, **inherited}


def serve_command(
    config: Annotated[Path, typer.Argument(help="A serve_config.yaml.")],
    verbose: Annotated[bool, typer.Option(help="Show Ray's and vLLM's own log.")] = False,  # noqa: FBT002
) -> None:
    """Serve CONFIG on this machine until Ctrl-C."""
    if not config.is_file():
        typer.echo(f"slicewise: there is no file {config}", err=True)
        raise typer.Exit(1)
    with tempfile.TemporaryDirectory(prefix="sw-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "serve.log"
        code = _Launch(config, Path(folder), None if verbose else log).run()
    raise typer.Exit(code)


class _Launch:
    """One `serve run` from start to end. `log` is `None` when its output goes to the terminal."""

    def __init__(self, config: Path, folder: Path, log: Path | None) -> None:
        self._config = config
        self._folder = folder
        self._log = log
        settings = yaml.safe_load(config.read_text())
        options = settings.get("http_options") or {}
        self._url = f"http://127.0.0.1:{options.get('port', 8000)}"
        self._has_keys = "keys_" in config.read_text()
        self._told = ""
        self._stopping = False

    def run(self) -> int:
        """The exit code: 0 after Ctrl-C, 1 when the application failed."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        with self._child() as child:
            try:
                return self._watch(child)
            finally:
                self._stop(child)

    @contextlib.contextmanager
    def _child(self) -> Iterator[subprocess.Popen[bytes]]:
        command = [str(Path(sys.executable).with_name("serve")), "run", str(self._config)]
        self._say(f"starting: serve run {self._config}")
        output = self._log.open("wb") if self._log is not None else None
        try:
            yield subprocess.Popen(
                command,
                env=child_environment(os.environ, str(self._folder)),
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                # Ctrl-C reaches this command alone, which then ends the rest in order.
                start_new_session=True,
            )
        finally:
            if output is not None:
                output.close()

    def _watch(self, child: subprocess.Popen[bytes]) -> int:
        started_s = time.monotonic()
        is_ready = False
        while not self._stopping:
            if child.poll() is not None:
                self._say("serve run ended:")
                self._show_log()
                return 1
            if not is_ready:
                waited_s = time.monotonic() - started_s
                if self._has_failed(waited_s):
                    return 1
                is_ready = self._tell_progress(waited_s)
            time.sleep(_POLL_S)
        return 0

    def _tell_progress(self, waited_s: float) -> bool:
        """Says what has changed; `True` once every engine is ready."""
        fleet = self._get("/fleet")
        if fleet is None:
            self._say_once(
                "Ray, the gateway and the engines are starting (about a minute)", waited_s
            )
            return False
        engines = [engine for model in fleet["models"] for engine in model["engines"]]
        num_ready = sum(bool(engine["linked"]) for engine in engines)
        if not engines or num_ready < len(engines):
            what = f"{num_ready} of {len(engines)} engines ready, the others load"
            self._say_once(f"the gateway is up; {what}", waited_s)
            return False
        self._say_once(f"ready: {len(engines)} engines", waited_s)
        self._tell_how_to_ask(fleet["models"][0]["name"])
        return True

    def _tell_how_to_ask(self, model: str) -> None:
        body = {"model": model, "messages": [{"role": "user", "content": "What is Slicewise?"}]}
        typer.echo(f"\nServing on {self._url}. Try it:\n")
        typer.echo(f"  curl {self._url}/v1/chat/completions \\")
        typer.echo("    -H 'Content-Type: application/json' \\")
        typer.echo(f"    -d '{json.dumps(body)}'\n")
        typer.echo("Engines and requests: slicewise status. Ctrl-C stops everything.")

    def _has_failed(self, waited_s: float) -> bool:
        """Whether Serve has given the application up; its reason is shown."""
        text = self._log.read_text(errors="replace") if self._log is not None else ""
        if "DEPLOY_FAILED" in text or ("Deploying app" in text and "failed" in text):
            self._say(f"the application could not be deployed (after {waited_s:.0f} s):")
            self._show_log()
            return True
        return False

    def _get(self, path: str) -> dict[str, Any] | None:
        request = urllib.request.Request(self._url + path)
        if key := os.environ.get("SLICEWISE_API_KEY"):
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=2) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except (urllib.error.URLError, OSError, ValueError):
            return None

    def _stop(self, child: subprocess.Popen[bytes]) -> None:
        """Ends `serve run` in order, then whatever it left."""
        below = _descendants(child.pid)
        if child.poll() is None:
            self._say("stopping")
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(STOP_TIMEOUT_S)
        below += _descendants(child.pid) + _of_cluster(str(self._folder))
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if child.poll() is None:
            child.kill()
        child.wait()
        psutil.wait_procs(below, timeout=10)
        self._say("stopped")

    def _on_signal(self, *_: object) -> None:
        self._stopping = True

    def _show_log(self) -> None:
        if self._log is not None:
            lines = self._log.read_text(errors="replace").splitlines()
            typer.echo("\n".join(lines[-40:]), err=True)

    def _say_once(self, text: str, waited_s: float) -> None:
        if text != self._told:
            self._told = text
            self._say(f"{text} ({waited_s:.0f} s)")

    def _say(self, text: str) -> None:
        typer.echo(f"slicewise: {text}")


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _of_cluster(ray_folder: str) -> list[psutil.Process]:
    """Processes with our environment, wherever they hang: Ray's daemons are nobody's child."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("RAY_TMPDIR") == ray_folder:
                found.append(process)
    return found
