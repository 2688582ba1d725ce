"""The stages: each takes the view of its run and returns what it found."""

from collections.abc import Callable, Mapping

from deployments.first_run.context import StageContext
from deployments.first_run.order import RunStage
from deployments.first_run.results import StageResult
from deployments.first_run.stages.chips import exporter, hbm
from deployments.first_run.stages.correctness import correctness
from deployments.first_run.stages.hosts import all_hosts, doctor
from deployments.first_run.stages.load import mixed_load, throughput
from deployments.first_run.stages.losses import drain, resume
from deployments.first_run.stages.probe import probe
from deployments.first_run.stages.starts import cold_start, warm_start

PROGRAMS: Mapping[RunStage, Callable[[StageContext], StageResult]] = {
    RunStage.DOCTOR: doctor,
    RunStage.PROBE: probe,
    RunStage.COLD_START: cold_start,
    RunStage.EXPORTER: exporter,
    RunStage.HBM: hbm,
    RunStage.CORRECTNESS: correctness,
    RunStage.MIXED_LOAD: mixed_load,
    RunStage.THROUGHPUT: throughput,
    RunStage.WARM_START: warm_start,
    RunStage.RESUME: resume,
    RunStage.DRAIN: drain,
    RunStage.HOSTS: all_hosts,
}
