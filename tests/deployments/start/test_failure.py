from deployments.start.failure import start_failure

QUIET = "INFO 2026-11-20 17:25:00,026 controller 7 -- Controller starting (version='2.60.0')."
REPLICA = (
    "ERROR 2026-11-20 17:25:42,191 controller 7 -- Exception in Replica(id='a1', "
    "deployment='engine-demo-local', app='slicewise'), the replica will be stopped."
)
APPLICATION = (
    "ERROR 2026-11-20 17:25:42,191 controller 7 -- Deploying app 'slicewise' failed with exception:"
)
TRACEBACK = """Traceback (most recent call last):
  File "a.py", line 1, in start
RuntimeError: Traceback (most recent call last):
  File "b.py", line 2, in engine_config
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, max_model_len (100000) is greater than 4096
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
""".splitlines()


def test_start_failure_without_a_failure_is_none() -> None:
    assert start_failure([QUIET, QUIET]) is None


def test_start_failure_names_the_deployment_and_its_last_exception() -> None:
    assert start_failure([QUIET, REPLICA, *TRACEBACK, QUIET]) == (
        "deployment engine-demo-local: 1 validation error for ModelConfig\n"
        "  Value error, max_model_len (100000) is greater than 4096"
    )


def test_start_failure_waits_until_the_record_is_whole() -> None:
    assert start_failure([QUIET, REPLICA, *TRACEBACK]) is None


def test_start_failure_of_the_application_without_a_traceback_tells_what_is_there() -> None:
    lines = [APPLICATION, "1 problem in the configuration:", "  models: missing", QUIET]
    assert start_failure(lines) == (
        "the application: 1 problem in the configuration:\n  models: missing"
    )


def test_start_failure_tells_the_first_of_several() -> None:
    lines = [REPLICA, "ValueError: first", QUIET, APPLICATION, "ValueError: second", QUIET]
    assert start_failure(lines) == "deployment engine-demo-local: first"
