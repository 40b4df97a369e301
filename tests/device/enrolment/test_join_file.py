import json

import pytest

from edgefl.core.errors import ConfigError, EdgeflError
from edgefl.core.protocol import JoinToken
from edgefl.device.enrolment.join_file import JoinFile

TOKEN = JoinToken(ca_fingerprint="a" * 64, token_id="t1", secret="s3cret", fleet="lab", addresses=("pc:8000",)).text()


def test_what_is_written_is_read_back():
    file = JoinFile(token=TOKEN, name="pi-01", shards={"digits": "/srv/digits.npz"}, addresses=("10.0.0.1:8000",))
    assert JoinFile.parse(file.to_text()) == file


def test_the_token_stays_out_of_the_repr():
    assert TOKEN not in repr(JoinFile(token=TOKEN))


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"token": None},
        {"token": "efl1.broken"},
        {"name": "Two Words"},
        {"role": "boss"},
        {"shards": ["a"]},
        {"addresses": ["no-port"]},
        {"surprise": 1},
    ],
)
def test_a_wrong_entry_is_refused_without_showing_the_token(change):
    value = {**json.loads(JoinFile(token=TOKEN).to_text()), **change}
    with pytest.raises(EdgeflError) as told:
        JoinFile.parse(json.dumps(value))
    assert TOKEN not in str(told.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_what_is_no_join_file_is_refused(text):
    with pytest.raises(ConfigError):
        JoinFile.parse(text)
