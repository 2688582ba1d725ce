"""Runs the loads of a profile as load tests of their own, each in a folder below the profile's."""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

from loadtest.planned_request import Api
from loadtest.profile.measure import ClosedLoad, OpenLoad, ProfileObjective
from loadtest.report.outputs import make_scorecard
from loadtest.run.launch import LoadSource, LoadTestOptions, run_options
from loadtest.scorecard.measure import Scorecard
from loadtest.scorecard.slo import GoodputLimits, ServiceLevel

# Of each load, this much is sent and not judged: the batch has to fill first.
_WARMUP_RATIO = 0.25


class LoadTestBench:
    """Implements `Bench` with `slicewise loadtest`'s own machinery."""

    def __init__(
        self,
        *,
        url: str,
        model: str,
        objective: ProfileObjective,
        seconds: float,
        out_dir: Path,
        num_workers: int,
        api_key_env: str | None,
        environ: Mapping[str, str],
        show: Callable[[str], None],
    ) -> None:
        """Keeps the settings. `seconds` is how long each load is judged."""
        self._url = url
        self._model = model
        self._level = ServiceLevel(
            goodput=GoodputLimits(ttft_s=objective.ttft_s, tpot_s=objective.tpot_s)
        )
        self._seconds = seconds
        self._out_dir = out_dir
        self._num_workers = num_workers
        self._api_key_env = api_key_env
        self._environ = environ
        self._show = show
        self._numbers = itertools.count(1)

    def run(self, load: ClosedLoad | OpenLoad) -> Scorecard:
        """Runs one load and measures it; see `Bench`."""
        number = next(self._numbers)
        out_dir = self._out_dir / f"load-{number:02d}"
        warmup_s = self._seconds * _WARMUP_RATIO
        source = LoadSource(
            num_users=load.num_users if isinstance(load, ClosedLoad) else None,
            rate_per_s=load.requests_per_s if isinstance(load, OpenLoad) else None,
            input_tokens=load.lengths.input_tokens,
            output_tokens=load.lengths.output_tokens,
            api=Api.COMPLETIONS,
        )
        run_options(
            LoadTestOptions(
                url=self._url,
                source=source,
                duration_s=self._seconds + warmup_s,
                warmup_s=warmup_s,
                out_dir=out_dir,
                models=(self._model,),
                num_workers=self._num_workers,
                # Prompts that another load has left in a prefix cache would cost nothing.
                seed=number,
                api_key_env=self._api_key_env,
            ),
            self._environ,
            self._show,
        )
        return make_scorecard(out_dir, self._level)
