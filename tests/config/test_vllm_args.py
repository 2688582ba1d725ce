"""Reading vLLM's arguments from its source: against a small made-up vLLM, and the installed one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from serving.config.vllm.vllm_args import ArgSpec, VllmArgs, installed_vllm_args, read_vllm_args
from serving.domain.errors import UnsupportedVllmError

SOURCES = {
    "engine/arg_utils.py": """
from vllm.config.model import DType, Weird
from vllm.nowhere import Missing

@dataclass
class EngineArgs:
    model: str = "x"
    _private: int = 0
    max_len: int | None = None
    share: float = 0.9
    eager: bool = False
    names: list[str] | None = None
    quoted: "dict[str, int] | None" = None
    dtype: DType | torch.dtype = "auto"
    kind: DType = "auto"
    scheduler: str | type[object] | None = None
    weird: Weird = None
    missing: Missing = None

    def method(self): ...

class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
""",
    "config/model.py": """
Base = Literal["auto", "half"]
DType = Literal[Base, "float32", 2]
class Weird: ...
""",
    "entrypoints/launchers/cli_args.py": """
class BaseFrontendArgs:
    tool_call_parser: str | None = None
class FrontendArgs(BaseFrontendArgs):
    port: int = 8000
""",
    "tool_parsers/__init__.py": '_TOOL_PARSERS_TO_REGISTER = {"hermes": (), "abc": ()}',
    "model_executor/models/registry.py": '_MULTIMODAL_MODELS = {"SeesToo": (), "Hears": ()}',
    "reasoning/__init__.py": '_REASONING_PARSERS_TO_REGISTER: dict = {"qwen3": ()}',
}


def write_package(folder: Path, sources: dict[str, str]) -> Path:
    for name, text in sources.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture(scope="module")
def vllm_args(tmp_path_factory: pytest.TempPathFactory) -> VllmArgs:
    return read_vllm_args(write_package(tmp_path_factory.mktemp("vllm"), SOURCES))


def test_names_come_from_both_engine_classes_without_private_ones(vllm_args: VllmArgs) -> None:
    assert set(vllm_args.engine) == {
        *("model", "max_len", "share", "eager", "names", "quoted", "dtype", "kind", "scheduler"),
        *("weird", "missing", "enable_log_requests"),
    }


def test_frontend_options_are_split_from_those_of_a_server(vllm_args: VllmArgs) -> None:
    assert set(vllm_args.frontend) == {"tool_call_parser"}
    assert set(vllm_args.server) == {"port"}


def test_architectures_that_take_more_than_text_are_read(vllm_args: VllmArgs) -> None:
    assert vllm_args.multimodal == ("Hears", "SeesToo")


def test_parser_names_are_read(vllm_args: VllmArgs) -> None:
    assert vllm_args.parsers == {
        "tool_call_parser": ("abc", "hermes"),
        "reasoning_parser": ("qwen3",),
    }


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("model", ["x"], [1, None, True]),
        ("max_len", [1, None], ["1", 1.5, True]),
        ("share", [0.5, 1], ["0.5", None, True]),
        ("eager", [True], [1, "true", None]),
        ("names", [["a"], None], ["a", {}]),
        ("quoted", [{"a": 1}, None], ["a", []]),
        ("kind", ["auto", "half", "float32", 2], ["bf16", 2.0, True, None]),
        ("scheduler", ["a.B", None], [1]),
        # A type that is not plain JSON is vLLM's to check.
        ("dtype", ["bf16", 7], []),
        ("weird", [{"a": 1}, 7], []),
        ("missing", [7], []),
    ],
)
def test_values_are_checked_by_the_annotation(
    vllm_args: VllmArgs, name: str, accepted: list[object], refused: list[object]
) -> None:
    spec = vllm_args.engine[name]
    assert [value for value in accepted if not spec.accepts(value)] == []
    assert [value for value in refused if spec.accepts(value)] == []


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (ArgSpec(frozenset({"null", "an integer"})), "an integer or null"),
        (ArgSpec(frozenset({"null"}), ("a", 2)), "one of a, 2 or null"),
        (ArgSpec(), "whatever vLLM accepts"),
    ],
)
def test_allowed_is_said_in_words(spec: ArgSpec, words: str) -> None:
    assert spec.allowed == words


@pytest.mark.parametrize("missing", ["engine/arg_utils.py", "tool_parsers/__init__.py"])
def test_unknown_source_shape_is_an_error_that_names_the_file(tmp_path: Path, missing: str) -> None:
    package = write_package(tmp_path, SOURCES)
    (package / missing).write_text("")
    with pytest.raises(UnsupportedVllmError, match=missing):
        read_vllm_args(package)
    (package / missing).unlink()
    with pytest.raises(UnsupportedVllmError, match=missing):
        read_vllm_args(package)


# Runs apart from the tests because importing vLLM costs ten seconds and changes the process.
ASK_VLLM = """
import dataclasses, json
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import BaseFrontendArgs, FrontendArgs
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from serving.config.vllm.vllm_args import installed_vllm_args

read = installed_vllm_args()
names = lambda cls: {field.name for field in dataclasses.fields(cls)}
print(json.dumps({
    "engine": sorted(n for n in names(AsyncEngineArgs) if not n.startswith("_")),
    "frontend": sorted(names(BaseFrontendArgs)),
    "server": sorted(names(FrontendArgs) - names(BaseFrontendArgs)),
    "tool_call_parser": sorted(ToolParserManager.list_registered()),
    "reasoning_parser": sorted(ReasoningParserManager.list_registered()),
    # vLLM annotates some fields `int` and lets None stand for "decide later".
    "refused_defaults": [
        field.name for field in dataclasses.fields(AsyncEngineArgs)
        if field.name in read.engine
        and field.default not in (None, dataclasses.MISSING)
        and not read.engine[field.name].accepts(field.default)
    ],
}))
"""


@pytest.mark.imports_vllm
def test_reading_agrees_with_the_installed_vllm() -> None:
    read = installed_vllm_args()
    assert read is not None
    result = subprocess.run(
        [sys.executable, "-c", ASK_VLLM], capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout.splitlines()[-1]) == {
        "engine": sorted(read.engine),
        "frontend": sorted(read.frontend),
        "server": sorted(read.server),
        **{name: list(parsers) for name, parsers in read.parsers.items()},
        "refused_defaults": [],
    }
