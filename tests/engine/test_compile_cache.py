"""Keys and folders of engines' programs, and what a host does with a store that it cannot reach."""

import logging
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from serving.artifacts.compile_cache.local_folder import LocalFolder
from serving.artifacts.compile_cache.report import TransferOutcome
from serving.config.slice_spec import SliceSpec
from serving.domain.topology import slice_shape
from serving.engine.spec import CompileCacheSpec, EngineSpec, Programs, TpuSpec
from serving.engine.tpu.compile_cache import (
    HostFacts,
    program_variables,
    pull_here,
    push_here,
    versions_here,
    with_programs,
)
from serving.tpu.rules import PROGRAM_FOLDER

FACTS = HostFacts("r1", "c1", {"jax": "0.10.2"}, {"XLA_FLAGS": "--pod"})
LOG = {"life": "l1", "host": 0}


def resolved(store: str = "/store", **changes: object) -> EngineSpec:
    spec = EngineSpec(
        "m",
        "org/m",
        "spot",
        slice=SliceSpec("spot", slice_shape("v6e", "2x4", 4)),
        tpu=TpuSpec(CompileCacheSpec(store, "/local", 5.0)),
        engine_args={"max_num_seqs": 8},
        engine_env={PROGRAM_FOLDER: "/local", "HF_TOKEN": "secret"},
    )
    return replace(spec, **changes)


def programs_of(spec: EngineSpec, facts: HostFacts = FACTS) -> Programs:
    programs = with_programs(spec, facts).programs
    assert programs is not None
    return programs


def test_engine_reads_and_writes_the_folder_of_its_key() -> None:
    spec = with_programs(resolved(), FACTS)
    assert spec.programs is not None
    folder = spec.engine_env[PROGRAM_FOLDER]
    assert spec.programs.folder == folder
    # JAX compiles before tpu-inference tells it the folder.
    assert spec.engine_env["JAX_COMPILATION_CACHE_DIR"] == folder
    assert folder.startswith("/local/")
    assert spec.programs.parts["source"] == "org/m"
    assert spec.programs.parts["chips_per_host"] == 4
    assert spec.programs.parts["env"] == {"XLA_FLAGS": "--pod"}


def test_what_the_configuration_sets_beats_the_pods_environment() -> None:
    programs = programs_of(resolved(engine_env={"XLA_FLAGS": "--mine"}))
    assert programs.parts["env"] == {"XLA_FLAGS": "--mine"}


def test_joined_slices_and_other_slices_have_other_folders() -> None:
    shape = slice_shape("v6e", "2x4", 4)
    specs = [
        resolved(),
        resolved(slice=SliceSpec("spot", shape, num_slices=2)),
        resolved(slice=SliceSpec("spot", slice_shape("v6e", "2x4", 8))),
    ]
    assert len({programs_of(spec).folder for spec in specs}) == 3


def test_other_compute_class_has_the_same_programs() -> None:
    reserved = resolved(slice=SliceSpec("reserved", slice_shape("v6e", "2x4", 4)))
    assert programs_of(reserved).folder == programs_of(resolved()).folder


def test_engine_without_a_cache_stays_as_it_is() -> None:
    spec = resolved(tpu=TpuSpec())
    assert with_programs(spec, FACTS) == spec


def test_versions_and_variables_of_this_host() -> None:
    assert {"jax", "jaxlib"} <= versions_here().keys()
    assert "libtpu" not in versions_here()
    environment = {"HOME": "/root", "XLA_FLAGS": "--a", "API_KEY": "k"}
    assert program_variables(environment) == {"XLA_FLAGS": "--a"}


def test_host_pulls_and_pushes_and_says_so_in_one_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    programs = programs_of(resolved(str(tmp_path / "store")))
    with caplog.at_level(logging.INFO, "serving.engine.tpu.compile_cache"):
        assert pull_here(programs, LOG).outcome == TransferOutcome.NOTHING
        assert push_here(programs, (), LOG).outcome == TransferOutcome.NOTHING
    lines = [record.getMessage().split()[0] for record in caplog.records]
    assert lines == ["programs_pulled", "programs_pushed"]
    assert "life=l1 host=0 outcome=nothing programs=0 bytes=0" in caplog.text


def test_store_that_cannot_be_opened_is_a_report() -> None:
    programs = programs_of(resolved("ftp://nowhere"))
    pulled, pushed = pull_here(programs, LOG), push_here(programs, (), LOG)
    assert (pulled.outcome, pushed.outcome) == (
        TransferOutcome.UNREACHABLE,
        TransferOutcome.UNREACHABLE,
    )
    assert pulled.reason == "'ftp://nowhere': no store is reached by ftp://"


def test_disk_of_the_host_that_fails_is_a_report(tmp_path: Path) -> None:
    programs = programs_of(resolved(str(tmp_path / "store")))
    first = replace(programs, folder=str(tmp_path / "first"))
    LocalFolder(tmp_path / "first").write("jit_a-1-cache", zlib.compress(b"program"))
    push_here(first, (), LOG)
    (tmp_path / "file").write_bytes(b"")
    report = pull_here(replace(programs, folder=str(tmp_path / "file" / "x")), LOG)
    assert (report.outcome, report.num_fetched) == (TransferOutcome.UNREACHABLE, 0)
    assert "Not a directory" in report.reason
