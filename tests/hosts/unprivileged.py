"""How a test starts what has no more rights over this machine's network than a user's program."""

import os
import shutil

from tests.needs import do_without

# Linux lets nobody map the user 0 who may not give rights to files (capabilities(7)).
_KEPT = "-all,+setfcap"


def without_rights() -> list[str]:
    """The command that starts another one so: nothing is needed for it by who is not root."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        do_without("no program setpriv")
    return ["setpriv", "--bounding-set", _KEPT, "--inh-caps", "-all", "--"]
