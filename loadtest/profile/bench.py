"""Runs the loads of a profile as load tests of their own, each in a folder below the profile's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from loadtest.planned_request import Api
from loadtest.profile.measure import ClosedLoad, OpenLoad, ProfileObjective
from loadtest.report.outputs import make_scorecard
from loadtest.run.launch import LoadSource, LoadTestOptions, run_options
from loadtest.scorecard.measure import Scorecard
from loadtest.scorecard.slo import GoodputLimits, ServiceLevel

# Sent before each load and not judged, as a share of the judged time: the batch has to fill first.
_WARMUP_RATIO = 0.25


@dataclass(slots=True, kw_only=True)
class LoadTestBench:
    """Implements `Bench` with `slicewise loadtest`'s machinery; loads are judged for `seconds`."""

    url: str
    model: str
    objective: ProfileObjective
    seconds: float
    out_dir: Path
    num_workers: int
    api_key_env: str | None
    environ: Mapping[str, str]
    show: Callable[[str], None]
    num_loads: int = 0

    def run(self, load: ClosedLoad | OpenLoad) -> Scorecard:
        """Runs one load and measures it; see `Bench`."""
        self.num_loads += 1
        out_dir = self.out_dir / f"load-{self.num_loads:02d}"
        warmup_s = self.seconds * _WARMUP_RATIO
        source = LoadSource(
            num_users=load.num_users if isinstance(load, ClosedLoad) else None,
            rate_per_s=load.requests_per_s if isinstance(load, OpenLoad) else None,
            input_tokens=load.lengths.input_tokens,
            output_tokens=load.lengths.output_tokens,
            api=Api.COMPLETIONS,
        )
        run_options(
            LoadTestOptions(
                url=self.url,
                source=source,
                duration_s=self.seconds + warmup_s,
                warmup_s=warmup_s,
                out_dir=out_dir,
                models=(self.model,),
                num_workers=self.num_workers,
                # Prompts that another load has left in a prefix cache would cost nothing.
                seed=self.num_loads,
                api_key_env=self.api_key_env,
            ),
            self.environ,
            self.show,
        )
        limits = GoodputLimits(ttft_s=self.objective.ttft_s, tpot_s=self.objective.tpot_s)
        return make_scorecard(out_dir, ServiceLevel(goodput=limits))
