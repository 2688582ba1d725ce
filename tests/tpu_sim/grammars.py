"""Requests under grammars, as vLLM's frontend hands them over."""

import string

from vllm.sampling_params import StructuredOutputsParams

LETTERS = frozenset(string.ascii_lowercase)


def under_grammar(regex: str = "[a-z]{80}") -> StructuredOutputsParams:
    """Of letters, and longer than an answer, so that no end comes into it."""
    params = StructuredOutputsParams(regex=regex)
    # The frontend sets it when it validates; without one the engine core refuses the request.
    params._backend = "xgrammar"
    return params
