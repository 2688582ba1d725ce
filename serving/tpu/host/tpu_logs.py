"""The folder of libtpu's logs on a host, for a reader whose slice failed. Pure.

The engine's workers load libtpu, so their environment counts: the engine's own variables first,
then the host's.
"""

from collections.abc import Mapping

# As libtpu reads it; with this value it writes no files. Sources: Cloud TPU's troubleshooting page
# for the folder, Ray's discovery of TPU logs (ray#47737) and marin#2078 for the variable and the
# value; read 2026-11-21. Not tried on hardware: in Ray's test the variable had no effect.
LOG_DIR_VARIABLE = "TPU_LOG_DIR"
DEFAULT_LOG_DIR = "/tmp/tpu_logs"
_DISABLED = "disabled"


def tpu_log_dir(*environments: Mapping[str, str]) -> str | None:
    """Returns the folder of libtpu's logs; the first environment that names one decides.

    `None` means that libtpu is configured to write no files. The first program creates the folder.
    """
    named = (environment.get(LOG_DIR_VARIABLE) for environment in environments)
    folder = next(filter(None, named), DEFAULT_LOG_DIR)
    return None if folder == _DISABLED else folder
