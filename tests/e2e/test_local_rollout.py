"""A model is replaced under streams on one machine: Serve's rolling update, without slices."""

import sys
import time
from typing import Any

import pytest
import yaml

from .application import (
    Role,
    RunningApplication,
    application_args,
    engine_ids,
    linked_engines,
    paced_model,
    serve_config,
)
from .rollout_load import StreamLoad, patiently

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

NUM_ENGINES = 2
NUM_TOKENS = 60


def args_with(seed: int, *others: dict[str, Any]) -> dict[str, Any]:
    model = paced_model(NUM_ENGINES, {"tpot_ms": 50.0, "model_seed": seed})
    return application_args(model, *others, rollout={"drain_s": 60.0})


def test_changed_model_alone_is_replaced_and_no_stream_notices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with patiently(RunningApplication(args_with(1))) as application:
        before = application.fleet()["models"][0]
        others = application.processes(Role.GATEWAY) + application.processes(Role.DIRECTORY)
        load = StreamLoad(
            application.base_url, model="paced", width=8, num_tokens=NUM_TOKENS, seeds=(1, 2)
        )
        load.start()
        began_s = time.monotonic()
        path = application.folder / "changed.yaml"
        path.write_text(yaml.safe_dump(serve_config(args_with(2), application.port)))
        assert application.serve("deploy", str(path)).returncode == 0
        fleet = application.wait_fleet(
            lambda fleet: (
                fleet["models"][0]["version"] != before["version"]
                and linked_engines(fleet) == {"paced": NUM_ENGINES}
                and {row["version"] for row in fleet["slices"]} == {fleet["models"][0]["version"]}
            ),
            300.0,
        )
        took_s = time.monotonic() - began_s
        outcome = load.finish()
        assert outcome.failures == []
        assert outcome.mixed == []
        assert outcome.seeds[1] > 0
        assert not engine_ids(fleet) & {each["engine_id"] for each in before["engines"]}
        after = application.processes(Role.GATEWAY) + application.processes(Role.DIRECTORY)
        assert after == others
        with capsys.disabled():
            sys.stdout.write(
                f"\n    {NUM_ENGINES} engines replaced in {took_s:.0f} s: {outcome.num_streams} "
                f"answers, 0 failed, {dict(outcome.seeds)} by version, longest gap "
                f"{outcome.longest_gap_s:.2f} s\n"
            )
