"""A replica's command of an engine host: claimed, kept, given up, over the host's control port.

Owns the connection, its renewal after a break, and how the end of the engine is told from the end
of a connection. Does not own what the replica does.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from serving.domain.limits import LinkEncryption
from serving.link.client import LinkCallbacks, LinkClient
from serving.link.errors import HandshakeError, LinkCallError, LinkClosedError
from serving.link.messages import ProgramsMoved
from serving.link.tls import ClientTls
from serving.ownership.control_server import (
    CONTROL_HEARTBEAT,
    ClaimArgs,
    Claimed,
    DrainArgs,
    LeaveArgs,
)
from serving.ownership.lease import ClaimRefusedError

logger = logging.getLogger(__name__)

CALL_S = 5.0
_RETRY_S = 0.25
_DRAIN_SLACK_S = 5.0


class EngineGoneError(RuntimeError):
    """The engine has ended, or nobody listens at its control port: the process is gone."""


class SupersededError(RuntimeError):
    """Another replica owns the engine now. Leave everything on its slice alone."""


class EngineSilentError(RuntimeError):
    """The engine host exists and has not answered for too long. Kill it: it cannot be asked."""


async def _never() -> bool:
    return False


class EngineControl:
    """The command of one engine, from `claim` to `leave` or `end`. Used from one event loop."""

    def __init__(
        self,
        address: tuple[str, int],
        owner: str,
        secret: bytes,
        *,
        silence_s: float = math.inf,
        may_give_up: Callable[[], Awaitable[bool]] = _never,
        encryption: LinkEncryption = LinkEncryption.AUTO,
    ) -> None:
        """Waits `silence_s` for a host that does not answer; then it is given up.

        `may_give_up` is asked first, each time: the host may have another owner by now.
        """
        self._silence_s = silence_s
        self._may_give_up = may_give_up
        self._silent_since_s: float | None = None  # monotonic
        self._address = address
        self._owner = owner
        self._secret = secret
        self._tls = ClientTls(secret, encryption)
        self._link: LinkClient | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._lost = asyncio.Event()
        self.number = 0

    @property
    def address(self) -> tuple[str, int]:
        """The control port."""
        return self._address

    async def claim(self) -> bytes:
        """Makes this replica the owner, and keeps it so; returns the deed of the owner before.

        Raises:
            ClaimRefusedError: another replica has it, or it ends.
            EngineGoneError: nobody is there.
            LinkClosedError: it cannot be reached now.
        """
        deed = await self._connect()
        self._keeping = asyncio.create_task(self._keep(), name="keep-engine")
        return deed

    async def touch(self) -> None:
        """Finds out whether the engine is there, and claims nothing.

        Raises:
            EngineGoneError: it is not.
            LinkClosedError: it cannot be reached now.
        """
        link = await self._open()
        # Who has ended says so at once, and would not answer this.
        try:
            await link.call("", b"", CALL_S)
        except LinkCallError:
            pass
        except LinkClosedError as error:
            if link.has_reported_end:
                raise EngineGoneError(link.end_reason or "it has ended") from error
            raise
        except TimeoutError as error:
            raise LinkClosedError("the engine host does not answer") from error
        finally:
            await link.close()

    async def wait_end(self) -> str:
        """Waits until the engine has ended, and returns the reason.

        Raises:
            SupersededError: another replica owns it.
            EngineSilentError: it has not answered for longer than it is waited for.
        """
        return await asyncio.shield(self._ended)

    async def store_deed(self, deed: bytes) -> None:
        """Stores what a successor needs; from now on there can be one."""
        await self._call("deed", deed)

    async def status(self) -> dict[str, Any]:
        """Returns requests, gateways and processes."""
        answer: dict[str, Any] = msgspec.json.decode(await self._call("status"))
        return answer

    async def drain(self, reason: str, grace_s: float, stay_s: float) -> None:
        """Asks the gateways to take their requests elsewhere, and waits until they have."""
        args = msgspec.json.encode(DrainArgs(reason, grace_s, stay_s))
        await self._call("drain", args, max(grace_s, stay_s) + _DRAIN_SLACK_S)

    async def note_programs(self, moved: ProgramsMoved) -> None:
        """Notes the moves of the engine's programs so far, to be reported with its stats."""
        await self._call("programs", msgspec.json.encode(moved))

    async def leave(self, within_s: float) -> None:
        """Lets another replica have the engine, which ends after `within_s` if none comes."""
        self._stop_keeping()
        await self._call("leave", msgspec.json.encode(LeaveArgs(within_s)))
        await self.close()

    async def end(self) -> None:
        """Ends the engine. Once this returns its slice is this replica's to give back.

        Raises:
            SupersededError: it is not: another replica has both.
            LinkClosedError: the host cannot be reached; it may have another owner by now.
        """
        self._stop_keeping()
        if self._link is None or not self._link.is_open:
            try:
                await self._connect()
            except EngineGoneError:
                return
            except ClaimRefusedError as error:
                raise SupersededError(str(error)) from error
        try:
            await self._call("end")
        except LinkClosedError:
            if self._link is None or not self._link.has_reported_end:
                # Only who still listens can have another owner.
                with contextlib.suppress(EngineGoneError):
                    await self._open()
                    raise

    async def close(self) -> None:
        """Ends the connection and nothing else. Idempotent."""
        self._stop_keeping()
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def _connect(self) -> bytes:
        link = await self._open()
        try:
            args = msgspec.json.encode(ClaimArgs(self._owner))
            answer = msgspec.json.decode(await link.call("claim", args, CALL_S), type=Claimed)
        except LinkCallError as error:
            await link.close()
            raise ClaimRefusedError(str(error)) from error
        except LinkClosedError as error:
            if link.has_reported_end:
                raise EngineGoneError(link.end_reason or "it has ended") from error
            raise
        except TimeoutError as error:
            await link.close()
            raise LinkClosedError("the engine host does not answer") from error
        self._link, self.number = link, answer.number
        self._silent_since_s = None
        return answer.deed

    async def _open(self) -> LinkClient:
        self._lost.clear()
        callbacks = LinkCallbacks(on_lost=lambda _: self._lost.set(), on_draining=lambda _: None)
        try:
            return await LinkClient.connect(
                self._address,
                gateway_id=self._owner,
                secret=self._secret,
                callbacks=callbacks,
                heartbeat=CONTROL_HEARTBEAT,
                tls=self._tls,
            )
        except LinkClosedError as error:
            if isinstance(error.__cause__, ConnectionRefusedError):
                raise EngineGoneError("its process is gone") from error
            raise

    async def _keep(self) -> None:
        """Connects again after every break, until the engine has ended or has another owner."""
        while True:
            await self._lost.wait()
            link = self._link
            if link is not None and link.has_reported_end:
                self._set_ended(link.end_reason or "the engine ended")
                return
            logger.warning("engine_out_of_reach owner=%s address=%s", self._owner, self._address)
            try:
                await self._connect()
            except EngineGoneError as error:
                self._set_ended(f"the engine host died: {error}")
                return
            except ClaimRefusedError as error:
                if not self._ended.done():
                    self._ended.set_exception(SupersededError(str(error)))
                return
            except HandshakeError as error:
                logger.warning("engine_refuses owner=%s reason=%r", self._owner, str(error))
                await asyncio.sleep(_RETRY_S)
                self._lost.set()
            except LinkClosedError:
                if await self._is_given_up():
                    return
                await asyncio.sleep(_RETRY_S)
                self._lost.set()

    async def _is_given_up(self) -> bool:
        """Sets the end if the host has been silent for too long; returns whether it has."""
        now_s = time.monotonic()
        if self._silent_since_s is None:
            self._silent_since_s = now_s
        if now_s - self._silent_since_s < self._silence_s or not await self._may_give_up():
            return False
        if not self._ended.done():
            reason = f"the engine host has not answered for {now_s - self._silent_since_s:.0f} s"
            self._ended.set_exception(EngineSilentError(reason))
        return True

    def _set_ended(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)

    def _stop_keeping(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None

    async def _call(self, method: str, args: bytes = b"", timeout_s: float = CALL_S) -> bytes:
        if self._link is None:
            raise LinkClosedError("the engine host is out of reach")
        return await self._link.call(method, args, timeout_s)
