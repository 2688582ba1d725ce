"""A Kubernetes control plane on loopback, with ports, certificates and a folder of its own.

Real: etcd and kube-apiserver; on request kube-controller-manager (garbage collection, quotas,
endpoints, stateful sets) and kube-scheduler. In the place of kubelets KWOK: see `kubelet.py`.
Nothing makes nodes, and nothing runs in a container.
"""

import contextlib
import ctypes
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

from deployments.start.ports import free_ports

from .api import Api
from .assets import ACTING
from .certificates import Authority
from .kubectl import kubeconfig
from .kubelet import NODE_ADDRESS, stages

_READY_WITHIN_S = 120.0
_ENDED_WITHIN_S = 20.0
_SHOWN_LOG = 2000
_PR_SET_PDEATHSIG = 1


class NotStartedError(RuntimeError):
    """A program ended, or is not ready in time; the message has the end of its log."""


class ControlPlane:
    """Starts the programs from `assets`. A context manager; ends all of them whatever happens.

    `acting` are those of `ACTING` that run beside etcd and the API server, which gets
    `server_options` besides its own. `api` is a cluster administrator's, and so is `kubeconfig`,
    which kubectl reads; `authority` signs certificates that the server and its clients trust.
    `etcd_url` needs no credentials.

    Raises:
        NotStartedError: when entered.
    """

    api: Api
    kubeconfig: Path

    def __init__(
        self, assets: Path, acting: Collection[str] = (), server_options: Collection[str] = ()
    ) -> None:
        if unknown := set(acting) - set(ACTING):
            raise ValueError(f"acting={sorted(unknown)}: allowed are {', '.join(ACTING)}")
        self._assets = assets
        self._acting = acting
        self._server_options = server_options
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

    @property
    def ca_file(self) -> Path:
        """Whom a client has to trust."""
        return self.authority.ca_file

    def account(self, namespace: str, name: str) -> Api:
        """The view of a service account, with the rights that it was given and no others.

        Its token is asked for as for a pod. The caller closes the client, or the end of the
        control plane does.
        """
        client = Api(self.url, self.api.request_token(namespace, name), self.ca_file)
        self._stack.callback(client.close)
        return client

    def _start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slicewise-kube-"))
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.authority = Authority(self.folder)
        self._signer, self._signing_key = self.authority.client("service-accounts")
        token = secrets.token_hex(16)
        (self.folder / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
        etcd_port, peer_port, port, *others = free_ports(3 + len(ACTING))
        self.url = f"https://127.0.0.1:{port}"
        self.etcd_url = f"http://127.0.0.1:{etcd_port}"
        self._run_etcd(etcd_port, peer_port)
        self._run_api_server(port, etcd_port)
        self.api = Api(self.url, token, self.ca_file)
        self._stack.callback(self.api.close)
        self._wait_ready()
        self.kubeconfig = self.folder / "kubeconfig"
        self.kubeconfig.write_text(kubeconfig(self.url, token, self.ca_file))
        for name, own_port in zip(ACTING, others, strict=True):
            if name in self._acting:
                self._run(name, f"--kubeconfig={self.kubeconfig}", *self._options(name, own_port))

    def _run_etcd(self, port: int, peer_port: int) -> None:
        self._run(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{port}",
            f"--advertise-client-urls=http://127.0.0.1:{port}",
            f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
            "--unsafe-no-fsync",
        )

    def _run_api_server(self, port: int, etcd_port: int) -> None:
        certificate, key = self.authority.server()
        self._run(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{etcd_port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={port}",
            "--endpoint-reconciler-type=none",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--client-ca-file={self.ca_file}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self._signer}",
            f"--service-account-signing-key-file={self._signing_key}",
            *self._server_options,
        )

    def _options(self, name: str, port: int) -> list[str]:
        fast = ["--leader-elect=false", "--kube-api-qps=200", "--kube-api-burst=400"]
        if name == "kube-scheduler":
            return [*fast, f"--secure-port={port}", "--bind-address=127.0.0.1"]
        if name == "kwok":
            config = self.folder / "kwok.yaml"
            config.write_text(stages())
            return [
                f"--config={config}",
                "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
                f"--server-address=127.0.0.1:{port}",
                # Of every node: pods are told it.
                f"--node-ip={NODE_ADDRESS}",
                # Without leases nodes are lost after 40 s: a heartbeat comes once in minutes.
                "--node-lease-duration-seconds=40",
            ]
        return [
            *fast,
            f"--secure-port={port}",
            "--bind-address=127.0.0.1",
            f"--service-account-private-key-file={self._signing_key}",
            f"--root-ca-file={self.ca_file}",
            # Nodes get their address ranges from whoever makes them, and nothing has a disk.
            "--controllers=*,-node-ipam-controller,-persistentvolume-attach-detach-controller",
        ]

    def _wait_ready(self) -> None:
        deadline_s = time.monotonic() + _READY_WITHIN_S
        while not self.api.is_ready():
            ended = [name for name, process in self._running.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline_s:
                raise NotStartedError(self._words(ended))
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
        logs = [f"{name}: {self.log(name)}" for name in names]
        return "\n".join([f"not ready; ended: {', '.join(ended) or 'none'}", *logs])

    def log(self, name: str) -> str:
        """The end of what a program has printed."""
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
