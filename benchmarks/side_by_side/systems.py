"""Who is compared: how each system is started. One of them is up at a time.

An engine waits in one of two ways. Ours naps while it waits for its worker and the worker for it
(`serving/engine/vllm/shm_backoff.py`); vLLM's spins. Either can be had on both sides, by which of
our plug-ins vLLM loads into its processes.
"""

import contextlib
from collections.abc import Callable, Mapping

from benchmarks.ray_serve_llm import Mode, missing_packages, ray_serve_llm
from benchmarks.servers import Server, paced, slicewise, vllm_model, vllm_server
from benchmarks.side_by_side import loads
from benchmarks.side_by_side.at_commit import checkout_of
from benchmarks.side_by_side.errors import BaselineMissingError
from benchmarks.side_by_side.loads import MAX_NUM_SEQS, NOW, TPOT_MS, TTFT_MS
from benchmarks.side_by_side.prompts import SOURCE
from serving.artifacts.model_source import resolve_source
from serving.engine.vllm.parent_death_watch import HOST_VARIABLE
from tests.e2e.application import PROJECT_ROOT

Start = Callable[[], contextlib.AbstractContextManager[Server]]

_ENGINE_ARGS = {
    "max_model_len": 2048,
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_seqs": 64,
    "gpu_memory_utilization": 0.1,
}
ENGINE_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
_PLUGINS, _WATCH, _NAP = "VLLM_PLUGINS", "slicewise_parent_death_watch", "slicewise_shm_backoff"
# What our engine's processes get, and what those of vLLM's server do. The nap is for what runs
# below an engine host. Nothing else reads which: the plug-in that watches it is not loaded there.
OUR_NAP, OUR_SPIN = {_PLUGINS: f"{_WATCH},{_NAP}"}, {_PLUGINS: _WATCH}
VLLMS_NAP, VLLMS_SPIN = {_PLUGINS: _NAP, HOST_VARIABLE: "benchmark"}, {_PLUGINS: ""}


def start_of(system: str) -> Start:
    """Returns how a system is started; what has to be built for that, is.

    Raises:
        BaselineMissingError: it cannot be had here.
    """
    if system in _NUM_GATEWAYS:
        gateways = _NUM_GATEWAYS[system]
        return lambda: slicewise(paced(TTFT_MS, TPOT_MS, MAX_NUM_SEQS), num_gateways=gateways)
    if system == loads.SLICEWISE_NOW:
        checkout = checkout_of(PROJECT_ROOT, NOW)
        model = paced(TTFT_MS, TPOT_MS, MAX_NUM_SEQS, has_thoughts=False)
        return lambda: slicewise(model, checkout)
    if system in _RAY_MODES:
        return _ray_start(_RAY_MODES[system])
    return _REAL_ENGINES[system]


_NUM_GATEWAYS = {loads.SLICEWISE: 1, loads.ONE_GATEWAY: 1, loads.TWO_GATEWAYS: 2}
_RAY_MODES = {
    loads.RAY_DEFAULT: Mode.DEFAULT,
    loads.RAY_FLAGS: Mode.OPTIMIZED,
    loads.RAY_DIRECT: Mode.DIRECT,
}


def _ray_start(mode: Mode) -> Start:
    if missing := missing_packages():
        raise BaselineMissingError(f"not installed: {', '.join(missing)}; `make setup-dev` does")
    pace = {
        "ttft_s": TTFT_MS / 1e3,
        "time_per_token_s": TPOT_MS / 1e3,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_model_len": 2048,
        "vocab_size": 2**31,
    }
    return lambda: ray_serve_llm(mode, pace)


def _ours(wait: Mapping[str, str]) -> Start:
    return lambda: slicewise(vllm_model(_ENGINE_ARGS, {**ENGINE_ENV, **wait}))


def _vllms(wait: Mapping[str, str]) -> Start:
    return lambda: vllm_server(resolve_source(SOURCE), _ENGINE_ARGS, {**ENGINE_ENV, **wait})


_REAL_ENGINES = {
    loads.SLICEWISE_NAPS: _ours(OUR_NAP),
    loads.SLICEWISE_SPINS: _ours(OUR_SPIN),
    loads.VLLM_NAPS: _vllms(VLLMS_NAP),
    loads.VLLM_SPINS: _vllms(VLLMS_SPIN),
}
