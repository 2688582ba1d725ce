"""Runs vLLM behind the engine protocol: an engine core in its own processes, fed token requests.

Owns the engine core's life in this host: start, steps, check, end. Does not own the link, nor the
meaning of a request. The engine core and its workers end with this process, however it ends
(`watch_host`), and the end of any of them is known here at once: by the kernel for those on this
host, by the engine core's executor for those on other hosts (`tpu.slice_executor`).
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import psutil
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.engine import (
    EngineCoreEventType,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackEncoder

from serving.domain.tokens.block_hashes import DEFAULT_SEED, first_parent
from serving.domain.tokens.cached_blocks import CacheLayout, CacheMirror
from serving.engine.stats import StatsCollector, StepCount
from serving.engine.tpu.requests import fit_to_tpu
from serving.engine.vllm.parent_death_watch import HOST_VARIABLE, HostProcess
from serving.engine.vllm.resume_scheduler import (
    CACHE_STATS,
    LINE_STATS,
    resuming_scheduler,
    scheduler_path,
)
from serving.engine.vllm.token_line import TokenLine
from serving.engine.worker_reports import WorkerReports
from serving.link.engine_protocol import EngineDiedError
from serving.link.messages import (
    EngineEnd,
    EngineLoad,
    EngineStats,
    ProgramCounts,
    TokenOutput,
    TokenRequest,
)
from serving.link.rooms.room import EngineCapacity
from serving.link.vllm_codec import decode_request, encode_outputs, request_decoder
from serving.tpu.settings import request_buckets

logger = logging.getLogger(__name__)

_WARM_UP_PROMPT_TOKENS = 16

# Import paths, because vLLM hands them to processes of its own.
_TPU_WORKER = "serving.engine.tpu.resume_worker.ResumingTPUWorker"
_WORKER_CLASSES = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "serving.engine.vllm.resume_worker.ResumingCPUWorker",
    "tpu_inference.worker.tpu_worker.TPUWorker": _TPU_WORKER,
}
_EXECUTOR_CLASSES = {
    "tpu_inference.executors.ray_distributed_executor_v2.RayDistributedExecutorV2": (
        "serving.engine.tpu.slice_executor.SliceExecutor"
    ),
}
# In the title of vLLM's worker processes.
_WORKER_TITLE = "VLLM::Worker"
# A late program is on the metrics page within this time. Each worker answers between two steps.
_COUNT_PROGRAMS_S = 30.0
# The engine call that returns how many programs each worker has compiled since it was warm.
COMPILATIONS_CALL = "num_compilations"

# Engine operations a gateway may call, by the name of vLLM's own client method.
_CALLS = {
    "list_loras": "list_loras_async",
    "reset_prefix_cache": "reset_prefix_cache_async",
    "reset_mm_cache": "reset_mm_cache_async",
}


def engine_config(model: str, engine_args: Mapping[str, Any]) -> VllmConfig:
    """Returns vLLM's whole configuration of one engine, made to resume requests.

    Raises:
        ValueError: vLLM refuses the arguments; its message has the reason. Nothing was started.
    """
    args = AsyncEngineArgs(model=model, **engine_args)
    config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    scheduler = config.scheduler_config
    is_async = bool(scheduler.async_scheduling)
    if not _schedules_by_rank(config):
        scheduler.scheduler_cls = scheduler_path(async_scheduling=is_async)
    else:
        # tpu-inference with data parallelism in one engine: its own scheduler, with one of vLLM's
        # for each rank below it, in a process of its own.
        scheduler._original_scheduler_cls = resuming_scheduler(async_scheduling=is_async)
    parallel = config.parallel_config
    parallel.worker_cls = _WORKER_CLASSES.get(parallel.worker_cls, parallel.worker_cls)
    backend = parallel.distributed_executor_backend
    if isinstance(backend, type):
        path = _EXECUTOR_CLASSES.get(f"{backend.__module__}.{backend.__qualname__}")
        if path is not None:
            # A class, because vLLM asks it whether it uses Ray.
            parallel.distributed_executor_backend = resolve_obj_by_qualname(path)
    media = config.model_config.multimodal_config
    if media is not None:
        # Every request carries all of its media, because any gateway may send it: none is kept.
        media.mm_processor_cache_gb = 0
    return config


class VllmEngine:
    """Holds one vLLM engine core and its workers. See `Engine` for the contract of each method."""

    def __init__(
        self,
        config: VllmConfig,
        client: AsyncMPClient,
        adapters: Sequence[tuple[str, str]],
        reports: WorkerReports,
    ) -> None:
        """Takes an engine core that runs; `adapters` are those that it is going to load.

        `reports` were open when it was started, and are closed with it.
        """
        self.on_scheduled: Callable[[str, float], None] | None = None
        self._config = config
        self._client = client
        self._encoder = MsgpackEncoder()
        self._decoder = request_decoder()
        self._load = EngineLoad()
        self._line = TokenLine()
        self._cached = _mirror_of(config, adapters)
        self._meter = self._new_meter()
        self._died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._end = EngineEnd.CRASHED  # the way in which it ended, once it has
        self._adapters: dict[str, LoRARequest] = {}  # what it has loaded, by name
        self._computing: list[psutil.Process] | None = None
        self._info = self._describe()
        self._programs: ProgramCounts | None = None  # until counted, and where nothing counts
        self._counting: asyncio.Task[None] | None = None
        self._reports = reports
        reports.on_worker_ended = self._report_death
        self._watch_processes()

    @classmethod
    async def start(
        cls,
        model: str,
        engine_args: Mapping[str, Any],
        adapters: Sequence[tuple[str, str]] = (),
    ) -> "VllmEngine":
        """Starts the engine core and waits until it can take requests (seconds to many minutes).

        `adapters` are names and folders of LoRA adapters; all are loaded then. Cancelling it stops
        what was started.

        Raises:
            ValueError: the arguments or an adapter are refused. Do not retry.
            EngineDiedError: the engine core failed while starting.
        """
        engine_args = with_room_for(len(adapters), engine_args)
        config = await asyncio.to_thread(engine_config, model, engine_args)
        # Read by `watch_host` in the engine core and in its workers.
        os.environ[HOST_VARIABLE] = str(HostProcess.own())
        reports = WorkerReports(asyncio.get_running_loop().time)
        launch = asyncio.create_task(asyncio.to_thread(_launch, config))
        try:
            client = await asyncio.shield(launch)
        except BaseException as error:
            reports.close()
            if isinstance(error, asyncio.CancelledError):
                launch.add_done_callback(_shut_down_unwanted)
            if isinstance(error, RuntimeError):
                raise EngineDiedError(f"engine core failed to start: {error}") from error
            raise
        engine = cls(config, client, adapters, reports)
        try:
            await engine._prepare(adapters)
        except BaseException:
            await engine.close()
            raise
        return engine

    async def _prepare(self, adapters: Sequence[tuple[str, str]]) -> None:
        """Does what a started engine core still needs before its first request."""
        tasks = await self._client.get_supported_tasks_async()
        self._info["supported_tasks"] = list(tasks)
        for number, (name, folder) in enumerate(adapters, 1):
            await self._load_adapter(LoRARequest(name, number, folder))
        if "generate" in tasks:
            await self._warm_up()
            self._meter = self._new_meter()
        await self._watch_compilations()

    async def _load_adapter(self, adapter: LoRARequest) -> None:
        """Loads one adapter on every worker. A step that had to load it would end the engine core.

        Raises:
            ValueError: it cannot be loaded here. Do not retry.
            EngineDiedError: the engine core died of it.
        """
        name, folder = adapter.lora_name, adapter.lora_path
        try:
            is_loaded = await self._client.add_lora_async(adapter)
        except EngineDeadError as error:
            raise self._death() from error
        except Exception as error:
            raise ValueError(
                f"adapter {name!r} from {folder!r} cannot be loaded: {error}"
            ) from error
        if not is_loaded:
            raise ValueError(f"adapter {name!r} from {folder!r} was not loaded by the engine")
        self._adapters[name] = adapter
        logger.info("adapter_loaded name=%s path=%s", name, folder)

    @property
    def info(self) -> dict[str, object]:
        """The facts fixed at start."""
        return self._info

    @property
    def load(self) -> EngineLoad:
        """The load as of the latest step; the prompts include those sent since."""
        ratio = self._meter.computed_ratio
        return msgspec.structs.replace(
            self._load, backlog_tokens=self._line.backlog_tokens(ratio), computed_ratio=ratio
        )

    @property
    def capacity(self) -> EngineCapacity | None:
        """The limits of its scheduler; `None` where there is one for each data-parallel rank."""
        scheduler, cache = self._config.scheduler_config, self._config.cache_config
        if _schedules_by_rank(self._config):
            return None
        return EngineCapacity(
            scheduler.max_num_seqs, scheduler.max_num_batched_tokens, cache.kv_cache_size_tokens
        )

    @property
    def cached(self) -> CacheMirror | None:
        """What its scheduler told of its prefix cache; `None` where it tells nothing."""
        return self._cached

    @property
    def engine_stats(self) -> EngineStats:
        """The sums of the scheduler's reports since the warm-up, and the programs."""
        return msgspec.structs.replace(self._meter.stats(), programs=self._programs)

    @property
    def process_ids(self) -> list[int]:
        """The engine core's process ids (not its workers')."""
        return [process.pid for process in self._processes() if process.pid is not None]

    async def submit(self, request: TokenRequest) -> None:
        """Submits a request; see `Engine.submit`."""
        try:
            engine_request = decode_request(request, self._decoder)
        except (msgspec.DecodeError, TypeError, IndexError) as error:
            raise ValueError(f"malformed request payload: {error}") from error
        self._check(request, engine_request)
        self._ensure_alive()
        num_tokens = len(request.prompt_token_ids) + len(request.emitted_token_ids)
        self._line.submitted(request.request_id, num_tokens)
        try:
            await self._client.add_request_async(engine_request)
        except EngineDeadError as error:
            raise self._death() from error

    def _check(self, request: TokenRequest, engine_request: EngineCoreRequest) -> None:
        """Refuses requests that would end the engine core, which trusts its input."""
        num_tokens = self._config.model_config.get_vocab_size()
        emitted = request.emitted_token_ids
        if emitted and not (min(emitted) >= 0 and max(emitted) < num_tokens):
            raise ValueError(f"emitted token ids are not all of 0 to {num_tokens - 1}")
        asked = engine_request.lora_request
        if asked is not None:
            # By its name: the gateway counts its adapters, and finds them in its own folders.
            loaded = self._adapters.get(asked.lora_name)
            if loaded is None:
                raise ValueError(f"adapter {asked.lora_name!r} is not one of this engine's")
            engine_request.lora_request = loaded
        if self._is_on_tpu and engine_request.sampling_params is not None:
            fit_to_tpu(engine_request.sampling_params)

    async def abort(self, request_ids: list[str]) -> None:
        """Aborts requests; see `Engine.abort`."""
        self._line.ended(request_ids)
        await self._client.abort_requests_async(request_ids)

    async def next_step(self) -> list[TokenOutput]:
        """Waits for the next step; see `Engine.next_step`."""
        while True:
            outputs = await self._next_outputs()
            stats = outputs.scheduler_stats
            if stats is not None:
                self._load = EngineLoad(
                    stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage
                )
                _count_scheduler(self._meter, stats)
                self._take_told(stats.kv_connector_stats or {})
            self._drop_unasked_aborts(outputs)
            if not outputs.outputs and stats is not None:
                return []
            if outputs.outputs:
                goes_on = self._load.num_running > 0
                self._meter.stepped(_count(outputs), outputs.timestamp, goes_on=goes_on)
                self._line.ended(each.request_id for each in outputs.outputs if each.finish_reason)
                if self.on_scheduled is not None:
                    self._report_scheduled(outputs)
                return encode_outputs(outputs.outputs, self._encoder)

    def _drop_unasked_aborts(self, outputs: EngineCoreOutputs) -> None:
        """Drops aborts that nobody asked for, and treats the engine core as one that ends.

        vLLM answers no abort that it was asked for. On SIGTERM and SIGINT it aborts all its
        requests and reports each. To pass that on would end streams that another engine can
        continue.
        """
        asked = [each for each in outputs.outputs if each.finish_reason != FinishReason.ABORT]
        if len(asked) < len(outputs.outputs):
            outputs.outputs = asked
            self._report_death("engine core was told to end")
            # Afterwards: its process may have been seen to end before this was read.
            self._end = EngineEnd.TOLD

    def _take_told(self, told: Mapping[str, Any]) -> None:
        """Takes in what our scheduler tells beside vLLM's numbers."""
        self._line.told(told.get(LINE_STATS))
        changes = told.get(CACHE_STATS)
        if changes is not None and self._cached is not None:
            self._cached.take_in(*changes)

    async def call(self, method: str, args: bytes) -> bytes:
        """Runs a rare operation; see `Engine.call`. `args` and the result are msgpack."""
        if method == COMPILATIONS_CALL and self._is_on_tpu:
            self._ensure_alive()
            counts = await self._client.collective_rpc_async(COMPILATIONS_CALL)
            return msgspec.msgpack.encode(counts)
        name = _CALLS.get(method)
        if name is None:
            raise ValueError(f"unknown engine call {method!r}; known: {', '.join(sorted(_CALLS))}")
        self._ensure_alive()
        arguments = msgspec.msgpack.decode(args) if args else []
        result = await getattr(self._client, name)(*arguments)
        if method == "reset_prefix_cache" and result and self._cached is not None:
            self._cached.forget_all()  # an idle engine core has no step to tell it with
        return msgspec.msgpack.encode(list(result) if isinstance(result, set) else result)

    async def check(self, timeout_s: float) -> None:
        """Checks the engine by a call that only a turning loop answers; see `Engine.check`."""
        self._ensure_alive()
        try:
            async with asyncio.timeout(timeout_s):
                await self._client.is_sleeping_async()
        except TimeoutError as error:
            reason = f"engine loop did not turn for {timeout_s:g} s"
            raise EngineDiedError(reason, EngineEnd.HUNG) from error
        except EngineDeadError as error:
            raise self._death() from error

    def busy_s(self) -> float | None:
        """Returns the CPU time of its laziest worker, or of a core without workers here."""
        if self._computing is None:
            self._computing = _computing([psutil.Process(pid) for pid in self.process_ids])
        try:
            return min((_cpu_s(process) for process in self._computing), default=None)
        except psutil.Error:
            return None

    def compiling(self, since_s: float) -> str | None:
        """Returns what a process on this host compiles, as JAX names it; see `Engine.compiling`."""
        return self._reports.compiling(since_s)

    async def close(self) -> None:
        """Closes the engine; see `Engine.close`."""
        self._report_death("closed", EngineEnd.TOLD)
        self._reports.close()
        if self._counting is not None:
            self._counting.cancel()
            await asyncio.gather(self._counting, return_exceptions=True)
        await asyncio.to_thread(self._client.shutdown, 0)

    async def _warm_up(self) -> None:
        """Sends short requests that take the sampler's slow path, before anybody waits for one.

        Code that is compiled or built on first use is built here, where a long wait does not count
        as a hang. On a TPU each bucket of requests is filled once: tpu-inference also compiles
        small conversions of values outside its programs, for each bucket.
        """
        sizes: tuple[int, ...] = (1,)
        if self._is_on_tpu:
            sizes = request_buckets(self._config.scheduler_config.max_num_seqs)
        started_s = time.monotonic()
        for size in sizes:
            names = {f"warm-up-{size}-{number}" for number in range(size)}
            for name in names:
                await self._client.add_request_async(self._warm_up_request(name))
            while names:
                step = await self.next_step()
                names -= {output.request_id for output in step if output.finish is not None}
        logger.info("engine_warm duration_ms=%d", (time.monotonic() - started_s) * 1000)

    def _warm_up_request(self, request_id: str) -> EngineCoreRequest:
        # On a TPU the output is long enough for all requests of a bucket to run together.
        room = self._config.model_config.max_model_len - _WARM_UP_PROMPT_TOKENS
        params = SamplingParams(
            max_tokens=max(1, min(16, room)) if self._is_on_tpu else 3,
            ignore_eos=True,
            temperature=1.0,
            top_p=0.9,
            top_k=8,
            repetition_penalty=1.1,
            presence_penalty=0.1,
            logprobs=1,
        )
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(range(_WARM_UP_PROMPT_TOKENS)),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )

    @property
    def _is_on_tpu(self) -> bool:
        """True if tpu-inference runs the engine; it compiles one program per shape."""
        return bool(self._config.parallel_config.worker_cls == _TPU_WORKER)

    async def _watch_compilations(self) -> None:
        if self._is_on_tpu:
            await self._client.collective_rpc_async("watch_compilations")
            await self._count_programs()
            self._counting = asyncio.create_task(self._keep_counting(), name="count-programs")

    async def _count_programs(self) -> None:
        """Asks each worker, one for each host, what its process has found and compiled."""
        by_worker = await self._client.collective_rpc_async("program_counts")
        sums = [sum(each) for each in zip(*by_worker, strict=True)]
        if self._programs is None:
            logger.info("programs_needed hits=%d misses=%d", sums[0], sums[1])
        self._programs = ProgramCounts(*sums)

    async def _keep_counting(self) -> None:
        while not self._died.done():
            await asyncio.sleep(_COUNT_PROGRAMS_S)
            try:
                await self._count_programs()
            except EngineDeadError:
                return

    # -- the end of the processes --

    def _processes(self) -> list[Any]:
        manager = self._client.resources.engine_manager
        return list(manager.processes) if manager is not None else []

    def _watch_processes(self) -> None:
        """Learns of an end from the kernel, not from vLLM's clean-up, which may take seconds."""
        loop = asyncio.get_running_loop()
        for pid in self.process_ids:
            watched = {pid: "engine core"}
            with contextlib.suppress(psutil.NoSuchProcess):  # its own end is told below
                workers = _workers_of(psutil.Process(pid))
                watched |= dict.fromkeys((each.pid for each in workers), "worker")
            for watched_pid, what in watched.items():
                try:
                    pidfd = os.pidfd_open(watched_pid)
                except ProcessLookupError:
                    self._report_death(f"{what} process {watched_pid} ended")
                    continue
                loop.add_reader(pidfd, self._on_exit, pidfd, f"{what} process {watched_pid}")

    def _on_exit(self, pidfd: int, process: str) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        if not self._died.done():
            self._reports.read()  # an engine core that ends because of a worker has said so
        self._report_death(f"{process} ended")

    def _report_death(self, reason: str, end: EngineEnd = EngineEnd.CRASHED) -> None:
        if not self._died.done():
            self._end = end
            self._died.set_result(reason)
            # Wakes `next_step`, behind whatever outputs arrived before.
            self._client.outputs_queue.put_nowait(EngineDiedError(reason))

    def _death(self) -> EngineDiedError:
        reason = self._died.result() if self._died.done() else "engine core reported its death"
        return EngineDiedError(reason, self._end)

    def _ensure_alive(self) -> None:
        if self._died.done():
            raise self._death()

    async def _next_outputs(self) -> EngineCoreOutputs:
        """Returns the next batch of outputs, also those from before the engine's death."""
        if self._client.outputs_queue.empty():
            self._ensure_alive()
        try:
            return await self._client.get_output_async()
        except (EngineDeadError, EngineDiedError) as error:
            self._report_death("engine core reported its death (see its log)")
            raise self._death() from error

    def _new_meter(self) -> StatsCollector:
        has_cache = bool(self._config.cache_config.enable_prefix_caching)
        return StatsCollector(prefix_cache=(0, 0) if has_cache else None)

    def _report_scheduled(self, outputs: EngineCoreOutputs) -> None:
        """Reports when the engine core began with requests; its clock is this host's."""
        assert self.on_scheduled is not None
        for output in outputs.outputs:
            for event in output.events or ():
                if event.type == EngineCoreEventType.SCHEDULED:
                    self.on_scheduled(output.request_id, event.timestamp)

    def _describe(self) -> dict[str, object]:
        model, cache = self._config.model_config, self._config.cache_config
        return {
            "model": model.model,
            "max_model_len": model.max_model_len,
            "dtype": str(model.dtype).removeprefix("torch."),
            "block_size": cache.block_size,
            "num_kv_blocks": cache.num_gpu_blocks,
            "max_num_seqs": self._config.scheduler_config.max_num_seqs,
            "async_scheduling": bool(self._config.scheduler_config.async_scheduling),
        }


