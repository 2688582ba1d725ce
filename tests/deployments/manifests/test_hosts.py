"""What rendered TPU hosts are like: rights, kernels, disks, memory, and room for the models."""

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.engine_plan import plan_serve_config
from deployments.validation.documents import Folder, parse_files
from deployments.validation.schemas import Schemas
from deployments.validation.sizes import ModelSize, model_sizes, size_problems, unknown_sizes
from serving.config.sections import load_yaml
from serving.domain.errors import ConfigError
from serving.domain.topology import GIB, Generation, SliceShape, shapes, slice_shape
from serving.tpu.machines import (
    allocatable_memory_gib,
    boot_disk_gb_for,
    boot_disk_types,
    default_memory_gib,
    machine_of,
    pods_boot_disk_bytes,
    pods_local_ssd_bytes,
)
from tests.tpu.models import LLAMA_8B, facts_of

from .examples import (
    ROOT,
    VALUES,
    found,
    in_memory,
    one,
    parsed,
    raw_values,
    rendered,
    shipped_folder,
)

Json = dict[str, Any]
SHAPE = slice_shape("v6e", "4x4")
TPU7X = slice_shape("tpu7x", "2x2x2")
FACTS = ROOT / "deployments" / "tpu" / "models"


def group_of(raw: Json, name: str) -> Json:
    specs = one(in_memory(raw), "RayCluster").body["spec"]["workerGroupSpecs"]
    (found,) = [each for each in specs if each["groupName"] == name]
    spec: Json = found["template"]["spec"]
    return spec


def host_of(shape: Any = SHAPE, **host: Any) -> Json:
    return group_of(
        raw_values((shape, "spot"), host=host), f"{shape.generation}-{shape.topology}-spot"
    )


def rule_of(shape: Any = SHAPE, **host: Any) -> Json:
    folder = in_memory(raw_values((shape, "spot"), host=host))
    made = one(folder, "ComputeClass", f"{shape.generation}-{shape.topology}-spot")
    rule: Json = made.body["spec"]["priorities"][0]
    return rule


def variables(pod: Json) -> dict[str, str | None]:
    return {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}


