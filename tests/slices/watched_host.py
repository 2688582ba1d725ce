"""A host of a slice as its agent and its replica see it, without Ray: sockets, stream and watch."""

import asyncio
from pathlib import Path

from ray.util.placement_group import PlacementGroup

from serving.config.slice_spec import SliceSpec
from serving.domain.inventory import ObservedHost, Slice
from serving.domain.limits import LinkEncryption
from serving.domain.topology import slice_shape
from serving.link.tls import TlsRole, accepting_end
from serving.slices.host_agent import AgentReport
from serving.slices.host_heartbeat.server import HostStreamServer
from serving.slices.local.agent_socket import AgentSocket
from serving.slices.notices import DrainOrder
from serving.slices.reservation import Reservation
from serving.slices.watch import SliceWatch

DRAIN_S = 120.0
_NODE = "n" * 56
_ADDRESS = "127.0.0.1"
_WITHIN_S = 60.0
SECRET = b"a cluster secret of these tests"


class WatchedHost:
    """The product's own parts, wired as `HostAgent` and `HeldSlices` wire them.

    The agent may have another secret than the replica.
    """

    def __init__(
        self,
        run_dir: Path,
        encryption: LinkEncryption = LinkEncryption.AUTO,
        agent_secret: bytes = SECRET,
    ) -> None:
        self.run_dir = run_dir
        tls = accepting_end(agent_secret, encryption, TlsRole.HOST_AGENT, _ADDRESS)
        self.stream = HostStreamServer(0, tls)
        self.socket = AgentSocket(run_dir, 0, self.stream)
        self.stream.on_left = self.socket.tell_left
        self.left: asyncio.Future[DrainOrder] = asyncio.get_running_loop().create_future()
        host = ObservedHost(_NODE, "", "spot-0", 0, 4, 4, is_draining=False, labels={})
        reservation = Reservation((Slice("spot-0", (host,)),), PlacementGroup.empty())
        spec = SliceSpec(
            "on-demand", slice_shape("v6e", "2x2"), drain_notice_s=DRAIN_S, encryption=encryption
        )
        self.watch = SliceWatch(reservation, 0, spec, SECRET, self._leave)

    def _leave(self, watch: SliceWatch) -> None:
        assert watch.order is not None
        self.left.set_result(watch.order)

    async def start(self) -> None:
        """The agent is at work, and the replica listens."""
        address = await self.stream.listen(_ADDRESS)
        await self.socket.listen()
        self.watch.listen([AgentReport(0, _NODE, address)])

    async def stop(self) -> None:
        """Ends both."""
        await self.watch.stop()
        await self.socket.close()
        await self.stream.close()

    async def order(self) -> DrainOrder:
        """Waits until the slice has to be left."""
        async with asyncio.timeout(_WITHIN_S):
            return await asyncio.shield(self.left)
