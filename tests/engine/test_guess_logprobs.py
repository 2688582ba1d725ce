"""In a step without guesses each request gets the log-probabilities of its own token."""

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serving.engine.tpu import guess_logprobs
from serving.engine.tpu.guess_logprobs import rows_without_guesses


@given(st.data())
def test_each_request_has_the_row_behind_the_guesses_of_its_group(data: st.DataObject) -> None:
    num_groups = data.draw(st.integers(1, 4))
    num_guesses, num_places = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 6))
    num_requests = data.draw(st.integers(0, num_groups * num_places))
    group_of = [number % num_groups for number in range(num_groups * num_places)]
    places = data.draw(st.permutations(range(num_groups * num_places)))
    of_groups = {
        group: [place for place, own in zip(places, group_of, strict=True) if own == group]
        for group in range(num_groups)
    }
    # As tpu-inference lays them out: -1 for guesses that were not made, then each one's token.
    rows = [
        token
        for group in range(num_groups)
        for token in [-1] * num_guesses + [100 + place for place in of_groups[group]]
    ]
    found = rows_without_guesses(len(rows), num_groups * num_guesses, of_groups, num_requests)
    assert [rows[row] for row in found] == [100 + place for place in range(num_requests)]


def read_as_upstream(
    tensors: Any,
    selector: list[int] | None = None,
    cu: Any = None,
    spec_decode_metadata: Any = None,
    runner: Any = None,
    num_reqs: int | None = None,
) -> tuple[str, list[int]]:
    """What of tpu-inference 0.32.0 matters: with guesses its own filter, else the selected rows."""
    if spec_decode_metadata is not None and spec_decode_metadata.draft_lengths_cpu.sum() > 0:
        return "filtered", []
    token_ids = tensors.logprob_token_ids[:, 0]
    if selector is not None:
        token_ids = token_ids[selector]
    return "rows", token_ids.tolist()[:num_reqs]


def step(*draft_lengths: int) -> Any:
    return SimpleNamespace(
        draft_lengths_cpu=np.array(draft_lengths),
        final_logits_indices=np.zeros(4),
        req_indices_dp={0: [1, 0]},
    )


def test_upstream_alone_reads_guesses_that_were_not_made() -> None:
    upstream = SimpleNamespace(_jax_logprobs_materialize=read_as_upstream)
    tensors = SimpleNamespace(logprob_token_ids=np.array([[-1], [-1], [-1], [-1], [7], [8]]))
    alone = upstream._jax_logprobs_materialize(tensors, spec_decode_metadata=step(0, 0), num_reqs=2)
    assert alone == ("rows", [-1, -1])
    guess_logprobs.install(upstream)
    mended = upstream._jax_logprobs_materialize
    guess_logprobs.install(upstream)
    assert upstream._jax_logprobs_materialize is mended
    assert mended(tensors, spec_decode_metadata=step(0, 0), num_reqs=2) == ("rows", [8, 7])
    # With guesses, and where none may be, it does as it did.
    assert mended(tensors, spec_decode_metadata=step(0, 2), num_reqs=2) == ("filtered", [])
    assert mended(tensors, [5, 4], num_reqs=2) == ("rows", [8, 7])
