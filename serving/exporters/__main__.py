"""Runs the exporter alone (`python -m serving.exporters`).

It takes a third less memory than `slicewise`.
"""

import typer

from serving.exporters.command import tpu_exporter_command

if __name__ == "__main__":
    typer.run(tpu_exporter_command)
