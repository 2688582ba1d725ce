"""Slices and compute classes in a configuration: what is taken, what follows, what is refused."""

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config.application import CONTROL_CPUS, AppConfig, check_app_config
from serving.config.slices import MARKET_LABEL
from serving.domain.compute_class import Market
from serving.domain.errors import ConfigError
from serving.domain.topology import Generation, parallelism_choices, shapes, slice_shape

V6E_4X4 = {"generation": "v6e", "topology": "4x4"}


def raw_config(
    compute_class: str = "spot",
    wanted: dict[str, Any] | None = None,
    compute_classes: list[Any] | None = None,
    **model: Any,
) -> dict[str, Any]:
    """One model with one deployment on a slice."""
    deployment = {"compute_class": compute_class, "slice": V6E_4X4 | (wanted or {})}
    base = {"name": "demo", "source": "models/demo", "deployments": [deployment]}
    declared = {} if compute_classes is None else {"compute_classes": compute_classes}
    return {"models": [base | model]} | declared


def check(raw: object) -> AppConfig:
    return check_app_config(raw, None)


def problems(raw: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_app_config(raw, None)
    return [str(problem) for problem in caught.value.problems]


def test_deployment_without_a_slice_has_one_host_and_any_compute_class() -> None:
    raw = raw_config()
    raw["models"][0]["deployments"] = [{"compute_class": "local"}]
    deployment = check(raw).models[0].deployments[0]
    assert deployment.slice is None
    assert deployment.num_hosts == 1


def test_slice_is_taken_as_written_and_gives_its_shape() -> None:
    config = check(raw_config(wanted={"zone": "us-east5-b", "topology": "4x4x1"}))
    wanted = config.models[0].deployments[0].slice
    assert wanted is not None
    assert (wanted.generation, wanted.topology) == (Generation.V6E, "4x4x1")
    assert (wanted.chips_per_host, wanted.zone) == (None, "us-east5-b")
    assert wanted.shape == slice_shape("v6e", "4x4")
    assert pickle.loads(pickle.dumps(config)) == config


def test_cpus_are_counted_for_every_host_of_every_slice() -> None:
    raw = raw_config()
    raw["models"][0]["deployments"][0] |= {"replicas": 3, "num_cpus": 2}
    raw["gateway"] = {"num_cpus": 1}
    assert check(raw).num_cpus == pytest.approx(3 * 4 * 2 + 1 + (3 + 2) * CONTROL_CPUS)


def test_joined_slices_are_all_counted() -> None:
    raw = raw_config(wanted={"num_slices": 2})
    raw["models"][0]["deployments"][0] |= {"replicas": 3, "num_cpus": 2}
    raw["gateway"] = {"num_cpus": 1}
    config = check(raw)
    assert config.models[0].deployments[0].num_hosts == 2 * 4
    assert config.num_cpus == pytest.approx(3 * 2 * 4 * 2 + 1 + (3 + 2) * CONTROL_CPUS)
    assert config.num_chips == 3 * 2 * 16


def test_sizes_on_joined_slices_are_those_of_one() -> None:
    one = {"engine": "vllm-tpu", "engine_args": {"tensor_parallel_size": 16}}
    assert check(raw_config(wanted={"num_slices": 2}, **one)).num_chips == 32
    both = {"engine": "vllm-tpu", "engine_args": {"tensor_parallel_size": 32}}
    (problem,) = problems(raw_config(wanted={"num_slices": 2}, **both))
    assert "tensor x pipeline is not the 16 devices of a v6e 4x4 slice" in problem


def test_copies_of_a_model_share_a_slice_of_one_host_and_are_judged_with_the_rest() -> None:
    shape = {"topology": "2x4", "chips_per_host": 8}
    two = {"engine": "vllm-tpu", "engine_args": {"data_parallel_size": 2}}
    assert check(raw_config(wanted=shape, **two)).num_chips == 8
    both = {"data_parallel_size": 2, "tensor_parallel_size": 8}
    (problem,) = problems(raw_config(wanted=shape, **{"engine": "vllm-tpu", "engine_args": both}))
    assert "2 copies of it are not the 8 devices of the slice (value 8); allowed: 4" in problem
    (problem,) = problems(
        raw_config(wanted=shape, **{"engine": "vllm", "engine_args": {"data_parallel_size": 2}})
    )
    assert "set by Slicewise (value 2)" in problem


@pytest.mark.parametrize(
    ("name", "market", "notice_s", "run_s"),
    [
        ("reserved", Market.RESERVED, 3600, None),
        ("flex-start", Market.FLEX_START, 604_800, 604_800),
        ("spot", Market.SPOT, 15, None),
        ("on-demand", Market.ON_DEMAND, 3600, None),
    ],
)
def test_each_market_has_a_built_in_class_with_its_own_defaults(
    name: str, market: Market, notice_s: float, run_s: float | None
) -> None:
    entry = check(raw_config(name)).compute_class(name)
    assert (entry.name, entry.market) == (name, market)
    assert entry.node_labels == {MARKET_LABEL: name}
    assert (entry.drain_notice_s, entry.max_run_duration_s) == (notice_s, run_s)
    assert (entry.patience_s, entry.usd_per_chip_hour) == (None, None)


def test_declared_class_is_taken_as_written() -> None:
    declared = {
        "name": "v6e-spot",
        "market": "spot",
        "node_labels": {"ray.io/node-group": "v6e-spot", "cheap": "yes"},
        "patience_s": 600,
        "drain_notice_s": 105,
        "max_run_duration_s": 86_400,
        "usd_per_chip_hour": 0.593,
    }
    config = check(raw_config("v6e-spot", compute_classes=[declared]))
    assert config.compute_class("v6e-spot").model_dump() == declared


def test_class_of_a_built_in_name_replaces_the_built_in_one() -> None:
    declared = {"name": "spot", "market": "spot", "patience_s": 60}
    config = check(raw_config(compute_classes=[declared]))
    assert config.compute_class("spot").patience_s == 60
    assert config.compute_class("on-demand").patience_s is None


def test_class_that_is_neither_declared_nor_built_in_is_not_found() -> None:
    with pytest.raises(KeyError, match="local"):
        check(raw_config()).compute_class("local")


@pytest.mark.parametrize(
    ("market", "run_s", "notice_s"),
    [("flex-start", 3600, 3600), ("on-demand", 600, 600), ("spot", 10, 10), ("spot", 3600, 15)],
)
def test_notice_by_default_is_never_longer_than_the_run(
    market: str, run_s: float, notice_s: float
) -> None:
    declared = {"name": "x", "market": market, "max_run_duration_s": run_s}
    assert check(raw_config("x", compute_classes=[declared])).compute_class("x").drain_notice_s == (
        notice_s
    )


# What is set in the slice or the model, and the problem it makes.
BAD_SLICES: list[tuple[dict[str, Any], str]] = [
    (
        {"wanted": {"topology": "3x3"}},
        "models[0].deployments[0].slice.topology: no v6e slice of this topology can be reserved "
        '(value "3x3"); nearest allowed: 2x2, 2x4, 4x4',
    ),
    (
        {"wanted": {"topology": ""}},
        "models[0].deployments[0].slice.topology: not a topology: chips along each axis, joined by "
        'x (value ""); nearest allowed: 1x1, 2x2, 2x4',
    ),
    (
        {"wanted": {"chips_per_host": 8}},
        "models[0].deployments[0].slice.chips_per_host: no host of a v6e 4x4 slice has that many "
        "chips (value 8); nearest allowed: 4",
    ),
    (
        {"wanted": {"topology": "3x3", "chips_per_host": 3}},
        "models[0].deployments[0].slice.topology: no v6e slice of this topology can be reserved "
        '(value "3x3"); nearest allowed: 2x2, 2x4, 4x4',
    ),
    (
        {"wanted": {"generation": "v7x"}},
        'models[0].deployments[0].slice.generation: not allowed (value "v7x"); '
        "allowed: one of v4, v5e, v5p, v6e, tpu7x",
    ),
    (
        {"wanted": {"chips_per_host": "4"}},
        'models[0].deployments[0].slice.chips_per_host: not allowed (value "4"); '
        "allowed: an integer or null, 1, 4 or 8, as the topology has it",
    ),
    (
        {"wanted": {"topology": 16}},
        "models[0].deployments[0].slice.topology: not allowed (value 16); "
        "allowed: a string, chips along each axis, such as `4x4` or `2x2x2`",
    ),
    (
        {"wanted": {"zone": "us east"}},
        'models[0].deployments[0].slice.zone: not allowed (value "us east"); '
        "allowed: a string or null, a zone of Google Cloud, such as `us-east5-b`",
    ),
    (
        {"wanted": {"num_slices": 0}},
        "models[0].deployments[0].slice.num_slices: not allowed (value 0); "
        "allowed: an integer, 1 to 16",
    ),
    (
        {
            "engine": "vllm-tpu",
            "engine_args": {"enable_lora": True},
            "wanted": {"num_slices": 2},
        },
        "models[0].engine_args.enable_lora: tpu-inference has no LoRA with data parallelism, which "
        "2 joined slices need (value true); allowed: false, or num_slices: 1 and more replicas",
    ),
    (
        {"wanted": {"topolgy": "4x4"}},
        'models[0].deployments[0].slice.topolgy: unknown key (value "4x4"); '
        "did you mean 'topology'?",
    ),
    (
        {"engine_args": {"tensor_parallel_size": 8}},
        "models[0].engine_args.tensor_parallel_size: does not suit models[0].deployments[0].slice: "
        "tensor x pipeline is not the 16 devices of a v6e 4x4 slice (value 8 x 1); "
        "nearest allowed: 16 x 1, 4 x 4",
    ),
    (
        {"engine_args": {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}},
        "models[0].engine_args.tensor_parallel_size: does not suit models[0].deployments[0].slice: "
        "a pipeline stage of a v6e 4x4 slice is one host, or all of them (value 8 x 2); "
        "nearest allowed: 16 x 1, 4 x 4",
    ),
    (
        {"engine_args": {"pipeline_parallel_size": 2}},
        "models[0].engine_args.pipeline_parallel_size: does not suit "
        "models[0].deployments[0].slice: a pipeline stage of a v6e 4x4 slice is one host, or all "
        "of them (value 8 x 2); nearest allowed: 16 x 1, 4 x 4",
    ),
    (
        {
            "wanted": {"generation": "tpu7x", "topology": "2x2x1"},
            "engine_args": {"tensor_parallel_size": 4},
        },
        "models[0].engine_args.tensor_parallel_size: does not suit models[0].deployments[0].slice: "
        "tensor x pipeline is not the 8 devices of a tpu7x 2x2x1 slice (value 4 x 1); "
        "nearest allowed: 8 x 1, 4 x 2, 2 x 4",
    ),
    (
        {"compute_class": "v6e-spot"},
        "models[0].deployments[0].compute_class: has a slice, but is not declared in "
        "compute_classes (value \"v6e-spot\"); did you mean 'spot'?",
    ),
    (
        {"compute_class": "local"},
        "models[0].deployments[0].compute_class: has a slice, but is not declared in "
        'compute_classes (value "local"); allowed: flex-start, on-demand, reserved, spot',
    ),
]


@pytest.mark.parametrize(("given", "problem"), BAD_SLICES, ids=lambda value: str(value)[:60])
def test_bad_slice_is_refused_with_path_value_and_allowed(
    given: dict[str, Any], problem: str
) -> None:
    assert problems(raw_config(**given)) == [problem]


# What is set in the one declared class, and the problem it makes.
BAD_CLASSES: list[tuple[dict[str, Any], str]] = [
    (
        {"market": "preemptible"},
        'compute_classes[0].market: not allowed (value "preemptible"); '
        "allowed: one of reserved, flex-start, spot, on-demand",
    ),
    (
        {"market": ["spot"]},
        "compute_classes[0].market: not allowed (value a list); "
        "allowed: one of reserved, flex-start, spot, on-demand",
    ),
    (
        {"name": "on-demand"},
        "compute_classes[0].market: the class on-demand is built in, with a market of its own "
        '(value "spot"); allowed: on-demand, or another name for the class',
    ),
    (
        {"drain_notice_s": 121},
        "compute_classes[0].drain_notice_s: longer than a spot slice of this class can be told "
        "(value 121); allowed: at most 120",
    ),
    (
        {"market": "reserved", "drain_notice_s": 3601},
        "compute_classes[0].drain_notice_s: longer than a reserved slice of this class can be told "
        "(value 3601); allowed: at most 3600",
    ),
    (
        {"drain_notice_s": 60, "max_run_duration_s": 30},
        "compute_classes[0].drain_notice_s: longer than a spot slice of this class can be told "
        "(value 60); allowed: at most 30",
    ),
    (
        {"market": "flex-start", "max_run_duration_s": 604_801},
        "compute_classes[0].max_run_duration_s: a flex-start slice ends sooner (value 604801); "
        "allowed: at most 604800",
    ),
    (
        {"market": "flex-start", "max_run_duration_s": None},
        "compute_classes[0].max_run_duration_s: a flex-start slice ends sooner (value null); "
        "allowed: at most 604800",
    ),
    (
        {"max_run_duration_s": "1d"},
        'compute_classes[0].max_run_duration_s: not allowed (value "1d"); '
        "allowed: a number or null, 1 to 31536000",
    ),
    (
        {"patience_s": 0},
        "compute_classes[0].patience_s: not allowed (value 0); "
        "allowed: a number or null, more than 0, at most 604800",
    ),
    (
        {"usd_per_chip_hour": -1},
        "compute_classes[0].usd_per_chip_hour: not allowed (value -1); "
        "allowed: a number or null, 0 to 1000",
    ),
    (
        {"node_labels": {"ray.io/market-type": "in(spot,on-demand)"}},
        "compute_classes[0].node_labels.ray.io/market-type: not allowed "
        '(value "in(spot,on-demand)"); allowed: a string, letters, digits and inner `-`, `_` and '
        "`.`, up to 63 characters",
    ),
    (
        {"node_labels": {"a b": "c"}},
        "compute_classes[0].node_labels.a b: not allowed as a name; "
        "allowed: letters, digits and inner `-`, `_` and `.`, up to 63 characters",
    ),
    (
        {"drain_notice": 15},
        "compute_classes[0].drain_notice: unknown key (value 15); did you mean 'drain_notice_s'?",
    ),
]


@pytest.mark.parametrize(("given", "problem"), BAD_CLASSES, ids=lambda value: str(value)[:60])
def test_bad_compute_class_is_refused_with_path_value_and_allowed(
    given: dict[str, Any], problem: str
) -> None:
    declared = {"name": "cheap", "market": "spot"} | given
    assert problems(raw_config(declared["name"], compute_classes=[declared])) == [problem]


def test_two_classes_of_one_name_are_refused() -> None:
    declared = [{"name": "cheap", "market": "spot"}, {"name": "cheap", "market": "on-demand"}]
    assert problems(raw_config("cheap", compute_classes=declared)) == [
        "compute_classes[1].name: already the name at compute_classes[0].name "
        '(value "cheap"); allowed: a name that no other compute class has'
    ]


def test_every_problem_of_slices_and_classes_is_listed_at_once() -> None:
    raw = raw_config(
        "nowhere",
        {"topology": "5x5"},
        [{"name": "a", "market": "spot", "drain_notice_s": 500}, {"name": "a", "market": "spot"}],
        engine_args={"tensor_parallel_size": 3},
    )
    fits = {"compute_class": "spot", "slice": V6E_4X4}
    raw["models"][0]["deployments"].append(fits)
    assert sorted(line.split(": ")[0] for line in problems(raw)) == [
        "compute_classes[0].drain_notice_s",
        "compute_classes[1].name",
        "models[0].deployments[0].compute_class",
        "models[0].deployments[0].slice.topology",
        "models[0].engine_args.tensor_parallel_size",
    ]


def test_broken_list_of_classes_makes_no_class_undeclared() -> None:
    raw = raw_config("mine") | {"compute_classes": {"name": "mine"}}
    (line,) = problems(raw)
    assert line.startswith("compute_classes: not allowed (value a mapping)")


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"engine_args": {"tensor_parallel_size": 16}},
        {"engine_args": {"tensor_parallel_size": 4, "pipeline_parallel_size": 4}},
        {"engine_args": {"pipeline_parallel_size": 4}},
        {
            "engine_args": {
                "tensor_parallel_size": 8,
                "additional_config": {"sharding": {"sharding_strategy": {"expert_parallelism": 2}}},
            }
        },
        {"engine": "paced"},
    ],
)
def test_sizes_that_fit_follow_or_are_judged_elsewhere_are_taken(model: dict[str, Any]) -> None:
    assert check(raw_config(**model)).models[0].engine_args == model.get("engine_args", {})


