"""Decides how a source's weights reach an engine, and what that needs.

Owns the choice for each kind of source, and refusals. Does not own loading, which is vLLM's, nor
volumes in manifests. Pure.

Sources: vLLM 0.32.0 `transformers_utils/runai_utils.py`, `config/vllm.py` and the loader
`runai_streamer`; tpu-inference 0.32.0 `models/common/model_loader.py`. Read 2026-11-22.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from serving.domain.errors import Problem


class SourceKind(StrEnum):
    """The kinds of places that weights come from."""

    FOLDER = "folder"  # a disk, or a bucket that a volume mounts (GCS FUSE)
    BUCKET = "bucket"  # streamed from an address such as gs://
    HUGGING_FACE = "hugging_face"  # an id; downloaded into the cache of each host


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The way one source is loaded, with its needs on each host and on each gateway."""

    kind: SourceKind
    engine_args: Mapping[str, object]
    needs: tuple[str, ...]
    reason: str


_STREAMED = ("gs://", "s3://", "az://")
_STREAMERS = ("runai_streamer", "runai_streamer_sharded")
_STREAMER_OPTIONS = ("distributed", "concurrency", "memory_limit")


def kind_of_source(source: str) -> SourceKind:
    """Returns what a source is, by its form: an address, a path, or an id."""
    if source.lower().startswith(_STREAMED):
        return SourceKind.BUCKET
    return SourceKind.FOLDER if source.startswith(("/", "./", "../")) else SourceKind.HUGGING_FACE


def load_plan(source: str, args: Mapping[str, object]) -> LoadPlan:
    """Returns how vLLM loads `source` under these engine arguments.

    `source_problems` has passed them. A relative path without a dot looks the same as a Hugging
    Face id; a folder wins if one is found (`model_source`).
    """
    kind = kind_of_source(source)
    if kind is SourceKind.BUCKET:
        return LoadPlan(
            kind,
            {"load_format": args.get("load_format", "runai_streamer")},
            (
                "the package runai-model-streamer with the part of the cloud (gcs or s3), on hosts "
                "and gateways",
                "leave to read the bucket, on hosts and gateways",
                "weights as safetensors beside config.json and tokenizer",
            ),
            "streamed from the bucket into memory, past the disk",
        )
    if kind is SourceKind.FOLDER:
        return LoadPlan(
            kind, {}, ("the folder at the same path on hosts and gateways",), "read from the folder"
        )
    return LoadPlan(
        kind, {}, ("the hub or a filled HF_HOME, on hosts and gateways",), "found by its id"
    )


def source_problems(path: str, source: str, args: Mapping[str, object]) -> Iterator[Problem]:
    """Yields what vLLM would refuse, or load from elsewhere. `path` is that of the model."""
    load_format = args.get("load_format", "auto")
    kind = kind_of_source(source)
    if kind is SourceKind.BUCKET:
        if load_format not in ("auto", *_STREAMERS):
            yield Problem(
                f"{path}.engine_args.load_format",
                "does not read from a bucket",
                f"allowed with a source in a bucket: leave it out, or {', '.join(_STREAMERS)}",
                str(load_format),
            )
        yield from _option_problems(path, args)
    elif "://" in source:
        allowed = "allowed: a folder, a Hugging Face id, or gs://, s3://, az:// addresses"
        yield Problem(f"{path}.source", "no such kind of address", allowed, source)


def _option_problems(path: str, args: Mapping[str, object]) -> Iterator[Problem]:
    options = args.get("model_loader_extra_config")
    if not isinstance(options, Mapping):
        return
    for name in options:
        if name not in _STREAMER_OPTIONS:
            allowed = f"allowed: {', '.join(_STREAMER_OPTIONS)}"
            at = f"{path}.engine_args.model_loader_extra_config.{name}"
            yield Problem(at, "unknown to the streamer", allowed)
