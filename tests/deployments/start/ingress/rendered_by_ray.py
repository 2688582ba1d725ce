"""HAProxy's configuration as Ray Serve's own code writes it, for gateways of ours."""

from collections.abc import Sequence
from pathlib import Path

from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions


def write_as_ray_does(
    folder: Path, port: int, gateways: Sequence[int], admin_ports: tuple[int, int] = (19101, 18404)
) -> Path:
    """Writes `haproxy.cfg` into the folder. `gateways` are the ports of those that listen."""
    file = folder / "haproxy.cfg"
    servers = [ServerConfig(name=f"gw-{at}", host="127.0.0.1", port=at) for at in gateways]
    backend = BackendConfig(
        name="http-default", path_prefix="/", app_name="default", servers=servers
    )
    settings = HAProxyConfig(
        socket_path=str(folder / "admin"),
        server_state_base=str(folder),
        server_state_file=str(folder / "state"),
        metrics_socket_path=str(folder / "metrics"),
        metrics_port=admin_ports[0],
        stats_port=admin_ports[1],
        http_options=HTTPOptions(host="127.0.0.1", port=port),
        hard_stop_after_s=2,
        nbthread=1,
        has_received_routes=True,
        has_received_servers=True,
    )
    api = HAProxyApi(settings, {backend.name: backend}, str(file))
    (folder / "state").touch()
    api._generate_config_file_internal()
    return file
