"""Which batch work is due when, by model: for a policy that may give it slices. Pure."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from serving.domain.capacity.batch_due import BatchDue, DueWork, coalesced, last_moment_s
from serving.gateway.batches.records import Batch, BatchStatus, TokenUsage


def due_by_model(
    batches: Iterable[Batch], model_of: Callable[[str | None], str | None]
) -> dict[str, BatchDue]:
    """Returns the lines that have no answer yet, by the models that they are for.

    `model_of` returns the model behind a name of a request, or behind none; `None` if there is no
    such model. A batch's lines that are left are taken to be for its models in the same parts as
    all of them.
    """
    work: defaultdict[str, list[DueWork]] = defaultdict(list)
    usage: defaultdict[str, TokenUsage] = defaultdict(TokenUsage)
    answered: defaultdict[str, float] = defaultdict(float)
    for batch in batches:
        lines = _lines_by_model(batch, model_of)
        num_lines = lines.total()
        models = [model for model in lines if model is not None]
        if len(models) == 1:  # of several nobody knows whose tokens they are
            usage[models[0]] += batch.usage
            answered[models[0]] += batch.num_completed
        for model in models:
            if batch.status is BatchStatus.IN_PROGRESS:
                num_left = batch.num_total - batch.num_answered
                left = round(num_left * lines[model] / num_lines)
                work[model].append(DueWork(due_at_s(batch), left))
    return {
        model: BatchDue(
            coalesced(dates),
            _mean(usage[model].num_input - usage[model].num_cached, answered[model]),
            _mean(usage[model].num_output, answered[model]),
        )
        for model, dates in work.items()
    }


def _lines_by_model(
    batch: Batch, model_of: Callable[[str | None], str | None]
) -> Counter[str | None]:
    """Returns how many lines of a batch are for each model; for `None`, those of names without one.

    Lines that name none are for the only model. Of several models they would be, they are refused,
    and have no part.
    """
    lines: Counter[str | None] = Counter()
    for name, count in batch.lines_by_model.items():
        lines[model_of(name)] += count
    num_nameless = batch.num_total - lines.total()
    only = model_of(None)
    if num_nameless > 0 and only is not None:
        lines[only] += num_nameless
    return lines


def due_at_s(batch: Batch) -> float:
    """Returns when a batch's lines are to be answered: a little before its window is over."""
    return round(last_moment_s(batch.created_at_s, batch.expires_at_s))


def _mean(total: int, count: float) -> float | None:
    return total / count if count else None
