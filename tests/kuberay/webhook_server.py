"""The TPU webhook over HTTPS, asked by the API server as the recorded configuration says."""

import base64
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml
from control_plane.api import Api, RefusedByServerError, reference, wait
from control_plane.server import ControlPlane

from autoscaling.provisioning.raycluster import CLUSTER_LABEL, GROUP_LABEL

from .recordings import FOLDER
from .webhook import admitted

Json = dict[str, Any]

_PROBE = "tpu-webhook-probe"


class Webhook:
    """Registered with a control plane, for pods of all namespaces. A context manager.

    `stop` ends the server and leaves it registered: from then on the API server refuses pods.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._api = plane.api
        self._ca = base64.b64encode(plane.ca_file.read_bytes()).decode()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*plane.authority.server())
        self._port = 0
        self._server: ThreadingHTTPServer | None = None

    def __enter__(self) -> "Webhook":
        self.start()
        self._api.apply(self._configuration())
        wait(self._is_asked, "the API server asks the webhook")
        return self

    def __exit__(self, *_: object) -> None:
        self._api.delete(self._configuration())
        wait(lambda: not self._is_asked(), "the API server asks the webhook no more")
        self.stop()

    def start(self) -> None:
        """Answers, at the address that it had before."""
        self._server = _Server(("127.0.0.1", self._port), _handler(self._api))
        self._port = self._server.server_address[1]
        self._server.socket = self._context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="webhook").start()

    def stop(self) -> None:
        """Does not answer: connections are refused."""
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    def _configuration(self) -> Json:
        """The recorded one, but for the address."""
        recorded = yaml.safe_load_all((FOLDER / "webhook-configuration.yaml").read_text())
        body: Json = next(
            each for each in recorded if each["kind"] == "MutatingWebhookConfiguration"
        )
        url = f"https://127.0.0.1:{self._port}/mutate"
        for each in body["webhooks"]:
            each["clientConfig"] = {"url": url, "caBundle": self._ca}
        return body

    def _is_asked(self) -> bool:
        """The API server goes by a new configuration only after a moment."""
        pod = reference("Pod", "default", _PROBE)
        pod["metadata"]["labels"] = {
            "app.kubernetes.io/name": "kuberay",
            GROUP_LABEL: _PROBE,
            CLUSTER_LABEL: _PROBE,
        }
        limits = {"google.com/tpu": "4"}
        container = {"name": "probe", "image": "none", "resources": {"limits": limits}}
        selector = {"cloud.google.com/gke-tpu-topology": "2x2"}
        pod["spec"] = {"containers": [container], "nodeSelector": selector}
        try:
            made = self._api.create(pod, is_trial=True)
        except RefusedByServerError:
            # There is no service account yet, or the webhook is just starting.
            return False
        return "env" in made["spec"]["containers"][0]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is its own affair."""


def _handler(api: Api) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps(_answer(api, review)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def _answer(api: Api, review: Json) -> Json:
    """An AdmissionReview with what it changes, as a JSON patch."""
    request = review["request"]
    pod: Json = request["object"]
    labels = pod["metadata"].get("labels", {})
    group = {name: labels[name] for name in (CLUSTER_LABEL, GROUP_LABEL) if name in labels}
    response: Json = {"uid": request["uid"], "allowed": True}
    if len(group) == 2:
        others = [
            other
            for other in api.list("Pod", request["namespace"], group)
            if "deletionTimestamp" not in other["metadata"]
        ]
        changed = admitted(pod, others)
        patch = [
            {"op": "replace", "path": "/metadata/labels", "value": changed["metadata"]["labels"]},
            {"op": "replace", "path": "/spec", "value": changed["spec"]},
        ]
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(patch).encode()).decode()
    return {"apiVersion": review["apiVersion"], "kind": "AdmissionReview", "response": response}
