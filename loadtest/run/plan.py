"""The plan of a run as one file: what the command line was parsed into, once.

The workers of a run read nothing else, and the report shows it.
"""

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from loadtest.client.check_kind import CheckKind
from loadtest.client.limits import Limits
from loadtest.errors import LoadTestError
from loadtest.workload.spec import WorkloadSpec

PLAN_FILE = "plan.json"
PROMPTS_FILE = "prompts.json"

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# A worker holds its share of the schedule and one connection per stream; more than this many
# processes is a test of the client's machine.
_MAX_WORKERS = 64


class RunPlan(BaseModel):
    """The plan of one run. It holds no API key, only the name of the variable that has it.

    `duration_s` includes `warmup_s`. `models` are those that were requested or found. `drain_s` is
    how long requests in flight may take after the schedule's end. `answers_file` is what `check`
    `recorded` compares with, and writes if it is not there.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    url: str
    workload: WorkloadSpec
    models: Annotated[tuple[str, ...], Field(min_length=1)]
    duration_s: _Seconds
    warmup_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    drain_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    seed: int = 1
    num_workers: Annotated[int, Field(ge=1, le=_MAX_WORKERS)] = 1
    limits: Limits = Limits()
    check: CheckKind = CheckKind.NONE
    answers_file: Path | None = None
    api_key_env: str | None = None

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if self.warmup_s >= self.duration_s:
            msg = f"warmup_s={self.warmup_s:g} is not allowed: below duration_s={self.duration_s:g}"
            raise ValueError(msg)
        if (self.check == CheckKind.RECORDED) != (self.answers_file is not None):
            msg = f"check={self.check} with answers_file={self.answers_file} is not allowed: "
            raise ValueError(msg + "recorded with a file, anything else without")
        return self

    @classmethod
    def of(cls, **fields: object) -> Self:
        """The plan of these fields.

        Raises:
            LoadTestError: one of them is not allowed; every problem is named.
        """
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            lines = []
            for problem in error.errors(include_url=False):
                name = ".".join(str(part) for part in problem["loc"])
                message = problem["msg"].removeprefix("Value error, ")
                lines.append(f"{name}={problem['input']!r}: {message}" if name else message)
            raise LoadTestError("; ".join(lines)) from error

    @classmethod
    def read(cls, path: Path) -> Self:
        """Returns what `write` wrote."""
        return cls.model_validate_json(path.read_bytes())

    def write(self, path: Path) -> None:
        """Writes it as a file, for the workers and as a record of what was run."""
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
