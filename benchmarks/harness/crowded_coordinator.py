"""`edgefl`, whose coordinator also hears the devices of a crowd, as if they spoke over MQTT."""

from __future__ import annotations

from edgefl.cli.main import main
from edgefl.coordinator import service
from harness.crowd import PREFIX, Crowd


class CrowdedCoordinator(service.Coordinator):
    """A coordinator that hears the devices of its store whose names say that they belong to a crowd."""

    def _open(self) -> None:
        super()._open()
        names = [info.device_id for info in self._registry.list_devices() if info.device_id.startswith(PREFIX)]
        self._closers.enter_context(Crowd(names, self._telemetry.on_message))


if __name__ == "__main__":
    service.Coordinator = CrowdedCoordinator  # type: ignore[misc] # `serve` makes one of these
    main()