def _mirror_of(config: VllmConfig, adapters: Iterable[tuple[str, str]]) -> CacheMirror | None:
    """Returns a mirror of the prefix cache, which is empty; `None` where none will be told of."""
    cache = config.cache_config
    is_told = cache.enable_prefix_caching and not _schedules_by_rank(config)
    if not is_told or cache.prefix_caching_hash_algo != "sha256":
        return None
    # As vLLM begins its names: in the engine core, whose environment is this one's.
    seed = os.environ.get("PYTHONHASHSEED", DEFAULT_SEED)
    return CacheMirror(CacheLayout.of_blocks(cache.block_size, first_parent(seed), adapters))


def _schedules_by_rank(config: VllmConfig) -> bool:
    """Returns whether tpu-inference runs a scheduler for each of several data-parallel ranks."""
    return getattr(config.scheduler_config, "_original_scheduler_cls", None) is not None


def with_room_for(num_adapters: int, engine_args: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the arguments with room for all adapters in the hosts' memory, unless they say.

    vLLM keeps as many as a step may use, and reads any other one again within a step.
    """
    room = max(num_adapters, int(engine_args.get("max_loras") or 1))
    if not num_adapters or engine_args.get("max_cpu_loras") is not None:
        return engine_args
    return {**engine_args, "max_cpu_loras": room}


def _computing(cores: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Returns the workers of these engine cores; a core without any computes by itself."""
    found: list[psutil.Process] = []
    for core in cores:
        found += _workers_of(core) or [core]
    return found


def _workers_of(core: psutil.Process) -> list[psutil.Process]:
    """Returns the workers below an engine core; those on Ray are not, on this host neither."""
    below = core.children(recursive=True)
    return [each for each in below if _WORKER_TITLE in " ".join(each.cmdline())]


def _cpu_s(process: psutil.Process) -> float:
    spent = process.cpu_times()
    return float(spent.user + spent.system)


def _launch(config: VllmConfig) -> AsyncMPClient:
    return AsyncMPClient(config, Executor.get_class(config), log_stats=True)


def _shut_down_unwanted(launch: "asyncio.Task[AsyncMPClient]") -> None:
    """Stops the result of a cancelled start that could not be interrupted, off the loop."""
    if launch.cancelled() or launch.exception() is not None:
        return
    threading.Thread(target=launch.result().shutdown, args=(0,), daemon=True).start()


def _count_scheduler(meter: StatsCollector, stats: SchedulerStats) -> None:
    meter.num_deferred = stats.num_skipped_waiting_reqs
    if meter.prefix_cache is not None:
        meter.looked_up(stats.prefix_cache_stats.queries, stats.prefix_cache_stats.hits)
    outside = stats.connector_prefix_cache_stats
    if outside is not None:
        meter.looked_up_outside(outside.queries, outside.hits)
    drafts = stats.spec_decoding_stats
    if drafts is not None:
        meter.drafted(
            drafts.num_drafts,
            drafts.num_draft_tokens,
            drafts.num_accepted_tokens,
            drafts.num_accepted_tokens_per_pos,
        )


def _count(outputs: EngineCoreOutputs) -> StepCount:
    """Returns one step in numbers, by the rules of vLLM's own `IterationStats`."""
    step = StepCount()
    for output in outputs.outputs:
        step.generation_tokens += len(output.new_token_ids)
        prefill = output.prefill_stats
        if prefill is not None:
            step.prompt_tokens += prefill.num_prompt_tokens
            step.computed_tokens += prefill.num_computed_tokens
            step.local_cached_tokens += prefill.num_local_cached_tokens
            step.external_cached_tokens += prefill.num_external_cached_tokens
        for event in output.events or ():
            step.num_preemptions += event.type == EngineCoreEventType.PREEMPTED
    return step
