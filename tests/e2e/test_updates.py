"""A real fleet is updated: releases travel through a real coordinator into a real board's slots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slot_fleet import SlotFleet, slot_fleet

from edgefl import DISTRIBUTION, __version__
from edgefl.core.config import parse_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MAJOR, MINOR, PATCH = (int(part) for part in __version__.split("."))
NEXT, BROKEN, DEAF = (f"{MAJOR}.{MINOR}.{PATCH + ahead}" for ahead in (1, 2, 3))
BREAKS = {"edgefl/device/agent.py": ("self._connection.start()", 'raise RuntimeError("broken on purpose")')}
DEAFENS = {"edgefl/system/https_client.py": ("super().do_handshake(block)", 'raise OSError("broken on purpose")')}


@pytest.fixture(scope="module")
def updated(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlotFleet]:
    with slot_fleet(tmp_path_factory.mktemp("updates"), tools) as made:
        yield made


def test_a_board_is_updated_trains_on_and_rolls_a_broken_release_back_by_itself(updated: SlotFleet) -> None:
    assert updated.device()["capabilities"]["installs"]["slot"] == "a"
    code, output = updated.run("devices", "update", "--to", NEXT, "--bundle", updated.release(NEXT), "--wait")
    assert code == 0, output
    assert "manual is left out: this edgefl is not installed in slots" in output
    updated.tools.eventually(lambda: updated.device()["version"] == NEXT)
    assert updated.device()["capabilities"]["installs"]["slot"] == "b"
    assert updated.events() == ["installation-requested", "installation-running"]

    config = parse_run({"run": {"task": "digits", "rounds": 2, "evaluate_on": "none"}, "devices": {"min": 2}})
    run = updated.fleet.submit(config)
    assert updated.fleet.wait_for_run(run)["rounds"] == 2
    assert {row["device_id"] for row in updated.fleet.list_history("updates", run=run)} == {"board", "manual"}

    broken = updated.release(BROKEN, BREAKS)
    code, output = updated.run("devices", "update", "--to", BROKEN, "--bundle", broken, "board", "--wait")
    assert code == 41, output
    said = f"{DISTRIBUTION} {BROKEN} is not everywhere: board rolled-back: its agent did not come up within 40 s"
    assert said in output
    updated.tools.eventually(lambda: updated.fleet.get_presence()["board"] == "online")
    updated.tools.eventually(lambda: updated.device()["version"] == NEXT)
    assert (updated.root / "current").readlink() == Path("b")
    assert updated.events()[-2:] == ["installation-requested", "installation-rolled-back"]
    table = updated.fleet.run_command("devices", "updates")
    assert "done" in table
    assert "failed" in table


def test_a_release_that_is_deaf_to_the_broker_is_left_and_the_next_order_reaches_the_board(
    updated: SlotFleet,
) -> None:
    before = updated.device()["version"]
    deaf = updated.release(DEAF, DEAFENS)
    code, output = updated.run("devices", "update", "--to", DEAF, "--bundle", deaf, "board", "--wait")
    assert code == 41, output
    assert "its agent does not reach the broker within 40 s, and the version before does" in output
    updated.tools.eventually(lambda: updated.fleet.get_presence()["board"] == "online")
    updated.tools.eventually(lambda: updated.device()["version"] == before)


def test_a_board_that_was_installed_by_hand_is_refused_with_the_reason(updated: SlotFleet) -> None:
    status, output = updated.run("devices", "update", "--to", NEXT, "manual")
    assert status == 2
    assert "manual cannot be updated from here: this edgefl is not installed in slots" in output


def test_a_version_that_this_coordinator_cannot_talk_to_is_refused(updated: SlotFleet) -> None:
    far = f"{MAJOR}.{MINOR + 3}.0"
    status, output = updated.run("devices", "update", "--to", far, "--bundle", updated.release(far), "board")
    assert status == 38, output


def test_only_an_operator_may_bring_a_bundle(updated: SlotFleet) -> None:
    from edgefl.core.errors import NotAllowedError  # noqa: PLC0415 likewise
    from edgefl.system.api_client import CoordinatorClient  # noqa: PLC0415 only here

    known = updated.fleet.make_client()
    stranger = CoordinatorClient(url=known.url, ca_pem=known.ca_pem, token="wrong")
    with (updated.folder / f"{NEXT}.bundle").open("rb") as file, pytest.raises(NotAllowedError):
        stranger.upload("/edgefl/v1/bundles", file)
