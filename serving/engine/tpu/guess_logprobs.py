"""Finds the log-probabilities of steps in which guesses may be judged and none is.

Where a model speculates, tpu-inference keeps a step's log-probabilities in two blocks for each
group of devices: of the guesses that were judged, and behind them of the tokens that follow. It
reads them so only where there was a guess. Without one (at the start of a prompt's answer, say) it
takes the first rows, which are of guesses that were not made: of other requests, or of the token
-1, which no tokenizer knows and of which a frontend dies (0.32.0, `runner/tpu_runner.py`
`_jax_logprobs_materialize`; read and run on JAX CPU, 2026-11-28). Pure but for `install`.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def rows_without_guesses(
    num_rows: int,
    num_guess_rows: int,
    requests_of_groups: Mapping[int, Sequence[int]],
    num_requests: int,
) -> list[int]:
    """Returns the row of each request in a step without guesses, by its place in the batch.

    `num_rows` and `num_guess_rows` are those of all groups of devices, as many of each group.
    `requests_of_groups` has the places of each group's requests in its own order; those from
    `num_requests` on are padding.
    """
    num_groups = len(requests_of_groups)
    of_group, guesses_of_group = num_rows // num_groups, num_guess_rows // num_groups
    rows = [0] * num_requests
    for group, places in requests_of_groups.items():
        begin = group * of_group + guesses_of_group
        for number, place in enumerate(places):
            if place < num_requests:
                rows[place] = begin + number
    return rows


def install(runner_module: Any) -> None:
    """Lets `tpu_inference.runner.tpu_runner` find them. Idempotent."""
    materialize = runner_module._jax_logprobs_materialize
    if getattr(materialize, "__module__", "") == __name__:
        return

    def materialized(
        logprobs_tensors: Any,
        logits_indices_selector: Any = None,
        cu_num_generated_tokens: Any = None,
        spec_decode_metadata: Any = None,
        runner: Any = None,
        num_reqs: int | None = None,
    ) -> Any:
        if spec_decode_metadata is not None and not spec_decode_metadata.draft_lengths_cpu.any():
            logits_indices_selector = rows_without_guesses(
                logprobs_tensors.logprob_token_ids.shape[0],
                spec_decode_metadata.final_logits_indices.shape[0],
                spec_decode_metadata.req_indices_dp,
                runner.input_batch.num_reqs if num_reqs is None else num_reqs,
            )
        return materialize(
            logprobs_tensors,
            logits_indices_selector,
            cu_num_generated_tokens,
            spec_decode_metadata=spec_decode_metadata,
            runner=runner,
            num_reqs=num_reqs,
        )

    runner_module._jax_logprobs_materialize = materialized
