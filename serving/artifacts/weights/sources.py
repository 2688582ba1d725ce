"""Decides how a source's weights reach an engine.

Owns which sources are streamed, and refusals. Does not own loading, which is vLLM's, nor volumes in
manifests. Pure.

Sources: vLLM 0.32.0 `transformers_utils/runai_utils.py`, `config/vllm.py` and the loader
`runai_streamer`; tpu-inference 0.32.0 `models/common/model_loader.py`. Read 2026-11-22.
"""

from collections.abc import Iterator, Mapping

from serving.domain.errors import Problem

STREAMER = "runai_streamer"
_STREAMED = ("gs://", "s3://", "az://")
# vLLM's names of its loaders of streamed weights; the first is the one for any engine.
_STREAMERS = (STREAMER, "runai_streamer_sharded")
_STREAMER_OPTIONS = ("distributed", "concurrency", "memory_limit")


def is_streamed(source: str) -> bool:
    """Returns whether a source is a bucket that is streamed from its address, past the disk.

    All others are read as files: a folder, or a Hugging Face id in the cache of each host.
    """
    return source.lower().startswith(_STREAMED)


def source_problems(path: str, source: str, args: Mapping[str, object]) -> Iterator[Problem]:
    """Yields what vLLM would refuse, or load from elsewhere. `path` is that of the model."""
    load_format = args.get("load_format", "auto")
    if is_streamed(source):
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
