"""Fills a small disk while evidence is written: `python -m tests...full_disk DISK STORE`.

Prints as JSON what the folder still took. STORE of `-`: there is only the folder.
"""

import json
import sys
import tarfile
from pathlib import Path

from deployments.first_run.record.evidence import EvidenceFolder
from serving.artifacts.object_store.address import open_store

RESERVE_BYTES = 512 * 1024


def main(disk: Path, store: str) -> dict[str, object]:
    evidence = EvidenceFolder(
        disk / "run", None if store == "-" else open_store(store), (), RESERVE_BYTES
    )
    evidence.write("doctor/result.json", "before")
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass
    evidence.write("probe/result.json", "after")
    # Does not compress, and no longer fits.
    noise = "".join(chr(0x4E00 + number * 7919 % 20000) for number in range(300_000))
    evidence.write("probe/log.txt", noise)
    faults = evidence.faults
    evidence.write("verdict.txt", "it was full")
    path = evidence.archive()
    names = []
    if path is not None:
        with tarfile.open(path) as archive:
            names = archive.getnames()
    return {
        "here": sorted(str(each.relative_to(disk / "run")) for each in (disk / "run").rglob("*.*")),
        "archived": names,
        "faults": faults,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), sys.argv[2])) + "\n")
