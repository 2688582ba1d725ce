"""Decides when a request's prompt is done, for which log-probabilities are asked.

While one is not done, tpu-inference runs other programs in a step. It forgets a done one where it
reads the results, in a thread, and on the one host that answers the engine core: the other hosts of
a slice would go on with the other programs, and the slice's collectives no longer match (0.32.0,
`runner/tpu_runner.py` `_get_prompt_logprobs_dict`, read 2026-11-26; the mismatch was run on JAX
CPU, 2026-11-22). So each host forgets it itself, before the first step without it. Pure.
"""

from collections.abc import Iterable, Iterator, Mapping


def done_prompts(
    asked: Iterable[str], num_computed: Mapping[str, int], num_prompt: Mapping[str, int]
) -> Iterator[str]:
    """Yields those of `asked` with all of their prompt computed before the step.

    `num_computed` has the tokens computed before it, of requests that go on in the step.
    `num_prompt` has the tokens of prompts. A request that is missing in either is not done.
    """
    for name in asked:
        if name in num_prompt and num_computed.get(name, 0) >= num_prompt[name]:
            yield name
