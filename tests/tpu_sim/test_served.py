"""Simulated TPU slices serve a model by tpu-inference on CPU, through everything else as it is.

Slice replica, engine host, link and gateway are those of every other engine; only the engine
differs. Hosts are Ray nodes of one machine, with as many CPU devices as they have chips.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray._private.state import actors  # the dashboard, which has it in public, does not run here

from tests.e2e.application import (
    Role,
    RunningApplication,
    application_args,
    engine_ids,
    linked_engines,
)
from tests.e2e.streams import Answer, Request, stream_all

from .engines import ENGINE_ARGS, IN_FLOAT32, NGRAM, OFFLOAD, simulation_environment
from .evidence import Evidence
from .test_features import drafting
from .tiny_models import DRAFTED, FP8, LLAMA, MOE, NUM_NEW_TOKENS, QWEN3, TinyModels

pytestmark = [pytest.mark.tpu_sim, pytest.mark.timeout(2400)]

CHIPS_PER_HOST = 4
ONE_HOST = {"generation": "v6e", "topology": "2x2"}
TWO_HOSTS = {"generation": "v6e", "topology": "2x4", "chips_per_host": CHIPS_PER_HOST}
# The streams that a kill has to hit, nearly as long as the models allow; and how often it is tried.
NUM_KILLED_TOKENS = 96
NUM_ATTEMPTS = 3
# Limits of a machine with much other work; alone a start takes about one minute.
START_S = 900.0
RETURN_S = 240.0


def application(
    models: TinyModels,
    caches: Path,
    model: str,
    shape: dict[str, Any],
    num_slices: int,
    joined: int = 1,
    programs: str | None = None,
    **engine_args: Any,
) -> RunningApplication:
    """`num_slices` of `shape`, an engine on each or, where some are joined, on so many of them.

    `programs` names the folder of the hosts' compiled programs, which come from a store; `None`: no
    store, and a folder that all applications have in common.
    """
    wanted = shape | {"num_slices": joined}
    replicas = num_slices // joined
    served = {
        "name": model,
        "source": models.path(model),
        "engine": "vllm-tpu",
        # A weak model fills a document with white space if it may.
        "engine_args": ENGINE_ARGS
        | {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
        | engine_args,
        "deployments": [{"compute_class": "spot", "replicas": replicas, "slice": wanted}],
    }
    if programs is not None:
        store, folder = caches / "store", caches / programs
        served["compile_cache"] = {"store": str(store), "local_dir": str(folder)}
    plan = {
        "slices": [
            {"name": "spot", "compute_class": "spot", "count": num_slices, "returns_after_s": 1}
            | shape,
            # Stands beside, with chips of the same kind, and is nobody's.
            {"name": "other", "compute_class": "other", "count": 1} | shape,
        ],
        "cpus_per_host": 2,
    }
    environment = simulation_environment(caches, CHIPS_PER_HOST) | IN_FLOAT32
    # A host knows its own.
    for name in ("TPU_WORKER_ID", "TPU_NAME", "TPU_ACCELERATOR_TYPE"):
        environment.pop(name)
    if programs is not None:
        environment.pop("VLLM_XLA_CACHE_PATH")
    args = application_args(
        served,
        gateway={"request_deadline_s": 200.0},
        # Steps that compile take seconds here.
        health={"hang_timeout_s": 60.0},
    )
    return RunningApplication(args, through="sim", plan=plan, environment=environment)


@contextmanager
def started(running: RunningApplication) -> Iterator[RunningApplication]:
    """It, ready; ended with the block. A first start compiles."""
    try:
        running.launch()
        running.wait_ready(START_S)
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def one_host(models: TinyModels, caches: Path) -> Iterator[RunningApplication]:
    """Two slices of one host, an engine on each."""
    with started(application(models, caches, QWEN3, ONE_HOST, 2, programs="first")) as running:
        yield running


def completion(model: str, prompt: list[int], num_tokens: int, **options: Any) -> Request:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return Request("/v1/completions", body | options)


def outputs(answers: list[Answer]) -> list[list[int]]:
    assert [answer.error for answer in answers if answer.error] == []
    return [answer.choices[0].token_ids for answer in answers]


def ask(running: RunningApplication, requests: list[Request]) -> list[list[int]]:
    return outputs(asyncio.run(stream_all(running.base_url, requests)))


def check_parity(running: RunningApplication, models: TinyModels, model: str) -> int:
    """The reference's answers through the gateway, twice over all engines; how many outputs."""
    prompts, expected = models.prompts[model], models.expected[model]
    requests = [completion(model, prompt, NUM_NEW_TOKENS) for prompt in prompts]
    assert ask(running, requests * 4) == expected * 4
    return 4 * len(prompts)


