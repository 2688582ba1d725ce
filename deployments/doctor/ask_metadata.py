"""Asks the metadata server what this host is, as a separate program, and prints it as JSON.

It is separate because to look up the server's name may take longer than a user would wait.

    python -m deployments.doctor.ask_metadata
"""

import asyncio
import json
import os

from serving.slices.metadata_client import HOST_VARIABLE, PREEMPTED, MetadataClient, MetadataError

_PATHS = {
    "machine_type": "instance/machine-type",
    "zone": "instance/zone",
    "preempted": PREEMPTED,
}


async def main() -> dict[str, str | None]:
    """The fields of `host.Metadata`, or `error` alone."""
    try:
        async with MetadataClient(os.environ.get(HOST_VARIABLE)) as client:
            return {name: (await client.get(path)).text for name, path in _PATHS.items()}
    except MetadataError as error:
        return {"error": f"{error}"[:200]}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())))  # noqa: T201
