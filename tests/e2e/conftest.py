"""Applications that end-to-end tests share: starting one takes a minute, so each starts once."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from .application import (
    PROJECT_ROOT,
    RunningApplication,
    application_args,
    demo_model,
    paced_model,
)

# In this order, so that each is started once and ended before the next one needs its memory.
SHARED = ("demo_application", "keyed_application")
KEYS = ("sk-first-0123456789abcdef", "sk-second-fedcba9876543210")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts tests of one shared application side by side; all else stays where it is."""
    here = Path(__file__).parent
    places = [at for at, item in enumerate(items) if here in item.path.parents]
    ours = sorted((items[at] for at in places), key=_rank)
    for at, item in zip(places, ours, strict=True):
        items[at] = item


def _rank(item: pytest.Item) -> int:
    names = getattr(item, "fixturenames", ())
    return next((rank for rank, name in enumerate(SHARED) if name in names), len(SHARED))


class SharedApplications:
    """At most one application that outlives a module."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._running: RunningApplication | None = None

    def get(self, name: str, build: Callable[[], RunningApplication]) -> RunningApplication:
        """The application `name`; started, in place of another one, when it is not the present."""
        if self._running is None or self._name != name:
            self.stop()
            self._name, self._running = name, build().__enter__()
        return self._running

    def stop(self) -> None:
        """Ends the present one."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()


@pytest.fixture(scope="session")
def shared_applications() -> Iterator[SharedApplications]:
    shared = SharedApplications()
    yield shared
    shared.stop()


@pytest.fixture(scope="module")
def demo_application(shared_applications: SharedApplications) -> RunningApplication:
    """The shipped model on two vLLM engines. Tests that share it leave it as they found it."""
    args = application_args(demo_model())
    return shared_applications.get("demo", lambda: RunningApplication(args))


@pytest.fixture(scope="module")
def keyed_application(
    shared_applications: SharedApplications, tmp_path_factory: pytest.TempPathFactory
) -> RunningApplication:
    """Three models behind API keys from a file: a paced one, one with an adapter, an embedder."""

    def build() -> RunningApplication:
        folder = tmp_path_factory.mktemp("keyed")
        keys_file = folder / "keys.txt"
        keys_file.write_text(f"# rotated\n{KEYS[0]}\n{KEYS[1]}\n")
        adapter = write_adapter(folder / "adapter")
        args = application_args(
            paced_model(1),
            adapted_model(adapter),
            embedding_model(),
            auth={"keys_file": str(keys_file)},
        )
        return RunningApplication(args, api_key=KEYS[0])

    return shared_applications.get("keyed", build)


@pytest.fixture(scope="module")
def paced_application(request: pytest.FixtureRequest) -> Iterator[RunningApplication]:
    """Two paced engines; a module of its own gets an application of its own.

    A module that needs other `args` names them: `pytestmark = pytest.mark.parametrize(
    "paced_application", [args], indirect=True)`.
    """
    args: dict[str, Any] = getattr(request, "param", None) or application_args(paced_model(2))
    with RunningApplication(args) as application:
        yield application


def adapted_model(adapter: Path) -> dict[str, Any]:
    """The shipped model on one engine, with `adapter` served as `adapted`."""
    arguments = demo_model()["engine_args"]
    arguments |= {"enable_lora": True, "max_lora_rank": 8, "max_model_len": 512}
    return demo_model(
        name="base",
        engine_args=arguments,
        lora_adapters=[{"name": "adapted", "path": str(adapter)}],
        deployments=[{"compute_class": "local", "replicas": 1}],
    )


def embedding_model() -> dict[str, Any]:
    """The shipped model's weights as an embedder, on one engine."""
    arguments = {
        "runner": "pooling",
        "convert": "embed",
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "gpu_memory_utilization": 0.1,
    }
    return {
        "name": "embedder",
        "source": "models/slicewise-demo",
        "engine_args": arguments,
        "engine_env": demo_model()["engine_env"],
        "deployments": [{"compute_class": "local", "replicas": 1}],
    }


def write_adapter(folder: Path, rank: int = 4) -> Path:
    """A LoRA adapter over the shipped model, in PEFT's format, strong enough to change its words."""
    config = json.loads((PROJECT_ROOT / "models/slicewise-demo/config.json").read_text())
    num_outputs = {
        "q_proj": config["num_attention_heads"] * config["head_dim"],
        "v_proj": config["num_key_value_heads"] * config["head_dim"],
    }
    chance = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, outputs in num_outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(
                rank, config["hidden_size"], generator=chance
            )
            weights[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=chance)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "models/slicewise-demo",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(num_outputs),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return folder