def test_host_is_roots_with_what_locks_memory_unless_told_otherwise() -> None:
    default = host_of()["containers"][0]["securityContext"]["capabilities"]
    assert default == {"drop": ["ALL"], "add": ["IPC_LOCK", "SYS_RESOURCE"]}
    plain = host_of(rights={"user": 1000})
    assert plain["securityContext"]["runAsUser"] == 1000
    assert plain["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    other = host_of(rights={"capabilities": ["SYS_NICE"]})
    assert other["containers"][0]["securityContext"]["capabilities"]["add"] == ["SYS_NICE"]
    # The API server refuses it together with a refusal of more rights.
    privileged = host_of(rights={"privileged": True})["containers"][0]["securityContext"]
    assert privileged == {"privileged": True}


def test_host_has_its_variables() -> None:
    found = variables(host_of())
    assert found["HF_HOME"] == "/var/cache/slicewise/huggingface"
    assert found["OMP_NUM_THREADS"] == "32"
    assert found["SLICEWISE_MEMLOCK_BYTES"] == "unlimited"
    given = variables(host_of(omp_threads=8, rights={"memlock_gib": 64}))
    assert (given["OMP_NUM_THREADS"], given["SLICEWISE_MEMLOCK_BYTES"]) == ("8", str(64 * GIB))


@pytest.mark.parametrize(("given", "expected"), [({}, "86400"), ({"head_away_s": 7200}, "7200")])
def test_all_but_the_head_outlast_a_head_and_the_head_has_no_say(
    given: Json, expected: str
) -> None:
    name = "RAY_gcs_rpc_server_reconnect_timeout_s"
    spec = one(in_memory(raw_values((SHAPE, "spot"), **given)), "RayCluster").body["spec"]
    waits = [variables(each["template"]["spec"]).get(name) for each in spec["workerGroupSpecs"]]
    assert waits == [expected] * 3  # gateways, control processes, hosts of slices
    assert name not in variables(spec["headGroupSpec"]["template"]["spec"])


def test_head_logs_lie_where_kuberay_looks_for_them() -> None:
    """Of another name KubeRay makes a volume of its own for the autoscaler beside the head."""
    head = one(in_memory(raw_values((SHAPE, "spot"))), "RayCluster").body["spec"]["headGroupSpec"]
    spec = head["template"]["spec"]
    (name,) = [
        mount["name"]
        for mount in spec["containers"][0]["volumeMounts"]
        if mount["mountPath"] == "/tmp/ray"
    ]
    assert name == "ray-logs"
    assert {"name": "ray-logs", "emptyDir": {}} in spec["volumes"]


@pytest.mark.parametrize("generation", Generation)
def test_host_of_every_shape_has_what_its_machine_can_give(generation: Generation) -> None:
    for shape in shapes(generation):
        machine = machine_of(shape)
        assert 0 < default_memory_gib(shape) < allocatable_memory_gib(machine) < machine.memory_gib
        assert boot_disk_types(generation)


def test_memory_is_by_machine_unless_told_otherwise() -> None:
    limits = host_of()["containers"][0]["resources"]["limits"]
    assert limits["memory"] == f"{default_memory_gib(SHAPE)}Gi" == "628Gi"
    given = host_of(memory_gib_per_chip=50)["containers"][0]["resources"]
    assert given["limits"]["memory"] == given["requests"]["memory"] == "200Gi"


def test_room_on_disks_is_what_gke_publishes() -> None:
    # The example of GKE's page on node sizes, read 2026-11-23: 47.06 GB of a disk of 100 GB, whose
    # file system has 101.2 GB there; here the disk is taken at its nominal size.
    assert pods_boot_disk_bytes(100) == pytest.approx(47_060_071_478 - 0.9 * 1.2e9, rel=0.001)
    assert pods_boot_disk_bytes(1000) == pytest.approx(900e9 - 100 * GIB)
    assert pods_local_ssd_bytes(1) == pytest.approx((375 * 0.9 - 50) * GIB)
    for num_bytes in (1, 10**11, 10**12):
        size_gb = boot_disk_gb_for(num_bytes)
        assert pods_boot_disk_bytes(size_gb) >= num_bytes
        assert size_gb == 50 or pods_boot_disk_bytes(size_gb - 50) < num_bytes


def test_disk_is_of_the_generations_type_and_the_given_size() -> None:
    assert rule_of()["storage"] == {"bootDiskType": "hyperdisk-balanced", "bootDiskSize": 100}
    v5p = rule_of(slice_shape("v5p", "2x2x1"), boot_disk={"size_gb": 400})["storage"]
    assert v5p == {"bootDiskType": "pd-balanced", "bootDiskSize": 400}
    ssd = rule_of(cache={"medium": "local_ssd", "num_local_ssds": 2})["storage"]
    assert ssd["localSSDCount"] == 2


def test_cache_in_memory_has_a_bound() -> None:
    pod = host_of(cache={"medium": "memory", "size_gib": 100})
    (volume,) = [each for each in pod["volumes"] if each["name"] == "cache"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "100Gi"}


def test_kernel_is_set_by_the_class_as_the_generation_needs_it(crds: Schemas) -> None:
    assert rule_of()["nodeSystemConfig"]["linuxNodeConfig"] == {
        "transparentHugepageEnabled": "TRANSPARENT_HUGEPAGE_ENABLED_ALWAYS"
    }
    # Beside what a spot node has already.
    assert "kubeletConfig" in rule_of()["nodeSystemConfig"]
    assert rule_of(TPU7X)["nodeSystemConfig"]["linuxNodeConfig"] == {
        "nodeVfioConfig": {"dmaEntryLimit": 2_000_000},
        "sysctls": {"vm.max_map_count": 8_388_608},
        "transparentHugepageEnabled": "TRANSPARENT_HUGEPAGE_ENABLED_ALWAYS",
    }
    given = rule_of(kernel={"max_map_count": 1_000_000, "transparent_hugepages": "never"})
    kernel = given["nodeSystemConfig"]["linuxNodeConfig"]
    assert kernel["sysctls"] == {"vm.max_map_count": 1_000_000}
    assert kernel["transparentHugepageEnabled"].endswith("_NEVER")
    assert "linuxNodeConfig" not in rule_of(kernel={"set_by": "nobody"})["nodeSystemConfig"]
    for shape in (SHAPE, TPU7X):
        folder = in_memory(raw_values((shape, "spot")))
        classes = folder.of_kind("ComputeClass")
        assert [str(problem) for each in classes for problem in crds.problems(each)] == []


def test_init_container_sets_what_it_finds_and_nothing_else(tmp_path: Path) -> None:
    pod = host_of(TPU7X, kernel={"set_by": "init_container"})
    first = pod["initContainers"][0]
    assert first["securityContext"]["privileged"] is True
    shell, option, script = first["command"]
    for path in ("proc/sys/vm/max_map_count", "sys/kernel/mm/transparent_hugepage/enabled"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("before\n")
    script = script.replace(" /proc", f" {tmp_path}/proc").replace(" /sys", f" {tmp_path}/sys")
    subprocess.run([shell, option, script], check=True)
    assert (tmp_path / "proc/sys/vm/max_map_count").read_text() == "8388608\n"
    assert (tmp_path / "sys/kernel/mm/transparent_hugepage/enabled").read_text() == "always\n"
    assert not (tmp_path / "sys/module").exists()
    assert "linuxNodeConfig" not in str(rule_of(TPU7X, kernel={"set_by": "init_container"}))


def pools_script(*slices: Any, **cluster: Any) -> list[list[str]]:
    """The commands of the script, as a shell splits them, its options alone."""
    raw = raw_values(*slices, provisioning="node-pools", **cluster)
    lines = rendered(raw)["gke/node-pools.sh"].splitlines()
    return [shlex.split(line) for line in lines if line.startswith("gcloud")]


def test_pools_of_several_zones_have_each_slice_in_one() -> None:
    zones = ["us-east5-a", "us-east5-b"]
    commands = pools_script((SHAPE, "spot"), zones=zones)
    assert [each for words in commands for each in words if "node-locations" in each] == [
        "--node-locations=us-east5-a",
        "--node-locations=us-east5-b",
    ]
    (one_host,) = pools_script((slice_shape("v6e", "2x2"), "spot"), zones=zones)
    assert "--node-locations=us-east5-a,us-east5-b" in one_host


def test_pools_of_a_shared_reservation_name_its_project() -> None:
    entry = {"compute_class": "reserved", "reservation": "ours", "reservation_project": "other"}
    commands = pools_script((SHAPE, "reserved"), classes=[entry])
    assert all("--reservation=projects/other/reservations/ours" in words for words in commands)
    own = pools_script((SHAPE, "reserved"))
    assert all("--reservation=ours" in words for words in own)


def test_pools_have_disk_and_kernel_and_what_gcloud_cannot_set_a_container_sets(
    tmp_path: Path,
) -> None:
    raw = raw_values(
        (SHAPE, "spot"), provisioning="node-pools", host={"boot_disk": {"size_gb": 300}}
    )
    script = rendered(raw)["gke/node-pools.sh"]
    program = tmp_path / "gcloud"
    said = tmp_path / "said"
    program.write_text(
        f'#!/bin/sh\nfor word in "$@"; do case $word in --system-config*) cat "${{word#*=}}" '
        f'>> {said}; echo >> {said};; --disk*) echo "$word" >> {said};; esac; done\n'
    )
    program.chmod(0o755)
    subprocess.run(
        ["sh", "-c", script],
        check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "CLUSTER": "c", "LOCATION": "l"},
    )
    lines = said.read_text().splitlines()
    assert lines[:2] == ["--disk-type=hyperdisk-balanced", "--disk-size=300"]
    config = json.loads(lines[2])
    assert config["linuxConfig"] == {
        "transparentHugepageEnabled": "TRANSPARENT_HUGEPAGE_ENABLED_ALWAYS"
    }
    own = group_of(raw_values((TPU7X, "spot"), provisioning="node-pools"), "tpu7x-2x2x2-spot")
    assert own["initContainers"][0]["name"] == "host-kernel"


BAD: dict[str, tuple[Json, str]] = {
    "capabilities of another user": (
        {"rights": {"user": 1000, "capabilities": ["IPC_LOCK"]}},
        "cluster.host.rights.capabilities: user 1000 would not have them: Kubernetes gives them to "
        "root (value IPC_LOCK); allowed: nothing, or user 0",
    ),
    "capabilities of a privileged container": (
        {"rights": {"privileged": True, "capabilities": ["IPC_LOCK"]}},
        "cluster.host.rights.capabilities: a privileged container has all of them",
    ),
    "no capability": ({"rights": {"capabilities": ["CAP-x"]}}, "cluster.host.rights.capabilities"),
    "too much memory": (
        {"memory_gib_per_chip": 180},
        "cluster.host.memory_gib_per_chip: of 720 GiB of ct6e-standard-4t pods may have 699 (value "
        "180); allowed: at most 174",
    ),
    "too many CPUs": (
        {"cpus_per_chip": 45},
        "cluster.host.cpus_per_chip: 180 CPUs are more than ct6e-standard-4t leaves a pod (value "
        "45); allowed: at most 44",
    ),
    "disk of another generation": (
        {"boot_disk": {"type": "pd-balanced"}},
        "cluster.host.boot_disk.type: hosts of v6e start from no such disk (value pd-balanced); "
        "allowed: hyperdisk-balanced",
    ),
    "kernel that nobody sets": (
        {"kernel": {"set_by": "nobody", "max_map_count": 100_000}},
        "cluster.host.kernel.max_map_count: nobody would set it (value 100000)",
    ),
    "few maps": ({"kernel": {"max_map_count": 1000}}, "cluster.host.kernel.max_map_count"),
    "memory without a size": (
        {"cache": {"medium": "memory"}},
        "cluster.host.cache.size_gib: missing, and the cache is on memory; required: a number",
    ),
    "SSDs of another medium": (
        {"cache": {"num_local_ssds": 1}},
        "cluster.host.cache.num_local_ssds: the cache is on boot_disk (value 1); allowed: nothing, "
        "or medium local_ssd",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_value_is_refused_with_field_value_and_what_is_allowed(case: str) -> None:
    host, words = BAD[case]
    with pytest.raises(ConfigError) as caught:
        parsed(raw_values((SHAPE, "spot"), host=host))
    assert any(words in str(problem) for problem in caught.value.problems), caught.value.problems


def test_pool_that_gcloud_cannot_set_up_is_refused() -> None:
    host = {"kernel": {"set_by": "node_config", "vfio_dma_entries": 100_000}}
    with pytest.raises(ConfigError, match=r"gcloud cannot set vfio_dma_entries of a node pool"):
        parsed(raw_values((SHAPE, "spot"), provisioning="node-pools", host=host))


# -- room for models --


def tpu_model(source: str, shape: Any, host: Json, **args: Any) -> Folder:
    raw = raw_values((shape, "spot"), host=host)
    (model,) = raw["applications"][0]["args"]["models"]
    model |= {"engine": "vllm-tpu", "source": source, "engine_args": args}
    return in_memory(raw)


def words_of(folder: Folder) -> list[str]:
    return sorted({str(each) for each in size_problems(folder, model_sizes([FACTS]))})


LARGE = "Qwen/Qwen3-Coder-480B-A35B-Instruct"


def test_model_that_fits_neither_disk_nor_memory_is_refused_with_numbers() -> None:
    found = words_of(tpu_model(LARGE, SHAPE, {}))
    memory, disk = [each for each in found if "RayCluster" in each]
    assert "limits.memory: demo-0 needs 910.36 GiB while it loads (weights of 894.36 GiB" in memory
    assert 'value "628Gi"); needed: 911Gi (cluster.host.memory_gib_per_chip)' in memory
    assert "needs 914.36 GiB of disk" in disk
    assert "42.82 GiB that GKE leaves pods" in disk
    assert "needed: cluster.host.boot_disk.size_gb of 1250" in disk


@pytest.mark.parametrize(
    ("host", "args"),
    [
        ({"boot_disk": {"size_gb": 1250}}, {"load_format": "runai_streamer"}),
        (
            {"cache": {"medium": "local_ssd", "num_local_ssds": 4}},
            {"load_format": "runai_streamer"},
        ),
    ],
)
def test_model_fits_a_larger_disk_loaded_in_pieces(host: Json, args: Json) -> None:
    assert words_of(tpu_model(LARGE, SHAPE, host, **args)) == []


def test_each_engine_on_a_host_counts_where_it_loads_a_whole_checkpoint() -> None:
    host = {"boot_disk": {"size_gb": 1250}}
    raw = raw_values((SHAPE, "spot"), host=host)
    (model,) = raw["applications"][0]["args"]["models"]
    model |= {"engine": "vllm-tpu", "source": "org/model", "engine_args": {}}

    def found(num_engines: int) -> list[str]:
        model["deployments"][0]["slice"]["num_engines"] = num_engines
        size = ModelSize(200 * GIB, replace(facts_of(LLAMA_8B), architecture="GptOssForCausalLM"))
        return [
            str(each)
            for each in size_problems(in_memory(raw), lambda _source: size)
            if "RayCluster" in str(each)
        ]

    assert found(1) == found(SHAPE.num_hosts) == []
    (problem,) = found(SHAPE.num_chips)
    assert "needs 840.00 GiB while it loads" in problem
    assert "by each of 4 engines" in problem


def test_kv_cache_in_the_memory_of_the_host_counts_there() -> None:
    raw = raw_values((slice_shape("v6e", "2x2"), "spot"))
    (model,) = raw["applications"][0]["args"]["models"]
    connector = {"kv_connector": "TPUOffloadConnector"}
    args = {"max_model_len": 8192, "block_size": 128, "kv_transfer_config": connector}
    model |= {"engine": "vllm-tpu", "source": "meta/llama", "engine_args": args}

    def found(num_blocks: int) -> list[str]:
        model["engine_env"] = {"TPU_OFFLOAD_NUM_CPU_CHUNKS": f"{num_blocks}"}
        size = ModelSize(15 * GIB, facts_of(LLAMA_8B))
        return [
            str(each)
            for each in size_problems(in_memory(raw), lambda _source: size)
            if "RayCluster" in str(each)
        ]

    # A block of 128 tokens is 16 MiB over the four chips: 32 layers of 8 heads of 128, in bfloat16.
    assert found(1024) == []
    (problem,) = found(65536)
    assert "needs 1040.00 GiB while it loads" in problem
    assert "a KV cache of 1024.00 GiB for each engine" in problem


def test_cache_in_memory_counts_as_memory() -> None:
    host = {"cache": {"medium": "memory", "size_gib": 1000}}
    (found,) = [
        each
        for each in words_of(tpu_model(LARGE, SHAPE, host, load_format="runai_streamer"))
        if "RayCluster" in each
    ]
    assert "needs 930.36 GiB while it loads" in found


def test_weights_that_pass_the_disk_by_need_none_of_it() -> None:
    def size_of(source: str) -> ModelSize | None:
        return ModelSize(900 * GIB, facts_of(LLAMA_8B))

    assert list(size_problems(tpu_model("gs://ours/llama", SHAPE, {}), size_of)) == []
    assert list(size_problems(tpu_model("meta/llama", SHAPE, {}), size_of)) != []


def test_exact_size_is_read_from_the_index_beside_the_weights(tmp_path: Path) -> None:
    config = json.loads((FACTS / "llama-3.1-8b.json").read_text())["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    counted = model_sizes([])(str(tmp_path))
    assert counted is not None
    assert counted.weights_bytes == pytest.approx(16.06e9, rel=0.001)
    total = {"metadata": {"total_size": 123}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(total))
    assert model_sizes([])(str(tmp_path)) == ModelSize(123, facts_of(LLAMA_8B))


def test_model_of_unknown_size_is_named_and_not_refused() -> None:
    folder = tpu_model("nobody/knows", SHAPE, {})
    assert words_of(folder) == []
    assert unknown_sizes(folder, model_sizes([FACTS])) == ["nobody/knows"]


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.name)
def test_hosts_of_shipped_values_have_room_for_their_models(path: Path) -> None:
    folder = shipped_folder(path.name)
    size_of = model_sizes([FACTS])
    assert unknown_sizes(folder, size_of) == []
    assert words_of(folder) == []


# The shipped serve configs of large models, and the smallest boot disk in GB, in steps of 50, with
# which their hosts have room for them.
LARGE_CONFIGS = {
    "v6e-2x4-llama-3.3-70b": 300,
    "v6e-4x4-llama-3.3-70b": 300,
    "v5p-2x2x2-llama-3.3-70b": 300,
    "tpu7x-2x2x1-qwen3-coder-480b": 700,
}


def large_folder(name: str, boot_disk_gb: int) -> Folder:
    """The model of a shipped serve config on the slices that it has there."""
    config = load_yaml((ROOT / "deployments" / "tpu" / f"{name}.yaml").read_text())
    (model,) = config["applications"][0]["args"]["models"]
    (deployment,) = model["deployments"]
    shape = slice_shape(deployment["slice"]["generation"], deployment["slice"]["topology"])
    host = {"boot_disk": {"size_gb": boot_disk_gb}}
    raw = raw_values((shape, deployment["compute_class"]), host=host)
    raw["applications"][0]["args"]["models"] = [model]
    return in_memory(raw)


@pytest.mark.parametrize("name", LARGE_CONFIGS)
def test_large_models_rendered_on_their_slices_add_up(name: str) -> None:
    """Layout, memory of the devices, memory of the hosts, and the disk at a stated size."""
    size_gb = LARGE_CONFIGS[name]
    folder = large_folder(name, size_gb)
    assert found(folder) == words_of(folder) == unknown_sizes(folder, model_sizes([FACTS])) == []
    (text,) = folder.serve_configs.values()
    report = plan_serve_config(load_yaml(text), None, [FACTS])
    assert report.problems == ()
    (plan,) = report.plans
    assert plan.can_start
    shape = plan.requirements.shape
    assert plan.settings.engine_args["tensor_parallel_size"] == shape.num_devices
    (group,) = one(folder, "RayCluster").body["spec"]["workerGroupSpecs"][-1:]
    assert group["numOfHosts"] == shape.num_hosts
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert int(limits["google.com/tpu"]) == shape.chips_per_host
    smaller = words_of(large_folder(name, size_gb - 50))
    assert all(f"needed: cluster.host.boot_disk.size_gb of {size_gb}" in each for each in smaller)
    assert smaller


@pytest.mark.parametrize(
    ("source", "shape", "args", "whole"),
    [
        ("Qwen/Qwen3-8B", SHAPE, {}, True),  # more shards than KV heads
        ("Qwen/Qwen3-8B", slice_shape("v6e", "2x4"), {}, False),
        ("Qwen/Qwen3-8B", slice_shape("v6e", "2x4"), {"enable_lora": True}, True),
        ("meta-llama/Llama-3.1-8B-Instruct", SHAPE, {}, False),
    ],
)
def test_model_that_is_loaded_as_a_torch_one_needs_its_whole_checkpoint_in_memory(
    source: str, shape: SliceShape, args: Json, *, whole: bool
) -> None:
    host = {"boot_disk": {"size_gb": 300}, "memory_gib_per_chip": 3}
    complaints = words_of(tpu_model(source, shape, host, **args))
    assert any("the whole checkpoint in memory at once" in each for each in complaints) is whole


def test_sizes_of_manifests_without_an_application_are_no_problem() -> None:
    folder, problems = parse_files({"a.yaml": "kind: RayCluster\nmetadata: {name: x}\nspec: {}\n"})
    assert problems == []
    assert words_of(folder) == []
