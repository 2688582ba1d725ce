"""An engine over two hosts that share nothing but a network: namespaces of their own.

What one kernel, one PID namespace and one address hide, these hosts show. Nodes are started as pods
start them, and the application as users deploy it; nothing of `slicewise sim` runs. The chips and
the kernels for them are replaced as elsewhere in this folder.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from deployments.simulation.hosts.namespaces import Host, Hosts, check_permitted
from deployments.simulation.plan import SimulatedSlices
from serving.slices.probe import SIMULATED_VARIABLE
from tests.e2e.application import application_args, engine_ids, serve_config
from tests.hosts.http_calls import Call, HttpCalls
from tests.hosts.permission import skipped_where_refused
from tests.hosts.ray_nodes import RayNodes, node_environment

from .engines import ENGINE_ARGS, namespaced_environment
from .evidence import Evidence
from .tiny_models import LLAMA, NUM_NEW_TOKENS, TinyModels

pytestmark = [pytest.mark.tpu_sim, pytest.mark.timeout(1500)]

SLICES = SimulatedSlices(
    name="spot", compute_class="spot", generation="v6e", topology="2x4", chips_per_host=4
)
PORT = 8000
URL = f"http://127.0.0.1:{PORT}"
# Limits of a machine with much other work; alone a start takes three minutes.
START_S = 900.0
# How long a process may outlive the one that it was for, and an end go unknown.
END_S = 60.0
# Far longer than that: what is known before comes by no check.
HANG_TIMEOUT_S = 900.0
# Log-probabilities of one token by two ways through the model: float32, other shapes of a step.
TOLERANCE = 1e-3
# What processes are called.
ENGINE_HOST, ENGINE_CORE, WORKER = "ray::EngineHostActor", "VLLM::EngineCore", "ray::RayWorkerProc"


@dataclass(frozen=True)
class Served:
    """The application on a head and the two hosts of a slice; deployed at `began_s` (monotonic)."""

    folder: Path  # what each host has for itself
    slice_hosts: list[Host]
    nodes: RayNodes
    calls: HttpCalls
    began_s: float

    def fleet(self) -> dict[str, Any] | None:
        """`/fleet` at this moment; `None` while nothing answers there."""
        reply = self.calls.get(f"{URL}/fleet")
        return reply.json() if reply.status == 200 else None

    def engine_ids(self) -> list[str]:
        """The engines that take requests."""
        fleet = self.fleet()
        return [] if fleet is None else sorted(engine_ids(fleet))

    def answers(self, model: str, prompts: list[list[int]]) -> list[list[int]]:
        """The tokens with which all prompts are answered that are asked at once."""
        calls = [Call(f"{URL}/v1/completions", _completion(model, prompt)) for prompt in prompts]
        replies = [reply.json() for reply in self.calls.make(calls)]
        return [reply["choices"][0]["token_ids"] for reply in replies]

    def logged_by_engine_core(self) -> str:
        """What Ray keeps on the first host of what the engine's processes there wrote."""
        (core,) = self.slice_hosts[0].processes(ENGINE_CORE)
        # As that process sees it: the folder is its host's own.
        logs = Path(f"/proc/{core.pid}/root{self.folder}").rglob("logs/worker-*")
        return "".join(path.read_text(errors="replace") for path in logs)

    def completed(self, **fields: Any) -> dict[str, Any]:
        """The choice with which one completion is answered."""
        (reply,) = self.calls.make([Call(f"{URL}/v1/completions", {"model": LLAMA, **fields})])
        assert reply.status == 200, reply.json()
        choice: dict[str, Any] = reply.json()["choices"][0]
        return choice


def _completion(model: str, prompt: list[int]) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": NUM_NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def config(models: TinyModels) -> dict[str, Any]:
    """The file as a user writes it."""
    served = {
        "name": LLAMA,
        "source": models.path(LLAMA),
        "engine": "vllm-tpu",
        "engine_args": ENGINE_ARGS,
        "deployments": [
            {
                "compute_class": SLICES.compute_class,
                "slice": {
                    "generation": SLICES.generation,
                    "topology": SLICES.topology,
                    "chips_per_host": SLICES.chips_per_host,
                },
            }
        ],
    }
    args = application_args(served, link={}, health={"hang_timeout_s": HANG_TIMEOUT_S})
    return serve_config(args, port=PORT)


