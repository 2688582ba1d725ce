"""The arguments of vLLM that a configuration leaves open, and what the installed vLLM takes.

Works on the raw YAML values, as `serving.config.rules`. Pure.
"""

import posixpath
import re
from collections.abc import Iterator, Mapping

from serving.config.rules import Raw, mapping_in
from serving.config.schema import name_hint, shown
from serving.config.vllm.vllm_args import VllmArgs, kind_of
from serving.domain.errors import Problem

_ONE_ENGINE = (
    "for more engines raise `replicas`, or `num_engines` of the slice, which they then share"
)
_HOSTS = "the slice replica spreads the engine over the hosts of its slice"
_NO_PROMPTS = "Slicewise logs neither prompts nor generated text"
_EDGE = "the gateway and the Serve proxy are the server; see http_options"
_ALL_OF_OPENAI = "the gateway serves the whole OpenAI surface"
_ANY_ENGINE = "any of several engines may get a request, so each gets all of its images"

# The arguments of vLLM that are not open, by section and complaint, each with the reason. A name
# that ends in * stands for all names that begin so.
CLOSED_ARGS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "engine_args": {
        "set by Slicewise": {
            "model": "from `source`",
            "served_model_name": "from `name`",
            "scheduler_cls": "its scheduler is what lets requests resume",
            "worker_cls": "its worker is what lets requests resume",
            "enable_log_requests": _NO_PROMPTS,
            "disable_log_stats": "the load that engines report is read from these statistics",
            "data_parallel_*": f"{_ONE_ENGINE}; `data_parallel_size` is open for vllm-tpu",
            "enable_elastic_ep": _ONE_ENGINE,
            "elastic_ep_max_dp_size": _ONE_ENGINE,
            "distributed_executor_backend": _HOSTS,
            "nnodes": _HOSTS,
            "node_rank": _HOSTS,
            "master_addr": _HOSTS,
            "master_port": _HOSTS,
            "kv_events_config": "engines on one host would publish on the same address",
            "mm_processor_cache_type": _ANY_ENGINE,
            "mm_shm_cache_max_object_size_mb": _ANY_ENGINE,
        },
        "refused": {
            "hf_token": "put HF_TOKEN into the environment of the hosts: Ray's dashboard shows "
            "this file",
            "tokens_only": _ALL_OF_OPENAI,
        },
    },
    "frontend_args": {
        "set by Slicewise": {
            "enable_log_requests": _NO_PROMPTS,
            "enable_log_outputs": _NO_PROMPTS,
            "enable_log_deltas": _NO_PROMPTS,
            "max_log_len": _NO_PROMPTS,
        },
        "refused": {
            "host": _EDGE,
            "port": _EDGE,
            "ssl_*": _EDGE,
            "uvicorn*": _EDGE,
            "disable_uvicorn*": _EDGE,
            "root_path": _EDGE,
            "middleware": _EDGE,
            "allowed_*": _EDGE,
            "allow_credentials": _EDGE,
            "headless": _EDGE,
            "api_server_count": "use gateway.replicas",
            "api_key": "use auth.keys_file or auth.keys_env",
            "lora_modules": "use lora_adapters",
            "tokens_only": _ALL_OF_OPENAI,
            "enable_scale_out": "the token link takes the place of these endpoints",
        },
    },
}

# Of what is closed, what is a layout of one engine's chips on TPU, and open there.
_OPEN_ON_TPU = frozenset({"data_parallel_size"})
# The option that registers parsers vLLM does not know by itself.
_PARSER_PLUGINS = {
    "tool_call_parser": "tool_parser_plugin",
    "reasoning_parser": "reasoning_parser_plugin",
}


# A host as vLLM compares it with that of a URL: whole, in small letters, without scheme and port.
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_DOMAINS_ALLOWED = (
    "a list of host names, such as [images.example.com]; [] lets clients send data: URLs alone"
)


def vllm_problems(path: str, model: Raw, vllm_args: VllmArgs | None) -> Iterator[Problem]:
    """Yields the arguments of one model that are closed, or that vLLM would refuse.

    Without `vllm_args`, what the installed vLLM takes is not checked.
    """
    yield from _tool_choice_problems(path, model)
    yield from _reasoning_problems(path, model)
    yield from _media_problems(path, mapping_in(model, "engine_args"))
    yield from _arg_problems(path, model, vllm_args)


def _tool_choice_problems(path: str, model: Raw) -> Iterator[Problem]:
    """Yields automatic tool choice without its parser, or the reverse."""
    args = mapping_in(model, "frontend_args")
    parser, automatic = args.get("tool_call_parser"), args.get("enable_auto_tool_choice")
    if parser is not None and automatic is not True:
        yield Problem(
            f"{path}.frontend_args.tool_call_parser",
            "without automatic tool choice it is never used",
            "allowed: only with enable_auto_tool_choice: true",
            shown("tool_call_parser", parser),
        )
    if automatic is True and parser is None:
        yield Problem(
            f"{path}.frontend_args.tool_call_parser",
            "missing",
            "required by enable_auto_tool_choice: true",
        )