SHAPES = st.sampled_from(Generation).flatmap(lambda name: st.sampled_from(shapes(name)))


# No deadline per example: the machine that runs this may be busy with something else.
@settings(deadline=None)
@given(shape=SHAPES, tensor=st.integers(1, 64), stages=st.none() | st.integers(1, 8))
def test_explicit_sizes_are_taken_exactly_when_they_fill_the_slice(
    shape: Any, tensor: int, stages: int | None
) -> None:
    wanted = {
        "generation": shape.generation.value,
        "topology": shape.topology,
        "chips_per_host": shape.chips_per_host,
    }
    sizes = {"tensor_parallel_size": tensor}
    if stages is not None:
        sizes["pipeline_parallel_size"] = stages
    fits = (tensor, stages or 1) in parallelism_choices(shape)
    raw = raw_config(wanted=wanted, engine_args=sizes)
    if fits:
        check(raw)
    else:
        (line,) = problems(raw)
        assert line.startswith("models[0].engine_args.tensor_parallel_size: ")


JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just([])


@settings(deadline=None)
@given(
    wanted=st.dictionaries(
        st.sampled_from(("generation", "topology", "chips_per_host", "zone")), JSON
    ),
    declared=st.lists(
        JSON
        | st.dictionaries(
            st.sampled_from(("name", "node_labels", "drain_notice_s", "max_run_duration_s")),
            JSON,
        ).map(lambda entry: entry | {"market": "flex-start"}),
        max_size=2,
    ),
    sizes=st.dictionaries(
        st.sampled_from(("tensor_parallel_size", "pipeline_parallel_size", "additional_config")),
        JSON,
    ),
)
def test_any_yaml_of_slices_is_parsed_or_refused_in_words(
    wanted: dict[str, Any], declared: list[Any], sizes: dict[str, Any]
) -> None:
    raw = raw_config(wanted=wanted, compute_classes=declared, engine_args=sizes)
    try:
        found = check(raw).models[0].deployments[0].slice
    except ConfigError as error:
        lines = [str(problem) for problem in error.problems]
        assert lines
        assert len(set(lines)) == len(lines)
    else:
        assert found is not None
        assert found.shape.num_chips > 0


