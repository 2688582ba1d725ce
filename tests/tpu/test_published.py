"""What others publish: recipes are planned as they stand, and shown beside a plan."""

import json

import pytest
import yaml

from deployments.engine_plan import plan_json, plan_lines, plan_serve_config
from serving.artifacts.model_config_file import find_model_config
from serving.config.sections import load_yaml
from serving.config.vllm.vllm_args import installed_vllm_args
from serving.domain.topology import TopologyError, slice_shape
from serving.tpu.model_facts import model_facts
from serving.tpu.plan import EnginePlan, plan_engine
from serving.tpu.published import FIGURES, RECIPES, Recipe, published_for, recipe_for
from serving.tpu.requirements import EngineRequirements

from .models import DEPLOYMENTS, MODELS, QWEN_8B, facts_of

# Recipes for slices that Ray 2.60 does not reserve, and of models that we ship no facts of.
NOT_RESERVED = {("Qwen3-32B", "tpu7x")}
WITHOUT_FACTS = {"Llama-3.1-70B-Instruct", "Qwen3-4B"}
PLANNED = [
    each
    for each in RECIPES
    if (each.model, each.generation) not in NOT_RESERVED and each.model not in WITHOUT_FACTS
]


def id_of(recipe: Recipe) -> str:
    return f"{recipe.model} on {recipe.generation} {recipe.topology}"


def planned(recipe: Recipe, owner: str) -> EnginePlan:
    model = f"{owner}/{recipe.model}"
    raw = find_model_config(model, [MODELS])
    assert raw is not None, "no facts"
    shape = slice_shape(recipe.generation, recipe.topology)
    requirements = EngineRequirements(model, shape, recipe.args, recipe.env)
    return plan_engine(requirements, model_facts(raw))


def owner_of(recipe: Recipe) -> str:
    return "meta-llama" if recipe.model.startswith("Llama") else "Qwen"


def test_models_without_facts_and_slices_that_are_not_reserved_are_those_named_here() -> None:
    for recipe in RECIPES:
        raw = find_model_config(f"{owner_of(recipe)}/{recipe.model}", [MODELS])
        assert (raw is None) == (recipe.model in WITHOUT_FACTS)
        if (recipe.model, recipe.generation) in NOT_RESERVED:
            with pytest.raises(TopologyError):
                slice_shape(recipe.generation, recipe.topology)
        else:
            shape = slice_shape(recipe.generation, recipe.topology)
            assert shape.num_chips == recipe.num_chips


@pytest.mark.parametrize("recipe", PLANNED, ids=id_of)
def test_published_recipe_adds_up_by_our_planner(recipe: Recipe) -> None:
    """Layout and memory: what others run on these chips is not refused here."""
    plan = planned(recipe, owner_of(recipe))
    assert plan.can_start
    assert plan.budget is not None
    # All of its devices, in one stage.
    shape = plan.requirements.shape
    assert recipe.args["tensor_parallel_size"] == shape.num_devices
    # At least a tenth of the sequences that it allows, at their longest.
    longest = plan.budget.cache_tokens / plan.budget.max_model_len
    assert longest >= 0.1 * int(str(recipe.args["max_num_seqs"]))


def test_recipe_that_leaves_little_for_a_step_is_doubted_and_not_refused() -> None:
    recipe = recipe_for("Qwen/Qwen3-32B", "v6e", 4)
    assert not isinstance(recipe, str)
    plan = planned(recipe, "Qwen")
    assert plan.budget is not None
    (doubt,) = plan.budget.doubts
    assert "a step needs an expected 0.63 GiB of activations" in doubt
    assert f"it may be too little: {doubt}" in "\n".join(plan_lines(plan))


def test_plan_shows_the_recipe_with_what_differs_and_where_it_is_from() -> None:
    shape = slice_shape("v6e", "2x4")
    facts = facts_of("llama-3.3-70b")
    model = "meta-llama/Llama-3.3-70B-Instruct"
    plan = plan_engine(EngineRequirements(model, shape, {"max_model_len": 4096}), facts)
    text = "\n".join(plan_lines(plan))
    assert "recipe: AI-Hypercomputer/tpu-recipes 51a4773" in text
    assert "gpu_memory_utilization=0.98                 planned: 0.9" in text
    assert "tensor_parallel_size=8                      as planned" in text
    assert "443.1 output tokens per second and chip with 128 requests at once" in text
    assert "7 requests per second and slice, 1800 tokens in, 128 out: 112 output tokens" in text
    told = json.loads(json.dumps(plan_json(plan)))
    assert told["recipe"]["args"]["max_num_seqs"] == 256
    assert told["published"]["requests_per_s"] == 7.0


