"""The link to wherever the broker is now: it moves with its coordinator, and then a new link takes over."""

from __future__ import annotations

from edgefl import __version__
from edgefl.device.board.capabilities import board_hash
from edgefl.device.link import Link, LinkCallbacks, LinkIdentity, LinkTls
from edgefl.device.state import DeviceState
from edgefl.protocol import Capabilities, CommandAnswer, Heartbeat, ProgressReport


class MovingLink:
    """Started, moved and stopped by the agent; what publishes may be called by any thread, as of `Link`.

    Args:
        state: says who this device is, and where the broker was last.
        boot_id: of this agent.
        callbacks: those of every link.

    Attributes:
        now: the link as it is now.
    """

    def __init__(self, state: DeviceState, boot_id: str, callbacks: LinkCallbacks) -> None:
        self._state, self._boot_id, self._callbacks = state, boot_id, callbacks
        self._board = board_hash() or ""
        self.now = self._made()

    def start(self) -> None:
        self.now.start()

    def stop(self) -> None:
        self.now.stop()

    def set_draining(self, *, draining: bool) -> None:
        self.now.set_draining(draining=draining)

    def publish_heartbeat(self, heartbeat: Heartbeat) -> bool:
        return self.now.publish_heartbeat(heartbeat)

    def publish_capabilities(self, capabilities: Capabilities) -> None:
        self.now.publish_capabilities(capabilities)

    def publish_progress(self, report: ProgressReport) -> bool:
        return self.now.publish_progress(report)

    def publish_answer(self, answer: CommandAnswer) -> bool:
        return self.now.publish_answer(answer)

    def brokers(self) -> list[tuple[str, int]]:
        """Returns hosts and ports of the broker, as the coordinator has told them last."""
        device = self._state.device
        return [(host, device.broker_port) for host in device.broker_hosts]

    def follow(self) -> None:
        """Connects to where the coordinator says that its broker is now."""
        self.now.stop()
        self.now = self._made()
        self.now.start()

    def renew(self) -> None:
        """Shows the certificate that this device has now, and connects anew for it."""
        self.now.renew(self._tls())

    def _made(self) -> Link:
        identity = LinkIdentity(
            fleet=self._state.device.fleet,
            device_id=self._state.device_id,
            boot_id=self._boot_id,
            version=__version__,
            board=self._board,
        )
        return Link(
            self.brokers(),
            self._tls(),
            identity,
            self._callbacks,
            next_session_no=self._state.next_session_no,
        )

    def _tls(self) -> LinkTls:
        return LinkTls(ca=self._state.ca, cert=self._state.cert, key=self._state.key)
