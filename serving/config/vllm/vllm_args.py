"""The arguments of the installed vLLM: their names and simple types, read from its source.

Importing vLLM costs seconds and pulls in torch, so its source is parsed instead. Owns that reading.
Does not own which arguments Slicewise refuses (`vllm_rules`). A type that is not made of plain JSON
types and literals is left unchecked here; vLLM checks it when the engine starts.
"""

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from serving.domain.errors import UnsupportedVllmError

_ENGINE_ARGS = Path("engine/arg_utils.py")
_FRONTEND_ARGS = Path("entrypoints/launchers/cli_args.py")
_PARSER_TABLES = {
    "tool_call_parser": (Path("tool_parsers/__init__.py"), "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning_parser": (Path("reasoning/__init__.py"), "_REASONING_PARSERS_TO_REGISTER"),
}
_MODELS = Path("model_executor/models/registry.py")
_JSON_KINDS = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "list": "a list",
    "set": "a list",
    "tuple": "a list",
    "dict": "a mapping",
}


@dataclass(frozen=True, slots=True)
class ArgSpec:
    """The values of one argument: any JSON value of `kinds`, or one of `choices`.

    Both empty means that the type is vLLM's own and is not checked here.
    """

    kinds: frozenset[str] = frozenset()
    choices: tuple[object, ...] = ()

    def accepts(self, value: object) -> bool:
        """Returns whether `value`, as parsed from YAML, can be right."""
        if not self.kinds and not self.choices:
            return True
        # Membership alone would take True for 1.
        if any(value == choice and type(value) is type(choice) for choice in self.choices):
            return True
        kind = kind_of(value)
        return kind in self.kinds or (kind == "an integer" and "a number" in self.kinds)

    @property
    def allowed(self) -> str:
        """The allowed values as text."""
        one_of = ["one of " + ", ".join(map(str, self.choices))] if self.choices else []
        kinds = sorted(self.kinds, key=lambda kind: (kind == "null", kind))
        return " or ".join([*one_of, *kinds]) or "whatever vLLM accepts"


@dataclass(frozen=True, slots=True)
class VllmArgs:
    """The arguments of one vLLM installation, by Python name.

    `frontend` is what any OpenAI frontend takes; `server` what only a server of its own takes.
    `parsers` holds the built-in parser names of the arguments that choose a parser, `multimodal`
    the architectures of models that take more than text and generate.
    """

    engine: Mapping[str, ArgSpec]
    frontend: Mapping[str, ArgSpec]
    server: Mapping[str, ArgSpec] = field(default_factory=dict)
    parsers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    multimodal: tuple[str, ...] = ()


def kind_of(value: object) -> str:
    """Returns the JSON kind of a value; "something else" when JSON has no such thing."""
    if value is None:
        return "null"
    return _JSON_KINDS.get(type(value).__name__, "something else")


