import pytest

from edgefl.core.errors import ClonedError
from edgefl.device.identity_lockout import check_not_locked_out, save_lockout


@pytest.fixture
def kernel_boot(tmp_path):
    path = tmp_path / "boot_id"
    path.write_text("first\n")
    return path


def test_an_agent_that_was_refused_stays_away_until_its_board_is_switched_off_and_on(tmp_path, kernel_boot):
    check_not_locked_out(tmp_path, kernel_boot_id=kernel_boot)
    save_lockout(tmp_path, "another one was there before", kernel_boot_id=kernel_boot)
    for _ in range(2):
        with pytest.raises(ClonedError, match="another one was there before; on the copy run `edgefl device join`"):
            check_not_locked_out(tmp_path, kernel_boot_id=kernel_boot)
    kernel_boot.write_text("second\n")
    check_not_locked_out(tmp_path, kernel_boot_id=kernel_boot)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"reason": 1}', b"\xff"])
def test_a_damaged_note_holds_until_it_is_deleted(tmp_path, kernel_boot, content):
    (tmp_path / "refused.json").write_bytes(content)
    with pytest.raises(ClonedError, match=r"delete .*refused\.json"):
        check_not_locked_out(tmp_path, kernel_boot_id=kernel_boot)
    (tmp_path / "refused.json").unlink()
    check_not_locked_out(tmp_path, kernel_boot_id=kernel_boot)


def test_a_full_card_does_not_hide_the_refusal_behind_another_error(tmp_path, kernel_boot, full_card, caplog):
    with full_card():
        save_lockout(tmp_path, "another one was there before", kernel_boot_id=kernel_boot)
    assert "cannot keep that this agent was refused" in caplog.text
