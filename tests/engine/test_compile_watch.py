"""Programs that come late are counted, and logged with the shape of the step they were for.

By the events that JAX gives out; no device is asked for. That it gives them out is for
`tests/tpu_sim/test_late_programs.py`.
"""

import logging
from collections.abc import Iterator

import jax
import pytest

from serving.engine.tpu.compile_watch import COMPILE_EVENT, CompileWatch, StepShape


@pytest.fixture
def watch() -> Iterator[CompileWatch]:
    yield CompileWatch()
    # JAX keeps listeners for as long as the process lives.
    jax.monitoring.clear_event_listeners()


def compiled(program: str) -> None:
    jax.monitoring.record_event_duration_secs(COMPILE_EVENT, 0.25, fun_name=program)


def test_late_program_is_logged_with_the_shape_of_its_step(
    watch: CompileWatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="serving.engine.tpu.compile_watch")
    compiled("warm_up")
    watch.begin()
    watch.begin()
    assert (watch.num_compilations, caplog.messages) == (0, [])
    compiled("early")
    watch.step = StepShape(num_requests=3, num_tokens=40)
    compiled("late")
    jax.monitoring.record_event_duration_secs("/jax/another/event", 0.25, fun_name="sample")
    assert caplog.messages == [
        "compiled_after_warm_up count=1 duration_ms=250 program=early step=none",
        "compiled_after_warm_up count=2 duration_ms=250 program=late num_requests=3 num_tokens=40",
    ]
    assert watch.num_compilations == 2
