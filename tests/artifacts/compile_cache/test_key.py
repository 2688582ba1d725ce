"""Which engines share programs."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.artifacts.compile_cache.key import cache_key

from .hosts import facts

SAME = cache_key(facts())


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": {"jax": "0.11.2", "vllm": "0.32.0"}},
        {"versions": {"jax": "0.10.2", "vllm": "0.32.0", "libtpu": "0.0.9"}},
        {"generation": "v5e"},
        {"topology": "4x4"},
        {"chips_per_host": 4},
        {"num_slices": 2},
        {"args": {"max_num_seqs": 128}},
        {"args": {"max_num_seqs": 256, "quantization": "fp8"}},
        {"env": {"XLA_FLAGS": "--xla_x=1"}},
        {"env": {"LIBTPU_INIT_ARGS": "--x"}},
        {"env": {"MODEL_IMPL_TYPE": "vllm"}},
        {"env": {"MIN_TOKEN_BUCKET": "32"}},
        {"config": "c2"},
        {"config": None},
    ],
    ids=str,
)
def test_what_makes_other_programs_makes_another_key_and_family(changes: dict[str, Any]) -> None:
    other = cache_key(facts(**changes))
    assert other.digest != SAME.digest
    assert other.family != SAME.family


@pytest.mark.parametrize(
    "changes", [{"revision": "r2"}, {"revision": None}, {"source": "org/fine"}]
)
def test_other_weights_of_the_same_architecture_are_of_the_same_family(
    changes: dict[str, Any],
) -> None:
    other = cache_key(facts(**changes))
    assert other.digest != SAME.digest
    assert other.family == SAME.family


@pytest.mark.parametrize(
    "changes",
    [
        {"args": {"max_num_seqs": 256, "load_format": "runai_streamer", "seed": 7}},
        {"args": {"max_num_seqs": 256, "hf_token": "hf_x"}},
        {"env": {"HF_TOKEN": "x", "HF_HOME": "/m", "VLLM_XLA_CACHE_PATH": "/a"}},
        {
            "env": {
                "JAX_COMPILATION_CACHE_DIR": "/a",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            }
        },
    ],
    ids=str,
)
def test_what_no_program_sees_changes_nothing(changes: dict[str, Any]) -> None:
    assert cache_key(facts(**changes)).digest == SAME.digest


def test_record_tells_the_parts_and_no_secret() -> None:
    key = cache_key(
        facts(env={"HF_TOKEN": "s3cret", "XLA_FLAGS": "--a"}, args={"hf_token": "s3cret"})
    )
    assert b"s3cret" not in key.record
    record = json.loads(key.record)
    assert record == key.parts
    assert record["env"] == {"XLA_FLAGS": "--a"}


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5)))
def test_order_of_arguments_changes_nothing(args: Mapping[str, Any]) -> None:
    backwards = dict(reversed(args.items()))
    assert cache_key(facts(args=args)).digest == cache_key(facts(args=backwards)).digest