def programs_needed(running: RunningApplication) -> tuple[float, float]:
    """Programs that engines had to compile until they were ready, and those that they found.

    By JAX's own events, as the gateway's page tells.
    """
    page = httpx.get(f"{running.base_url}/metrics", timeout=30).raise_for_status().text
    totals = {"slicewise_programs_compiled": 0.0, "slicewise_programs_found": 0.0}
    for family in text_string_to_metric_families(page):
        if family.name in totals:
            totals[family.name] += sum(sample.value for sample in family.samples)
    return totals["slicewise_programs_compiled"], totals["slicewise_programs_found"]


def program_files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*-cache")}


def placed_workers(running: RunningApplication) -> list[tuple[str, str]]:
    """Node and class of every live actor that has chips, as Ray's own table says."""
    address = running.simulation("describe")["ray_address"]
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        return [
            (actor["Address"]["NodeID"], actor["ActorClassName"])
            for actor in actors().values()
            if actor["State"] == "ALIVE" and actor["ActorClassName"] == "RayWorkerProc"
        ]
    finally:
        ray.shutdown()


def check_placement(running: RunningApplication, evidence: Evidence, what: str) -> None:
    """One worker on each host of each slice that is held, and none on the one beside."""
    rows = running.fleet()["slices"]
    by_node = {
        host["node_id"]: f"{row['name']} host {host['worker_id']}"
        for row in rows
        for host in row["hosts"]
    }
    workers = placed_workers(running)
    assert sorted(node for node, _ in workers) == sorted(by_node)
    held = {name.rpartition(" host ")[0] for name in by_node.values()}
    assert held == {row["name"] for row in rows}
    assert "other-0" not in held
    where = ", ".join(sorted(by_node[node] for node, _ in workers))
    evidence.placed(f"{what}: one worker each on {where}; none on other-0, which stood beside")


def kill_under_streams(
    running: RunningApplication,
    models: TinyModels,
    model: str,
    kill: Callable[[], None],
    *,
    is_exact: bool = True,
) -> int:
    """Long streams, a kill once half are under way; equal to the undisturbed ones. How many.

    Every second one asks for the log-probability of each chosen token. A busy machine's client may
    read what was written long ago, so that a kill comes too late: it is tried again. Without
    `is_exact` answers are rounded: the undisturbed ones need not be the reference's, and those that
    went on elsewhere are whole, and begin alike.
    """
    prompts = models.prompts[model]
    requests = [
        completion(model, prompt, NUM_KILLED_TOKENS, logprobs=0 if number % 2 else None)
        for number, prompt in enumerate(prompts)
    ]
    undisturbed = asyncio.run(stream_all(running.base_url, requests))
    begun = [each[:NUM_NEW_TOKENS] for each in outputs(undisturbed)]
    assert not is_exact or begun == models.expected[model]
    given = [len(answer.choices[0].logprobs) for answer in undisturbed]
    assert given == [NUM_KILLED_TOKENS if number % 2 else 0 for number in range(len(prompts))]
    for _ in range(NUM_ATTEMPTS):
        fleet = running.fleet()
        before, ids = fleet["models"][0]["resumes"], engine_ids(fleet)
        answers = asyncio.run(_killed_streams(running, requests, kill))
        pairs = list(zip(answers, undisturbed, strict=True))
        if is_exact:
            assert outputs(answers) == outputs(undisturbed)
            assert [one.same_as(other) for one, other in pairs] == [True] * len(requests)
        else:
            for one, other in zip(outputs(answers), outputs(undisturbed), strict=True):
                assert (len(one), one[:3]) == (len(other), other[:3])
        if running.fleet()["models"][0]["resumes"] > before:
            return len(requests)
        wait_replaced(running, model, ids)
    pytest.fail("the streams had ended each time before they were seen to begin")


def wait_replaced(running: RunningApplication, model: str, ids: set[str]) -> None:
    """Waits until another engine has come for the one of two that was killed."""
    running.wait_fleet(
        lambda fleet: linked_engines(fleet) == {model: 2} and engine_ids(fleet) != ids, RETURN_S
    )


async def _killed_streams(
    running: RunningApplication, requests: list[Request], kill: Callable[[], None]
) -> list[Answer]:
    begun: set[int] = set()
    kills: list[Future[None]] = []
    with ThreadPoolExecutor(1) as elsewhere:

        def on_chunk(number: int, answer: Answer) -> None:
            if answer.num_tokens >= 3:
                begun.add(number)
            if not kills and 2 * len(begun) >= len(requests):
                # The command is answered in an event loop of its own.
                kills.append(elsewhere.submit(kill))

        answers = await stream_all(running.base_url, requests, on_chunk)
    # What they failed with says more than that nobody was killed.
    outputs(answers)
    assert kills
    kills[0].result()
    return answers