def installed_vllm_args() -> VllmArgs | None:
    """Returns the arguments of the installed vLLM; `None` when it is not installed here.

    Raises:
        UnsupportedVllmError: vLLM is installed in a version whose source cannot be read.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return read_vllm_args(Path(spec.submodule_search_locations[0]))


def read_vllm_args(package: Path) -> VllmArgs:
    """Returns the arguments of the vLLM with this package folder.

    Raises:
        UnsupportedVllmError: a file or class is not where this vLLM's arguments were.
    """
    engine, frontend = _Source(package, _ENGINE_ARGS), _Source(package, _FRONTEND_ARGS)
    return VllmArgs(
        engine=engine.fields_of("EngineArgs") | engine.fields_of("AsyncEngineArgs"),
        frontend=frontend.fields_of("BaseFrontendArgs"),
        server=frontend.fields_of("FrontendArgs"),
        parsers={
            name: _Source(package, path).keys_of(table)
            for name, (path, table) in _PARSER_TABLES.items()
        },
        multimodal=_Source(package, _MODELS).keys_of("_MULTIMODAL_MODELS"),
    )


@dataclass
class _Source:
    """The parsed source file of vLLM; follows a type's name into the file that defines it."""

    package: Path
    path: Path

    @cached_property
    def _body(self) -> list[ast.stmt]:
        try:
            return ast.parse((self.package / self.path).read_text(encoding="utf-8")).body
        except (OSError, SyntaxError) as error:
            raise UnsupportedVllmError(f"cannot read vLLM's {self.path}: {error}") from error

    @cached_property
    def _imported_from(self) -> dict[str, Path]:
        """The file of each name imported from a vLLM module."""
        return {
            alias.asname or alias.name: Path(*statement.module.split(".")[1:]).with_suffix(".py")
            for statement in self._body
            if isinstance(statement, ast.ImportFrom)
            and statement.module is not None
            and statement.module.startswith("vllm.")
            for alias in statement.names
        }

    @cached_property
    def _assigned(self) -> dict[str, ast.expr]:
        return dict(_assignments(self._body))

    @cached_property
    def _other_sources(self) -> dict[Path, "_Source"]:
        return {path: _Source(self.package, path) for path in self._imported_from.values()}

    def fields_of(self, class_name: str) -> dict[str, ArgSpec]:
        """Returns the annotated fields of a class in this file, without those of its bases."""
        for statement in self._body:
            if isinstance(statement, ast.ClassDef) and statement.name == class_name:
                return {
                    node.target.id: self._spec(node.annotation) or ArgSpec()
                    for node in statement.body
                    if isinstance(node, ast.AnnAssign)
                    and isinstance(node.target, ast.Name)
                    and not node.target.id.startswith("_")
                }
        raise UnsupportedVllmError(f"vLLM's {self.path} has no class {class_name}")

    def keys_of(self, table: str) -> tuple[str, ...]:
        """Returns the string keys of a dict assigned to `table` in this file, sorted."""
        value = self._assigned.get(table)
        if not isinstance(value, ast.Dict):
            raise UnsupportedVllmError(f"vLLM's {self.path} has no dict {table}")
        keys = (key.value for key in value.keys if isinstance(key, ast.Constant))
        return tuple(sorted(key for key in keys if isinstance(key, str)))

    def _spec(self, node: ast.expr) -> ArgSpec | None:
        """Returns the spec of an annotation; `None` unless it is all JSON types and literals."""
        match node:
            case ast.Constant(value=None):
                return ArgSpec(frozenset({"null"}))
            case ast.Constant(value=str(text)):
                return self._spec(ast.parse(text, mode="eval").body)
            case ast.Name(id=name):
                return self._named(name)
            case ast.Subscript(value=ast.Name(id="Literal"), slice=members):
                return self._literal(members)
            case ast.Subscript(value=ast.Name(id="type")):
                return ArgSpec()  # YAML cannot hold a class, so it adds nothing to a union.
            case ast.Subscript(value=ast.Name(id=name)) if name in _JSON_KINDS:
                return ArgSpec(frozenset({_JSON_KINDS[name]}))
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return _union(self._spec(left), self._spec(right))
        return None

    def _named(self, name: str) -> ArgSpec | None:
        if name in _JSON_KINDS:
            return ArgSpec(frozenset({_JSON_KINDS[name]}))
        if name in self._assigned:
            return self._spec(self._assigned[name])
        path = self._imported_from.get(name)
        # A package or a compiled module has no such file; its types stay unchecked.
        if path is None or not (self.package / path).is_file():
            return None
        return self._other_sources[path]._named(name)

    def _literal(self, members: ast.expr) -> ArgSpec | None:
        """Returns the spec of a `Literal`, whose members may be names of literals."""
        spec = ArgSpec()
        for member in members.elts if isinstance(members, ast.Tuple) else [members]:
            part = ArgSpec(choices=(member.value,)) if isinstance(member, ast.Constant) else None
            joined = _union(spec, part or self._spec(member))
            if joined is None:
                return None
            spec = joined
        return spec


def _union(left: ArgSpec | None, right: ArgSpec | None) -> ArgSpec | None:
    if left is None or right is None:
        return None
    return ArgSpec(left.kinds | right.kinds, left.choices + right.choices)


def _assignments(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield name, value
