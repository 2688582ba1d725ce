"""Which batch work is due when, by model: for a policy that may give it slices. Pure."""

from collections import defaultdict
from collections.abc import Callable, Iterable

from serving.domain.capacity.batch_due import BatchDue, DueWork, coalesced, last_moment_s
from serving.gateway.batches.records import Batch, BatchStatus, TokenUsage


def due_by_model(
    batches: Iterable[Batch], model_of: Callable[[str], str | None]
) -> dict[str, BatchDue]:
    """Returns the lines that have no answer yet, by the models that they are for.

    `model_of` returns the model behind a name of a request, `None` if there is none. A batch's
    lines that are left are taken to be for its models in the same parts as all of them.
    """
    work: defaultdict[str, list[DueWork]] = defaultdict(list)
    usage: defaultdict[str, TokenUsage] = defaultdict(TokenUsage)
    answered: defaultdict[str, float] = defaultdict(float)
    for batch in batches:
        named = sum(batch.lines_by_model.values())
        for name, count in batch.lines_by_model.items():
            model = model_of(name)
            if model is None:
                continue
            if len(batch.lines_by_model) == 1:  # of several nobody knows whose tokens they are
                usage[model] += batch.usage
                answered[model] += batch.num_completed
            if batch.status is BatchStatus.IN_PROGRESS:
                left = round((batch.num_total - batch.num_answered) * count / named)
                work[model].append(DueWork(due_at_s(batch), left))
    return {
        model: BatchDue(
            coalesced(dates),
            _mean(usage[model].num_input - usage[model].num_cached, answered[model]),
            _mean(usage[model].num_output, answered[model]),
        )
        for model, dates in work.items()
    }


def due_at_s(batch: Batch) -> float:
    """Returns when a batch's lines are to be answered: a little before its window is over."""
    return round(last_moment_s(batch.created_at_s, batch.expires_at_s))


def _mean(total: int, count: float) -> float | None:
    return total / count if count else None
