"""The tokens of batches at an engine are told by tenant, and forgotten when a batch is over."""

from serving.link.batch_counts import FORGOTTEN_S, BatchCounts


def test_tokens_and_sequences_are_told_by_tenant_and_batch() -> None:
    counts = BatchCounts()
    counts.add("acme", "b1", 3)
    counts.add("acme", "b1", 2)
    counts.add("acme", "b2", 1)
    counts.add("zeta", "b3", 7)
    present = [("acme", "b1"), ("acme", "b1"), ("zeta", "b4")]
    tokens, sequences = counts.report(present, 0.0)
    assert tokens == {"acme": {"b1": 5, "b2": 1}, "zeta": {"b3": 7}}
    assert sequences == {"acme": {"b1": 2}, "zeta": {"b4": 1}}


def test_batch_with_nothing_here_for_a_while_is_forgotten_and_begins_anew() -> None:
    counts = BatchCounts()
    counts.add("acme", "over", 3)
    counts.add("acme", "runs", 3)
    counts.report([], 0.0)
    waiting = [("acme", "waits")]
    assert counts.report(waiting, FORGOTTEN_S)[0] == {"acme": {"over": 3, "runs": 3}}
    counts.add("acme", "runs", 1)
    assert counts.report(waiting, FORGOTTEN_S + 1)[0] == {"acme": {"runs": 4}}
    counts.add("acme", "over", 1)
    assert counts.report([], FORGOTTEN_S + 1)[0] == {"acme": {"runs": 4, "over": 1}}


def test_batch_whose_sequences_wait_long_for_a_token_is_kept() -> None:
    counts = BatchCounts()
    counts.add("acme", "b1", 3)
    for step in range(1, 5):
        tokens, _ = counts.report([("acme", "b1")], step * FORGOTTEN_S * 0.9)
    assert tokens == {"acme": {"b1": 3}}
