"""`slicewise sim up` as a user starts it: Ray is imported under the mode that the cluster has.

Ray reads its mode once, when it is imported. With another one the head that is started refuses the
process that starts it, after 20 s of trying.
"""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

# Ends at the first import of Ray, wherever that is.
UP = """
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "ray":
            print(os.environ.get("RAY_AUTH_MODE"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
sys.argv = ["slicewise", "sim", "up"]
from deployments.cli import main
main()
"""


@pytest.mark.parametrize(("given", "seen"), [(None, "token"), ("disabled", "disabled")])
def test_ray_is_imported_under_the_mode_of_the_cluster(given: str | None, seen: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    if given is not None:
        environment["RAY_AUTH_MODE"] = given
    done = subprocess.run(
        [sys.executable, "-c", UP],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, seen), done.stderr
