"""What policies learned before is read until it could be read once, and never in their way.

Whatever is wrong with it is logged, and a policy begins without. One that could not be read may be
read later, and until then nothing may be written in its place.
"""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future

from autoscaling.policy.memory import PolicyMemoryError, PolicyRecord, decode_memory
from autoscaling.policy_config import ModelSettings

logger = logging.getLogger("ray.serve.slicewise")

# How long a policy that begins waits for what was learned before it: the controller waits with it.
_READ_S = 2.0


class MemoryReader:
    """Reads the memories of some models, in a thread of `executor`."""

    def __init__(
        self,
        models: Iterable[ModelSettings],
        executor: Executor,
        read: Callable[[str], bytes | None],
    ) -> None:
        """`read` returns the memory of a model as it was written, or `None`; it may block."""
        self._settings = {each.model: each for each in models}
        self._executor = executor
        self._read = read
        self._reading: Future[dict[str, bytes | None]] | None = None
        self._wait_s = _READ_S
        self.is_done = False

    def poll(self, now_s: float) -> dict[str, PolicyRecord]:
        """Returns what can be used of what was learned before, by model, once it has been read.

        Empty before that: then `is_done` is false, and it is to be asked again. Waits two seconds
        the first time, and never again.
        """
        if self._reading is None:
            self._reading = self._executor.submit(
                lambda: {model: self._read(model) for model in self._settings}
            )
        wait_s, self._wait_s = self._wait_s, 0.0
        try:
            texts = self._reading.result(wait_s)
        except Exception as error:  # noqa: BLE001 - whatever ails the head, the policy goes on
            if wait_s:
                logger.warning("policy_memory_not_read reason=%r", error)
            if self._reading.done():  # it failed, and is tried again
                self._reading = None
            return {}
        self.is_done = True
        found = {
            model: record
            for model, text in texts.items()
            if text is not None and (record := self._recalled(model, text, now_s)) is not None
        }
        return found

    def _recalled(self, model: str, text: bytes, now_s: float) -> PolicyRecord | None:
        try:
            record = _for_shapes(text, self._settings[model].slice_shape, now_s)
        except PolicyMemoryError as error:
            logger.warning("policy_memory_ignored model=%s reason=%r", model, str(error))
            return None
        age_s = now_s - record.written_at_s
        logger.info("policy_memory_recalled model=%s age_s=%.0f", model, age_s)
        return record


def _for_shapes(text: bytes, slice_shape: str, now_s: float) -> PolicyRecord:
    """Returns a memory for a model whose slices are `slice_shape`.

    The model's own slice has to be the same. Of classes whose slices are others now, what was known
    is left out.

    Raises:
        PolicyMemoryError: as `decode_memory`.
    """
    try:
        return decode_memory(text, slice_shape, now_s)
    except PolicyMemoryError:
        before = _slice_shape_in(text)
        if before is None or before == slice_shape or _own(before) != _own(slice_shape):
            raise
    record = decode_memory(text, before, now_s)
    then, now = _by_class(before), _by_class(slice_shape)
    classes = {
        name: each for name, each in record.classes.items() if then.get(name) == now.get(name)
    }
    return record.model_copy(update={"classes": classes, "slice_shape": slice_shape})


def _slice_shape_in(text: bytes) -> str | None:
    try:
        return PolicyRecord.model_validate_json(text).slice_shape
    except ValueError:
        return None


def _own(slice_shape: str) -> str:
    return slice_shape.split(", ", 1)[0]


def _by_class(slice_shape: str) -> dict[str, str]:
    """Returns the slices of classes that have others than the model's own; see `slice_shape_of`."""
    return dict(each.split(" ", 1) for each in slice_shape.split(", ")[1:])  # type: ignore[misc]