@pytest.fixture(scope="module")
def served(
    models: TinyModels, caches: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with skipped_where_refused():
        check_permitted()
    folder = tmp_path_factory.mktemp("served")
    (folder / "serve_config.yaml").write_text(yaml.safe_dump(config(models)))
    with Hosts() as network:
        head, *slice_hosts = [network.add(name) for name in ("head", "first", "second")]
        environment = node_environment(network.folder) | namespaced_environment(
            caches, SLICES.shape.chips_per_host
        )
        nodes = RayNodes(head, environment, folder)
        nodes.start_head(START_S)
        nodes.join_slice(SLICES, slice_hosts, [{SIMULATED_VARIABLE: "1"}] * len(slice_hosts))
        nodes.wait_joined(START_S)
        nodes.run_on_head("serve", "run", str(folder / "serve_config.yaml"))
        served = Served(network.folder, slice_hosts, nodes, HttpCalls(head), time.monotonic())
        nodes.wait_until(lambda: len(served.engine_ids()) == 1, START_S)
        yield served


@pytest.mark.quick
def test_engine_over_hosts_in_namespaces_answers_as_transformers(
    served: Served, models: TinyModels, evidence: Evidence
) -> None:
    workers = [host.processes(WORKER) for host in served.slice_hosts]
    assert [len(found) for found in workers] == [1, 1]
    prompts, expected = models.prompts[LLAMA], models.expected[LLAMA]
    alone = served.answers(LLAMA, prompts[:1])
    first_s = time.monotonic() - served.began_s
    alone += [served.answers(LLAMA, [prompt])[0] for prompt in prompts[1:]]
    at_once = served.answers(LLAMA, prompts * 2)
    assert alone + at_once == expected * 3
    evidence.parity(
        f"{LLAMA}, TP 8, through the gateway",
        "a slice v6e 2x4 of two hosts in namespaces of their own, 4 devices each",
        "transformers",
        len(expected) * 3,
    )
    evidence.placed(
        "hosts in PID, network, mount, UTS and IPC namespaces of their own: one worker each on "
        f"both hosts of the slice; first answer {first_s:.0f} s after `serve run`"
    )


@pytest.mark.quick
def test_echo_with_logprobs_is_answered_over_two_hosts(
    served: Served, models: TinyModels, evidence: Evidence
) -> None:
    """Both hosts run the same programs, with log-probabilities of a prompt and after it."""
    engines = served.engine_ids()
    greedy = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}
    for prompt in models.prompts[LLAMA][1:4]:
        answer = served.completed(prompt=prompt, max_tokens=12, **greedy)
        text = prompt + answer["token_ids"]
        echoed = served.completed(prompt=text, max_tokens=6, echo=True, **greedy)
        of_prompt = echoed["logprobs"]["token_logprobs"][len(prompt) : len(text)]
        assert of_prompt == pytest.approx(answer["logprobs"]["token_logprobs"], abs=TOLERANCE)
        assert len(echoed["logprobs"]["token_logprobs"]) == len(text) + 6
    assert served.engine_ids() == engines
    # Some of these programs come late in float32, on both hosts; the first host learns of both.
    logged = served.logged_by_engine_core()
    other = f"compiled_on_another_host worker={served.slice_hosts[1].address}:"
    assert "compiled_after_warm_up" in logged
    num_told = logged.count(other)
    assert num_told > 0
    evidence.placed(f"late programs of the other host told to the engine's first host: {num_told}")
    evidence.parity(
        f"{LLAMA}, TP 8, log-probabilities of a prompt against those it was generated with",
        "a slice v6e 2x4 of two hosts in namespaces of their own, 4 devices each",
        "the same engine's, token by token",
        3,
    )


@pytest.mark.quick
def test_end_of_the_worker_on_the_other_host_is_known_at_once(
    served: Served, models: TinyModels, evidence: Evidence
) -> None:
    """Also while no request is there, in which nobody would miss it."""
    _, second = served.slice_hosts
    (worker,) = second.processes(WORKER)
    before = served.engine_ids()
    killed_s = time.monotonic()
    worker.kill()
    served.nodes.wait_until(lambda: not set(before) & set(served.engine_ids()), END_S)
    gone_s = time.monotonic() - killed_s
    evidence.placed(
        f"worker on the other host killed: the gateway had no link to its engine after "
        f"{gone_s:.1f} s, with a hang check of {HANG_TIMEOUT_S:.0f} s"
    )
    served.nodes.wait_until(lambda: served.engine_ids() != [], START_S)
    prompts, expected = models.prompts[LLAMA], models.expected[LLAMA]
    assert served.answers(LLAMA, prompts) == expected


def test_worker_on_the_other_host_ends_with_the_engine_host(
    served: Served, models: TinyModels, evidence: Evidence
) -> None:
    """Nothing on its own host watches it: its Ray actor ends with the engine core that owns it."""
    first, second = served.slice_hosts
    (engine_host,) = first.processes(ENGINE_HOST)
    cores, workers = first.processes(ENGINE_CORE), second.processes(WORKER)
    assert (len(cores), len(workers)) == (1, 1)
    before = served.engine_ids()
    killed_s = time.monotonic()
    engine_host.kill()
    assert psutil.wait_procs(cores, timeout=END_S)[1] == []
    core_s = time.monotonic() - killed_s
    assert psutil.wait_procs(workers, timeout=END_S)[1] == []
    worker_s = time.monotonic() - killed_s
    evidence.placed(
        f"engine host killed: its engine core ended within {core_s:.1f} s, the worker on the other "
        f"host within {worker_s:.1f} s"
    )
    # And so the chips are free for the next.
    served.nodes.wait_until(lambda: served.engine_ids() not in ([], before), START_S)
    prompts, expected = models.prompts[LLAMA], models.expected[LLAMA]
    assert served.answers(LLAMA, prompts) == expected
