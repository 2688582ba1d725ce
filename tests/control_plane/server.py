"""etcd and kube-apiserver on loopback, with ports, certificates and a folder of their own.

Nothing else of a control plane: no controller, so nothing is garbage-collected and no quota is
counted; no scheduler, so pods stay where they are made.
"""

import contextlib
import ctypes
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

import pytest
from kuberay.certificates import Authority

from deployments.serve import free_ports

from .api import Api

_READY_WITHIN_S = 120.0
_ENDED_WITHIN_S = 20.0
_SHOWN_LOG = 2000
_PR_SET_PDEATHSIG = 1


class ControlPlane:
    """Starts the two from the binaries in `assets`. A context manager; ends both whatever happens.

    `api` is a cluster administrator's.
    """

    api: Api

    def __init__(self, assets: Path) -> None:
        self._assets = assets
        self._stack = contextlib.ExitStack()
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "ControlPlane":
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slicewise-kube-"))
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.authority = Authority(self.folder)
        certificate, key = self.authority.server()
        signer, signing_key = self.authority.client("service-accounts")
        token = secrets.token_hex(16)
        tokens = self.folder / "tokens.csv"
        tokens.write_text(f'{token},admin,admin,"system:masters"\n')
        etcd_port, peer_port, port = free_ports(3)
        etcd_url = f"http://127.0.0.1:{etcd_port}"
        self._run(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={etcd_url}",
            f"--advertise-client-urls={etcd_url}",
            f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
            "--unsafe-no-fsync",
        )
        self._run(
            "kube-apiserver",
            f"--etcd-servers={etcd_url}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={port}",
            "--endpoint-reconciler-type=none",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={signer}",
            f"--service-account-signing-key-file={signing_key}",
        )
        self.api = Api(f"https://127.0.0.1:{port}", token, self.authority.ca_file)
        self._stack.callback(self.api.close)
        deadline_s = time.monotonic() + _READY_WITHIN_S
        while not self.api.is_ready():
            ended = [name for name, process in self._running.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline_s:
                pytest.fail(self._words(ended))
            time.sleep(0.2)

    def _run(self, name: str, *options: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(self._assets / name), *options],
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Also where the tests themselves are killed.
                preexec_fn=_end_with_parent,
            )
        self._running[name] = process
        self._stack.callback(_end, process)

    def _words(self, ended: list[str]) -> str:
        """Why there is no server."""
        names = ended or list(self._running)
        logs = [f"{name}: {self._log(name)}" for name in names]
        return "\n".join([f"not ready; ended: {', '.join(ended) or 'none'}", *logs])

    def _log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-_SHOWN_LOG:]


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_ENDED_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