# -- slices that several engines share --


def test_divided_slice_counts_cpus_and_chips_of_all_its_engines() -> None:
    raw = raw_config(wanted={"topology": "2x4", "num_engines": 8})
    raw["models"][0]["deployments"][0] |= {"replicas": 3, "num_cpus": 2}
    raw["gateway"] = {"num_cpus": 1}
    config = check(raw)
    assert config.num_chips == 3 * 8
    assert config.num_cpus == pytest.approx(3 * 8 * 2 + 1 + (3 + 2) * CONTROL_CPUS)
    assert config.models[0].most_output.num_engines == 24


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        (
            {"num_engines": 3},
            "models[0].deployments[0].slice.num_engines: a v6e 4x4 slice has no such number of "
            "equal parts (value 3); nearest allowed: 1, 4, 16",
        ),
        (
            {"num_engines": 4, "num_slices": 2},
            "models[0].deployments[0].slice.num_engines: num_slices joins slices under one engine "
            "(value 4); allowed: 1, or num_slices: 1 and more replicas",
        ),
    ],
)
def test_slice_that_cannot_be_divided_so_is_refused(wanted: dict[str, Any], complaint: str) -> None:
    assert problems(raw_config(wanted=wanted)) == [complaint]


def test_sizes_on_a_divided_slice_are_those_of_a_part() -> None:
    args = {"tensor_parallel_size": 4}
    wanted = {"num_engines": 4}
    assert check(raw_config(wanted=wanted, engine="vllm-tpu", engine_args=args))
    (problem,) = problems(
        raw_config(wanted=wanted, engine="vllm-tpu", engine_args={"tensor_parallel_size": 16})
    )
    assert "does not suit models[0].deployments[0].slice" in problem
    assert "tensor x pipeline is not the 4 devices" in problem