def _reasoning_problems(path: str, model: Raw) -> Iterator[Problem]:
    """Yields a second reasoning parser, because vLLM 0.32 fails at start when it finds two."""
    args = mapping_in(model, "engine_args")
    for name in ("reasoning_parser", "reasoning_parser_plugin"):
        if args.get(name) and isinstance(args.get("structured_outputs_config"), dict):
            yield Problem(
                f"{path}.engine_args.{name}",
                "structured_outputs_config is given as well",
                f"allowed: {name} within structured_outputs_config",
                shown(name, args[name]),
            )


def _media_problems(path: str, args: Raw) -> Iterator[Problem]:
    """Yields sources of media that no client could use, or that have everything in them."""
    domains = args.get("allowed_media_domains")
    for at, domain in enumerate(domains if isinstance(domains, list) else ()):
        if isinstance(domain, str) and not _HOST.fullmatch(domain):
            yield Problem(
                f"{path}.engine_args.allowed_media_domains[{at}]",
                "no host name",
                "allowed: small letters, digits, `.` and `-`, without scheme, port or `*`",
                shown("domain", domain),
            )
    folder = args.get("allowed_local_media_path")
    if isinstance(folder, str) and folder and not _is_folder_below_root(folder):
        yield Problem(
            f"{path}.engine_args.allowed_local_media_path",
            "clients may read every file in it",
            "allowed: an absolute path of a folder below the root, or nothing",
            shown("allowed_local_media_path", folder),
        )


def _is_folder_below_root(folder: str) -> bool:
    return folder.startswith("/") and posixpath.normpath(folder).strip("/") != ""


def unbounded_media_problem(path: str, engine_args: Raw) -> Problem | None:
    """Returns what is wrong with the `engine_args` of a model that takes media; `None` if nothing.

    vLLM takes a missing list, and an empty one, for leave to fetch whatever a client names.
    """
    if engine_args.get("allowed_media_domains") is not None or takes_text_alone(engine_args):
        return None
    return Problem(
        f"{path}.allowed_media_domains",
        "missing, and the model takes images, video or audio: clients would make the gateway "
        "fetch any URL that it reaches",
        f"needed: {_DOMAINS_ALLOWED}",
    )


def takes_text_alone(engine_args: Raw) -> bool:
    """Returns whether a multi-modal model is told to take text alone, as far as `engine_args` say.

    vLLM also knows which kinds of media a model has, and whether each of them has a limit of 0.
    """
    return engine_args.get("language_model_only") is True


def _arg_problems(path: str, model: Raw, vllm_args: VllmArgs | None) -> Iterator[Problem]:
    for section in CLOSED_ARGS:
        args = mapping_in(model, section)
        for name, value in args.items():
            if not isinstance(name, str) or kind_of(value) == "something else":
                continue
            is_open = name in _OPEN_ON_TPU and model.get("engine") == "vllm-tpu"
            verdict = None if is_open else _closed(section, name, vllm_args)
            if verdict is None and vllm_args is not None:
                verdict = _unaccepted(section, name, args, vllm_args)
            if verdict is not None:
                yield Problem(f"{path}.{section}.{name}", *verdict, value=shown(name, value))


def _closed(section: str, name: str, vllm_args: VllmArgs | None) -> tuple[str, str] | None:
    """Returns complaint and reason; `None` if Slicewise leaves this argument open."""
    for complaint, reasons in CLOSED_ARGS[section].items():
        for pattern, reason in reasons.items():
            if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])):
                return complaint, reason
    if section == "frontend_args" and vllm_args is not None and name in vllm_args.server:
        return "refused", _EDGE
    return None


def _unaccepted(section: str, name: str, args: Raw, vllm_args: VllmArgs) -> tuple[str, str] | None:
    """Returns complaint and what is allowed; `None` if vLLM takes this argument and value."""
    sections = {"engine_args": vllm_args.engine, "frontend_args": vllm_args.frontend}
    spec = sections[section].get(name)
    if spec is None:
        elsewhere = [other for other, known in sections.items() if name in known]
        if elsewhere:
            return "unknown key", f"allowed: in {elsewhere[0]}"
        is_open = [known for known in sections[section] if not _closed(section, known, vllm_args)]
        return "unknown key", name_hint(name, is_open)
    value = args[name]
    if not spec.accepts(value):
        return "not allowed", f"allowed: {spec.allowed}"
    parsers = vllm_args.parsers.get(name)
    if parsers and value and value not in parsers and not args.get(_PARSER_PLUGINS[name]):
        return "unknown parser", name_hint(str(value), parsers)
    return None
