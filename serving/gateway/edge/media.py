"""Fits vLLM's handling of images, video and audio to several gateways and several engines.

vLLM's frontend and its one engine mirror a cache: a medium travels once, and its hash from then on.
Here any engine may get a request, and another one continues it, so each request carries all of its
media. The frontend still keeps what it has processed.

Also owns what the gateway fetches for clients. Works on vLLM's objects as they come.
"""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from serving.config.vllm.vllm_rules import unbounded_media_problem


# In place of vLLM's own, which takes an empty list of hosts for leave to fetch from anywhere.
@MEDIA_CONNECTOR_REGISTRY.register("http")
class BoundedMediaConnector(MediaConnector):
    """Gets the media of requests: from listed hosts, from one folder, and out of `data:` URLs.

    Whatever it refuses is a `ValueError`, which the client gets as a 400.
    """

    def _assert_url_in_allowed_media_domains(self, url_spec: Any) -> None:
        allowed = self.allowed_media_domains
        if url_spec.hostname not in allowed:
            hosts = f"URLs of {', '.join(allowed)}, and " if allowed else ""
            raise ValueError(
                f"media of {str(url_spec.hostname)[:80]!r} are not fetched here; "
                f"allowed: {hosts}data: URLs"
            )

    def _load_file_url(self, *args: Any) -> Any:
        if self.allowed_local_media_path is None:
            raise ValueError("file: URLs are not read here; allowed: data: URLs")
        return super()._load_file_url(*args)

    def _load_data_url(self, *args: Any) -> Any:
        try:
            return super()._load_data_url(*args)
        except NotImplementedError as error:
            raise ValueError(f"data: URL: {error}") from error


def fit_frontend(config: Any, engine_args: Mapping[str, Any]) -> None:
    """Changes vLLM's configuration of a frontend; nothing, if its model takes text alone.

    Raises:
        ValueError: it is not said what clients may have fetched, or a folder is not there.
    """
    if not config.model_config.supports_multimodal_inputs:
        return
    problem = unbounded_media_problem("engine_args", engine_args)
    if problem is not None:
        raise ValueError(str(problem))
    folder = engine_args.get("allowed_local_media_path")
    if folder and not Path(folder).is_dir():
        raise ValueError(
            f"engine_args.allowed_local_media_path: no folder at a gateway (value {folder!r}); "
            "allowed: a folder that every gateway has"
        )
    # More than one frontend is what makes vLLM keep processed media here and send them whole.
    config.parallel_config._api_process_count = 2


def name_apart(renderer: Any) -> None:
    """Makes names of media that are not hashed others than in any other process, forks included."""
    # Part of the name. vLLM counts its frontends, we do not.
    renderer.api_process_rank = secrets.token_hex(8)


def fit_renderer(renderer: Any) -> None:
    """Makes a renderer name media by their content, or by what no other gateway names them.

    Engines keep encoded media by these names, for the requests of all clients and gateways.
    """
    name_apart(renderer)
    process = renderer._process_mm_uuids

    def process_unnamed(data: Any, items: Any, names: Mapping[str, Any], request_id: str) -> Any:
        for kind, of_kind in names.items():
            given = next((name for name in of_kind or () if name is not None), None)
            if given is not None:
                raise ValueError(
                    f"uuid of {kind}: {str(given)[:40]!r} cannot be set here, because another "
                    "client's may be the same; leave it out, and send the medium itself."
                )
        return process(data, items, names, request_id)

    renderer._process_mm_uuids = process_unnamed
