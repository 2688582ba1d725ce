"""The last scaling plan as it is shown: the policy writes it, and every gateway reads it.

Owns the form of that one small document. Pure. Times are wall-clock seconds.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

# The policy writes every few seconds; a plan this old is no plan any more.
STALE_AFTER_S = 60.0
# The longest wait reported to a refused client: a plan may be wrong, and clients forget.
_MAX_RETRY_AFTER_S = 3600.0

Tuple = Field(strict=False)


class PlanReportError(ValueError):
    """The document is no plan report of this version. Keep the one before."""


class _Record(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


class PlanChange(_Record):
    """The change of a class's slices, planned or refused, and its reason.

    `compute_class` "" means all classes.
    """

    compute_class: str
    delta: int
    reason: str


class ModelPlan(_Record):
    """The plan of one model."""

    model: str
    decided_at_s: float
    changed_at_s: float | None
    """When the targets last changed; `null`: not since the policy started."""
    targets: dict[str, int]
    """Slices by compute class."""
    demand_slices: float | None
    """Slices needed before asking what exists; `null` while the load is not known."""
    next_slice_at_s: float | None
    """When one more slice is expected to be ready; `null`: none is on its way."""
    arithmetic: str
    changes: Annotated[tuple[PlanChange, ...], Tuple]
    """What the last change consisted of."""
    refusals: Annotated[tuple[PlanChange, ...], Tuple]
    """What is wanted and not planned now."""
    alerts: Annotated[tuple[str, ...], Tuple]
    num_failures: int
    """Decisions that failed since the policy started; the plan before stood."""
    drain_order: Annotated[tuple[str, ...], Tuple] = ()
    """Slices in the order in which to give them up, by the life of their replica."""


class PlanReport(_Record):
    """The plans of all models. `alerts` are of the policy as a whole."""

    written_at_s: float
    models: Annotated[tuple[ModelPlan, ...], Tuple]
    alerts: Annotated[tuple[str, ...], Tuple] = ()

    def retry_after_s(self, model: str, now_s: float) -> float | None:
        """Returns the seconds until a refused client may find an engine, from 1 to 3600.

        Returns `None` if the plan is old, or no slice is on its way, or the expected one is late.
        """
        if now_s - self.written_at_s > STALE_AFTER_S:
            return None
        at_s = next((each.next_slice_at_s for each in self.models if each.model == model), None)
        if at_s is None or at_s <= now_s:
            return None
        return min(max(1.0, at_s - now_s), _MAX_RETRY_AFTER_S)

    def drain_order(self, model: str, now_s: float) -> tuple[str, ...]:
        """Returns the model's slices in the order in which to give them up; none if it is old."""
        if now_s - self.written_at_s > STALE_AFTER_S:
            return ()
        return next((each.drain_order for each in self.models if each.model == model), ())


def encode_report(board: PlanReport) -> bytes:
    """Encodes the report as JSON."""
    return board.model_dump_json().encode()


def decode_report(text: bytes) -> PlanReport:
    """Returns the report in the JSON that `encode_report` made.

    Raises:
        PlanReportError: `text` is no plan report of this version. Keep the one before.
    """
    try:
        return PlanReport.model_validate_json(text)
    except ValidationError as error:
        where = ", ".join(".".join(map(str, each["loc"])) or "all" for each in error.errors())
        raise PlanReportError(f"not a plan report of this version (wrong at: {where})") from error
