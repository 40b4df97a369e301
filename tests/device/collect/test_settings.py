import pytest

from edgefl.core.errors import ConfigError
from edgefl.device.collect.settings import MqttSection, check_columns, load_collect_file

WHOLE = """
[collect]
folder = "/srv/room"
every_s = 10
[sources.zigbee]
kind = "mqtt"
host = "127.0.0.1"
[sources.zigbee.columns]
temperature = "zigbee2mqtt/Living room#/temperature"
"""


def test_a_file_of_few_lines_is_enough(tmp_path):
    path = tmp_path / "collect.toml"
    path.write_text(WHOLE)
    found = load_collect_file(path)
    assert (found.collect.folder, found.collect.hold_s) == ("/srv/room", 60.0)
    (source,) = found.sources
    assert source.section == MqttSection(
        host="127.0.0.1", columns={"temperature": "zigbee2mqtt/Living room#/temperature"}
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("every_s", "evry_s", "did you mean collect.every_s"),
        ('"/srv/room"', '"room"', "absolute path"),
        ("[collect]", "[labels]\ncolumn = 'door'\n[collect]\nsimilar = { temperature = 1 }", "take one of the two"),
        ("every_s", "similar = { temperature = -1 }\nevery_s", "collect.similar.temperature must be a number from 0"),
        ('"mqtt"', '"mqt"', "sources.zigbee.kind must be one of mqtt"),
        ("host =", "hots =", "sources.zigbee.host is missing"),
        ("[sources.zigbee]", "[source.zigbee]", "unknown table"),
        ("every_s = 10", "every_s = 0\n[sources.b]\nkind = 'mqtt'\nhost = 'h'\ncolumns.x = 't'", "for one source"),
        ("[collect]", "[collect", "no TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, old, new, message):
    path = tmp_path / "collect.toml"
    path.write_text(WHOLE.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        load_collect_file(path)


def test_columns_of_all_sources_have_names_of_their_own_that_fit_in_a_table():
    check_columns(["a", "b.c"], ("a",))
    for names in (["a", "a"], ["time"], ["a,b"], ["1"], []):
        with pytest.raises(ConfigError, match=r"column"):
            check_columns(names, ())
    with pytest.raises(ConfigError, match="'d' is no column"):
        check_columns(["door"], ("d",))
    with pytest.raises(ConfigError, match=r"collect.similar: 'door' is no column of numbers"):
        check_columns(["door", "power"], ("door",), {"door": 1, "power": 2})
