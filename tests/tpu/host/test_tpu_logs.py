"""Where libtpu's logs are on a host."""

import pytest

from serving.tpu.host.tpu_logs import tpu_log_dir


@pytest.mark.parametrize(
    ("engine_env", "host_env", "folder"),
    [
        ({}, {}, "/tmp/tpu_logs"),
        ({}, {"TPU_LOG_DIR": "/var/log/tpu"}, "/var/log/tpu"),
        ({"TPU_LOG_DIR": "/data"}, {"TPU_LOG_DIR": "/var/log/tpu"}, "/data"),
        ({"TPU_LOG_DIR": ""}, {}, "/tmp/tpu_logs"),
        ({"TPU_LOG_DIR": "disabled"}, {"TPU_LOG_DIR": "/var/log/tpu"}, None),
    ],
)
def test_folder_is_the_engines_then_the_hosts_then_libtpus_own(
    engine_env: dict[str, str], host_env: dict[str, str], folder: str | None
) -> None:
    assert tpu_log_dir(engine_env, host_env) == folder
