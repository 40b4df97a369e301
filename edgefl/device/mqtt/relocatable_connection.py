"""MQTT connection that follows the broker when it moves with its coordinator."""

from __future__ import annotations

from edgefl import __version__
from edgefl.core.protocol import Capabilities, CommandReply, Heartbeat, ProgressReport
from edgefl.device.hardware.capabilities import compute_board_hash
from edgefl.device.mqtt.connection import MqttCallbacks, MqttConnection, MqttIdentity, MqttTlsFiles
from edgefl.device.state_dir import DeviceStateDir


class RelocatableConnection:
    """Relocatable `MqttConnection`, controlled by the agent; any thread may publish.

    Args:
        state: has the device id and the last known broker.
        boot_id: of this agent.
        callbacks: of every connection.

    Attributes:
        current: the present connection.
    """

    def __init__(self, state: DeviceStateDir, boot_id: str, callbacks: MqttCallbacks) -> None:
        self._state, self._boot_id, self._callbacks = state, boot_id, callbacks
        self._board_hash = compute_board_hash() or ""
        self.current = self._make_connection()

    def start(self) -> None:
        self.current.start()

    def stop(self) -> None:
        self.current.stop()

    def set_draining(self, *, draining: bool) -> None:
        self.current.set_draining(draining=draining)

    def publish_heartbeat(self, heartbeat: Heartbeat) -> bool:
        return self.current.publish_heartbeat(heartbeat)

    def publish_capabilities(self, capabilities: Capabilities) -> None:
        self.current.publish_capabilities(capabilities)

    def publish_progress(self, report: ProgressReport) -> bool:
        return self.current.publish_progress(report)

    def publish_reply(self, reply: CommandReply) -> bool:
        return self.current.publish_reply(reply)

    def list_brokers(self) -> list[tuple[str, int]]:
        """Returns hosts and ports of the broker, last reported by the coordinator."""
        device = self._state.settings
        return [(host, device.broker_port) for host in device.broker_hosts]

    def reconnect(self) -> None:
        """Replaces the connection by one to the broker's present address."""
        self.current.stop()
        self.current = self._make_connection()
        self.current.start()

    def renew(self) -> None:
        """Reconnects with the device's present certificate."""
        self.current.renew(self._get_tls_files())

    def _make_connection(self) -> MqttConnection:
        identity = MqttIdentity(
            fleet=self._state.settings.fleet,
            device_id=self._state.device_id,
            boot_id=self._boot_id,
            version=__version__,
            board=self._board_hash,
        )
        return MqttConnection(
            self.list_brokers(),
            self._get_tls_files(),
            identity,
            self._callbacks,
            next_session_no=self._state.next_session_no,
        )

    def _get_tls_files(self) -> MqttTlsFiles:
        return MqttTlsFiles(ca=self._state.ca, cert=self._state.cert, key=self._state.key)
