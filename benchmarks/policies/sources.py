"""What a run's figures come from, as a fingerprint of the code.

A commit is no name for that: it may be rewritten when work lands, and most commits change nothing
that is simulated. The fingerprint is of the syntax of every module that the run imports, without
comments and docstrings, and of the scenarios and prices. The production policy has a part in its
own runs alone, and what computes yardsticks in those alone: what others cost stands when they
change.
"""

import ast
import functools
import hashlib
from pathlib import Path

import grimp

from autoscaling.simulator.policies import POLICIES, SLICEWISE

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("autoscaling", "benchmarks", "loadtest", "serving")
_RUN = "benchmarks.policies.run"
# How runs are named and kept changes no figure.
_KEPT = ("benchmarks.policies.jobs", "benchmarks.policies.records")
_POLICY = "autoscaling.policy"
_YARDSTICKS = "autoscaling.simulator.bounds"
# Objectives and bounds, of which everybody's runs are prepared.
_RULES = "autoscaling.policy.rules"
_DATA = ("autoscaling/scenarios/*.yaml", "autoscaling/prices/*.yaml")
_LENGTH = 12


@functools.cache
def fingerprint(policy: str) -> str:
    """Returns the fingerprint of what runs of a policy, or of a yardstick, come from."""
    digest = hashlib.sha256()
    for module in sorted(code_of(policy)):
        digest.update(f"{module}\n{syntax(_text(module))}\n".encode())
    for pattern in _DATA:
        for path in sorted(_ROOT.glob(pattern)):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:_LENGTH]


def code_of(policy: str) -> set[str]:
    """Returns the modules that figures of a policy, or of a yardstick, come from."""
    graph = grimp.build_graph(*_PACKAGES, cache_dir=None)
    left_out = [] if policy == SLICEWISE else [_POLICY]
    left_out += [_YARDSTICKS] if policy in POLICIES else []
    for module in graph.modules:
        if module != _RULES and module.startswith(tuple(f"{each}." for each in left_out)):
            graph.remove_module(module)
    return ({_RUN} | graph.find_upstream_modules(_RUN)) - set(_KEPT)


def syntax(text: str) -> str:
    """Returns what a module does, of its text: equal for two that differ in what is said of it."""
    return ast.dump(_WithoutWords().visit(ast.parse(text)))


class _WithoutWords(ast.NodeTransformer):
    """Leaves out statements that are a constant: docstrings, and those of attributes."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:  # ast's own name
        return None if isinstance(node.value, ast.Constant) else node


def _text(module: str) -> str:
    path = _ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text(encoding="utf-8")