def test_requests_per_second_are_told_as_tokens_per_second_and_chip_too() -> None:
    """Of 8B on one chip nothing else is published: 10.77 answers of 128 tokens a second."""
    path = DEPLOYMENTS / "v6e-1x1-llama-3.1-8b.yaml"
    (plan,) = plan_serve_config(load_yaml(path.read_text()), None, [MODELS]).plans
    assert (
        "10.77 requests per second and slice, 1800 tokens in, 128 out: 1379 output tokens per "
        "second and chip, computed from these (lower bound of tpu-inference's CI, tpu-inference "
        "0.32.0 .buildkite)"
    ) in "\n".join(plan_lines(plan))
    told = json.loads(json.dumps(plan_json(plan)))["published"]
    assert told["tokens_per_s_per_chip"] == pytest.approx(10.77 * 128)
    assert (told["requests_per_s"], told["num_chips"]) == (10.77, 1)
    # Eight chips carry it together.
    figure = published_for("meta-llama/Llama-3.3-70B-Instruct", "v6e", 8)
    assert not isinstance(figure, str)
    assert figure.tokens_per_s_per_chip == 7.0 * 128 / 8


def test_plan_is_made_with_a_recipe_and_says_what_to_write() -> None:
    """What is set by hand stays, sizes and lengths are not the recipe's; what is written is it."""
    path = DEPLOYMENTS / "tpu7x-2x2x1-qwen3-coder-480b.yaml"
    raw = load_yaml(path.read_text())
    (model,) = raw["applications"][0]["args"]["models"]
    model["engine_args"] |= {"max_num_seqs": 64}
    vllm_args = installed_vllm_args()
    (plan,) = plan_serve_config(raw, vllm_args, [MODELS], takes_recipe=True).plans
    args = {each.name: each for each in plan.settings.args}
    assert (args["max_num_seqs"].value, args["max_num_seqs"].reason) == (64, "set by hand")
    assert (args["block_size"].value, args["kv_cache_dtype"].value) == (256, "fp8")
    assert "tpu-recipes" in args["block_size"].reason
    assert args["max_model_len"].value == model["engine_args"]["max_model_len"]
    lines = list(plan_lines(plan))
    begin = next(at for at, line in enumerate(lines) if "write into the model" in line)
    end = next(at for at in range(begin + 1, len(lines)) if not lines[at].startswith("    "))
    written = yaml.safe_load("\n".join(line[4:] for line in lines[begin + 1 : end]))
    model["engine_args"] |= written["engine_args"]
    model["engine_env"] = model.get("engine_env", {}) | written["engine_env"]
    (again,) = plan_serve_config(raw, vllm_args, [MODELS]).plans
    assert again.settings.engine_args == plan.settings.engine_args
    assert again.settings.environment == plan.settings.environment
    assert again.budget == plan.budget


def test_plan_without_a_recipe_is_the_plan() -> None:
    raw = load_yaml((DEPLOYMENTS / "v5e-2x4-qwen3-8b.yaml").read_text())
    both = [
        plan_serve_config(raw, None, [MODELS], takes_recipe=each).plans for each in (True, False)
    ]
    assert both[0] == both[1]


@pytest.mark.parametrize(
    ("model", "generation", "topology", "words"),
    [
        ("Qwen/Qwen3-235B-A22B", "v6e", "4x8", "no recipe known for Qwen/Qwen3-235B-A22B"),
        (
            "Qwen/Qwen3-32B",
            "v6e",
            "2x4",
            "no recipe known for Qwen/Qwen3-32B on 8 chips of v6e, only on 4 chips of v6e, 1 chips"
            " of tpu7x",
        ),
        (f"/models/{QWEN_8B}", "v5e", "2x4", f"no recipe known for /models/{QWEN_8B}"),
    ],
)
def test_plan_says_where_no_recipe_is_known(
    model: str, generation: str, topology: str, words: str
) -> None:
    plan = plan_engine(EngineRequirements(model, slice_shape(generation, topology)), None)
    assert words in "\n".join(plan_lines(plan)).replace("\n    ", " ")
    assert plan_json(plan)["recipe"] == words


def test_everything_published_has_a_source_with_a_date_or_a_release() -> None:
    for each in RECIPES:
        assert "tpu-recipes" in each.source
        assert "2026-11-27" in each.source
        assert all("tpu-recipes" in one.source for one in each.throughput)
    assert all("0.32.0" in each.source for each in FIGURES)
