from collections import Counter

from peer_boards import eventually

from edgefl.device.collect import recorder
from edgefl.device.collect.recorder import Recorder


class Device:
    """A device that fails in ways that none should."""

    def __init__(self, failures):
        self.failures = failures

    def read(self, stopping):
        if self.failures:
            raise self.failures.pop()
        stopping.wait(0.01)
        return b"abc"

    def accept(self):
        pass

    close = accept


def test_whatever_a_device_raises_it_is_opened_again_and_that_is_counted_and_said_once(monkeypatch, caplog):
    monkeypatch.setattr(recorder, "RETRY_S", 0.01)
    counts, failures = Counter(), [KeyError("a"), ValueError("no frame")]
    source = Recorder("porch", ".png", lambda: Device(failures), counts)
    source.start()
    eventually(source.read)
    source.close()
    assert counts["porch.errors"] == 2
    (text,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert text == "source porch is opened again until it records: ValueError: no frame"