@pytest.mark.quick
def test_slices_of_one_host_answer_as_transformers(
    one_host: RunningApplication, models: TinyModels, evidence: Evidence
) -> None:
    assert sorted(row["name"] for row in one_host.fleet()["slices"]) == ["spot-0", "spot-1"]
    num_equal = check_parity(one_host, models, QWEN3)
    evidence.parity(
        f"{QWEN3}, TP 4, through the gateway",
        "two slices v6e 2x2 of one host, 4 devices each",
        "transformers",
        num_equal,
    )


@pytest.mark.quick
def test_json_schema_gives_a_whole_valid_document(one_host: RunningApplication) -> None:
    schema = {
        "type": "object",
        "properties": {
            "chips": {"type": "integer", "minimum": 0, "maximum": 999},
            "state": {"enum": ["ready", "draining"]},
            "hosts": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["chips", "state", "hosts"],
        "additionalProperties": False,
    }
    body = {
        "model": QWEN3,
        "messages": [{"role": "user", "content": "which host is it"}],
        "max_tokens": 120,
        "temperature": 0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "slice", "schema": schema, "strict": True},
        },
    }
    answer = httpx.post(f"{one_host.base_url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    document = json.loads(choice["message"]["content"])
    assert set(document) == {"chips", "state", "hosts"}
    assert 0 <= document["chips"] <= 999
    assert document["state"] in ("ready", "draining")
    assert all(isinstance(host, bool) for host in document["hosts"])


def test_chosen_tokens_have_their_logprobs(one_host: RunningApplication) -> None:
    """Chat with `logprobs: true` and completions with `logprobs: 0`, which vLLM takes for that."""
    body = {"model": QWEN3, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with httpx.Client(base_url=one_host.base_url, timeout=120) as http:
        messages = [{"role": "user", "content": "which host is it"}]
        chat = body | {"messages": messages, "logprobs": True}
        answer = http.post("/v1/chat/completions", json=chat)
        assert answer.status_code == 200, answer.text
        content = answer.json()["choices"][0]["logprobs"]["content"]
        assert [(entry["top_logprobs"], entry["logprob"] < 0) for entry in content] == (
            [([], True)] * 8
        )
        likeliest = http.post("/v1/chat/completions", json=chat | {"top_logprobs": 2}).json()
        for none, some in zip(content, likeliest["choices"][0]["logprobs"]["content"], strict=True):
            assert none["token"] == some["token"]
            assert abs(none["logprob"] - some["logprob"]) < 1e-3
            assert len(some["top_logprobs"]) == 2
        answer = http.post("/v1/completions", json=body | {"prompt": "a host", "logprobs": 0})
        assert answer.status_code == 200, answer.text
        logprobs = answer.json()["choices"][0]["logprobs"]
        assert len(logprobs["token_logprobs"]) == 8
        assert [len(each) for each in logprobs["top_logprobs"]] == [1] * 8


def test_field_that_ends_such_an_engine_is_400(one_host: RunningApplication) -> None:
    before = engine_ids(one_host.fleet())
    body = {"model": QWEN3, "max_tokens": 4, "prompt": "a host"}
    with httpx.Client(base_url=one_host.base_url, timeout=120) as http:
        for field in ("allowed_token_ids", "logprob_token_ids", "seed"):
            answer = http.post("/v1/completions", json=body | {field: [5] if "ids" in field else 1})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert http.post("/v1/completions", json=body).status_code == 200
    assert engine_ids(one_host.fleet()) == before


def kill_busiest_core(running: RunningApplication) -> None:
    """Kills the core of the engine with most requests: the other one may have none at all."""
    cores = {each.environ()["TPU_NAME"]: each for each in running.processes(Role.ENGINE_CORE)}
    fleet = running.fleet()
    busiest = max(fleet["models"][0]["engines"], key=lambda engine: engine["in_flight"])
    (held,) = (row for row in fleet["slices"] if row["replica_id"] == busiest["replica_id"])
    assert held["name"] in cores, (cores, fleet["models"][0]["engines"], fleet["slices"])
    cores[held["name"]].kill()


@pytest.mark.quick
def test_streams_survive_the_end_of_an_engine(
    one_host: RunningApplication, models: TinyModels, evidence: Evidence
) -> None:
    before = engine_ids(one_host.fleet())
    num_equal = kill_under_streams(one_host, models, QWEN3, lambda: kill_busiest_core(one_host))
    evidence.parity(
        f"{QWEN3}, TP 4, one of two engines killed under streams of {NUM_KILLED_TOKENS} tokens",
        "two slices v6e 2x2 of one host, 4 devices each",
        "the undisturbed streams",
        num_equal,
    )
    wait_replaced(one_host, QWEN3, before)


@pytest.mark.parametrize(
    ("model", "engine_args"),
    [
        pytest.param(MOE, {"enable_expert_parallel": True}, id="experts"),
        pytest.param(FP8, {"dtype": "bfloat16"}, id="fp8 weights"),
        pytest.param(QWEN3, {"speculative_config": NGRAM}, id="n-grams"),
        pytest.param(QWEN3, {"kv_transfer_config": OFFLOAD}, id="KV cache on the host"),
        pytest.param(QWEN3, {"data_parallel_size": 2}, id="two copies"),
        pytest.param(DRAFTED, {"dtype": "bfloat16"}, id="EAGLE-3 draft"),
    ],
)
def test_streams_with_a_feature_survive_the_end_of_an_engine(
    models: TinyModels, caches: Path, evidence: Evidence, model: str, engine_args: dict[str, Any]
) -> None:
    """Two slices of one host. What is rounded need not choose as it does in other steps."""
    is_exact = model not in (FP8, DRAFTED)
    if model == DRAFTED:
        engine_args = engine_args | {"speculative_config": drafting(models)}
    with started(application(models, caches, model, ONE_HOST, 2, **engine_args)) as running:
        num_equal = kill_under_streams(
            running, models, model, lambda: kill_busiest_core(running), is_exact=is_exact
        )
    shown = ", ".join(f"{name}: {value}" for name, value in engine_args.items())
    where = "two slices v6e 2x2 of one host, 4 devices each"
    what = f"one of two engines killed under streams of {NUM_KILLED_TOKENS} tokens"
    if not is_exact:
        evidence.placed(f"{model}, {where}, {what}: {num_equal} of {num_equal} were whole")
    else:
        evidence.parity(f"{model} ({shown}), {what}", where, "the undisturbed streams", num_equal)


def test_programs_of_one_application_are_found_by_the_next(
    one_host: RunningApplication, models: TinyModels, caches: Path, evidence: Evidence
) -> None:
    """The hosts of the second one have empty folders, as new machines do."""
    check_parity(one_host, models, QWEN3)
    one_host.interrupt()
    compiled = program_files(caches / "first")
    running = application(models, caches, QWEN3, ONE_HOST, 1, programs="second")
    with started(running):
        check_parity(running, models, QWEN3)
        compiled_again, found = programs_needed(running)
    assert (compiled_again, found > 0) == (0, True)
    # JAX writes whatever it compiles, while serving as well, of which engines tell later.
    assert program_files(caches / "second") == compiled
    evidence.placed(
        f"compile cache through two applications, one after the other: the first compiled "
        f"{len(compiled)} programs, the second found all that it needed and compiled none"
    )


def test_tensor_parallel_over_the_two_hosts_of_a_slice(
    models: TinyModels, caches: Path, evidence: Evidence
) -> None:
    """Two slices of two hosts, an engine on each, and a third slice beside them."""
    with started(application(models, caches, LLAMA, TWO_HOSTS, 2)) as running:
        check_placement(running, evidence, "TP 8 over two hosts")
        where = "two slices v6e 2x4 of two hosts, 2 JAX processes of 4 devices each"
        num_equal = check_parity(running, models, LLAMA)
        evidence.parity(f"{LLAMA}, TP 8, through the gateway", where, "transformers", num_equal)

        def kill() -> None:
            running.simulation("kill", name="spot-1", worker_id=1)

        num_equal = kill_under_streams(running, models, LLAMA, kill)
        evidence.parity(
            f"{LLAMA}, TP 8, host 1 of one of two slices killed under streams of "
            f"{NUM_KILLED_TOKENS} tokens",
            where,
            "the undisturbed streams",
            num_equal,
        )


def test_engine_over_two_joined_slices_answers_as_transformers(
    models: TinyModels, caches: Path, evidence: Evidence
) -> None:
    """One engine, a copy of the model on each slice, and tpu-inference's own mesh over both."""
    with started(application(models, caches, LLAMA, ONE_HOST, 2, joined=2)) as running:
        assert linked_engines(running.fleet()) == {LLAMA: 1}
        check_placement(running, evidence, "two joined slices")
        num_equal = check_parity(running, models, LLAMA)
        evidence.parity(
            f"{LLAMA}, TP 4 on each of two joined slices, through the gateway",
            "two slices v6e 2x2 of one host, 2 JAX processes of 4 devices each",
            "transformers",
            num_equal,
        )


def test_pipeline_parallel_over_the_two_hosts_of_a_slice(
    models: TinyModels, caches: Path, evidence: Evidence
) -> None:
    running = application(models, caches, LLAMA, TWO_HOSTS, 1, pipeline_parallel_size=2)
    with started(running):
        check_placement(running, evidence, "PP 2 over two hosts")
        num_equal = check_parity(running, models, LLAMA)
        evidence.parity(
            f"{LLAMA}, PP 2 x TP 4, through the gateway",
            "a slice v6e 2x4 of two hosts, 2 JAX processes of 4 devices each",
            "transformers",
            num_equal,
        )
