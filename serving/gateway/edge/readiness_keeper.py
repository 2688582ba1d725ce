"""Keeps the answer of `/ready` at one gateway: it gathers the facts, and sets the cluster's latch.

Owns how long the directory has listed nobody, and that a cluster which was opened stays so. Does
not own the decision (`readiness`) nor the store (`open_latch`).
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from serving.config.models import ModelConfig
from serving.domain.slice_records import Snapshot
from serving.gateway.edge.readiness import (
    Readiness,
    ReadinessFacts,
    decide_readiness,
    listed_replicas,
    required_engines,
)

logger = logging.getLogger(__name__)

# How often a gateway that is not open looks whether it, or another one, may open.
_LOOK_S = 1.0


class Latch(Protocol):
    """What remembers that a cluster was opened; see `OpenLatch`. Its calls block."""

    def is_set(self) -> bool:
        """Returns whether the cluster was opened; raises `ConnectionError` if nobody can say."""
        ...

    def set(self) -> None:
        """Opens the cluster; raises `ConnectionError` if that could not be kept."""
        ...


class ReadinessKeeper:
    """The readiness of one gateway. Used from one event loop."""

    def __init__(
        self, latch: Latch, num_ready: Callable[[], int], monotonic_s: Callable[[], float]
    ) -> None:
        """`num_ready` returns the engines linked here that take requests."""
        self._latch = latch
        self._num_ready = num_ready
        self._monotonic_s = monotonic_s
        self._snapshot: Snapshot | None = None
        self._num_required: int | None = None
        self._quiet_since_s: float | None = None
        self._is_open = False

    def set_models(self, models: Iterable[ModelConfig]) -> None:
        """Takes in the models that are to be served."""
        self._num_required = required_engines(models)

    def set_snapshot(self, snapshot: Snapshot) -> None:
        """Takes in what the directory lists now."""
        self._snapshot = snapshot
        if snapshot.records:
            self._quiet_since_s = None
        elif self._quiet_since_s is None:
            self._quiet_since_s = self._monotonic_s()

    def readiness(self) -> Readiness:
        """Returns the present answer of `/ready`."""
        return decide_readiness(self._facts())

    async def open_when_ready(self) -> None:
        """Looks until the cluster is open, and opens it once it can serve; then returns."""
        reported = ""
        while not self._is_open:
            try:
                if self.readiness().is_ready:
                    await asyncio.to_thread(self._latch.set)
                    self._is_open = True
                else:
                    self._is_open = await asyncio.to_thread(self._latch.is_set)
            except ConnectionError as error:
                if repr(error) != reported:
                    reported = repr(error)
                    logger.warning("gateways_open_unknown error=%r", error)
            if not self._is_open:
                await asyncio.sleep(_LOOK_S)
        logger.info("gateways_open reason=%r", self.readiness().reason)

    def _facts(self) -> ReadinessFacts:
        since_s, snapshot = self._quiet_since_s, self._snapshot
        return ReadinessFacts(
            num_ready=self._num_ready(),
            num_required=None if snapshot is None else self._num_required,
            replicas={} if snapshot is None else listed_replicas(snapshot),
            quiet_s=None if since_s is None else self._monotonic_s() - since_s,
            is_open=self._is_open,
        )
