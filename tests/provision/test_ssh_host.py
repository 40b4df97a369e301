import pytest

from edgefl.cli.main import main
from edgefl.cli.provision.commands import MAX_HOSTS_CHARS
from edgefl.core.errors import ConfigError
from edgefl.provision.ssh_host import SshHost, parse_hosts


def test_a_hosts_file_says_who_is_reached_how_and_what_he_is_to_be():
    text = """
    # the shelf in the hall
    pi@192.168.1.21  name=shelf-1  digits=/home/pi/digits.npz   # with its card beside it
    shelf-2.local:2222 name=shelf-2 role=evaluator digits=/srv/data "my.task:Mine=/srv/mine"
    root@[fe80::1%eth0]:22 name=shelf-3
    """
    assert parse_hosts(text) == [
        SshHost(host="192.168.1.21", name="shelf-1", user="pi", shards={"digits": "/home/pi/digits.npz"}),
        SshHost(
            host="shelf-2.local",
            name="shelf-2",
            port=2222,
            role="evaluator",
            shards={"digits": "/srv/data", "my.task:Mine": "/srv/mine"},
        ),
        SshHost(host="fe80::1%eth0", name="shelf-3", user="root", port=22),
    ]
    assert [host.label for host in parse_hosts(text)] == [
        "pi@192.168.1.21",
        "shelf-2.local:2222",
        "root@[fe80::1%eth0]:22",
    ]


@pytest.mark.parametrize(
    "text",
    [
        '[[0, "ce8f76ef", "192.168.1.1"], [1, "a07f9e18", "shelf.local"]]',
        '{"hosts": [{"name":"worker-0", "addr": "192.168.1.1", "port":5},{"name":"worker-1","addr":"shelf.local"}]}',
    ],
)
def test_the_lists_of_parallel_sgd_and_of_ecl_isvr_name_hosts_too(text):
    assert parse_hosts(text) == [
        SshHost(host="192.168.1.1", name="worker-0"),
        SshHost(host="shelf.local", name="worker-1"),
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "names no board"),
        ("[]", "names no board"),
        ("[[0, 1]]", "a hosts file in JSON is"),
        ('[[true, "a", "b"]]', "a hosts file in JSON is"),
        ('[[-2, "a", "b"]]', "a hosts file in JSON is"),
        ('{"nodes": {"a": {"edges": ["b"]}}}', "such as node_list.json, is for a graph"),
        ('[[0, "a", "-oProxyCommand=x"]]', "begins with [user@]host[:port], got '-oProxyCommand=x'"),
        ('{"hosts": [{"name": "a role=evaluator", "addr": "b"}]}', "device name must be 1 to 63"),
        ("[", "JSON"),
        ("# nobody", "names no board"),
        ("pi@a", "line 1 of the hosts file: pi@a has no name"),
        ("a name=x\npi@b name=x", "the name x stands 2 times"),
        ("a name=x\na name=y", "the host a stands 2 times"),
        ("-oProxyCommand=x name=x", "begins with [user@]host[:port], got '-oProxyCommand=x'"),
        ("a;reboot name=x", "begins with [user@]host[:port]"),
        ("-l@a name=x", "begins with [user@]host[:port]"),
        ("a:0 name=x", "begins with [user@]host[:port]"),
        ("a:70000 name=x", "begins with [user@]host[:port]"),
        ("a name=X!", "device name must be 1 to 63"),
        ("a name=x role=boss", "role must be one of trainer, evaluator, got 'boss'"),
        ("a name=x digits", "expected name=NAME, role=ROLE or TASK=PATH, got 'digits'"),
        ("a name=x digits=", "expected name=NAME"),
        ("a name=x digits=/a digits=/b", "digits stands there twice"),
        ("a name=x digits=data", "must be an absolute path on the board"),
        ("a name=x 'digits=/a b'", "without spaces"),
        ("a name=x digits=/a/../etc", "must be an absolute path"),
        ("a name=x digits=/a%h", "must be an absolute path"),
        ("a name='x", "line 1 of the hosts file: No closing quotation"),
    ],
)
def test_what_is_not_understood_is_told_with_its_line(text, told):
    with pytest.raises(ConfigError) as raised:
        parse_hosts(text)
    assert told in str(raised.value)


def test_a_file_that_is_no_text_or_would_be_cut_off_is_one_line(tmp_path, capsys):
    for content, told in (
        (b"pi@board name=a\xff\n", "the hosts file is no text"),
        (b"# a board a line\n" * MAX_HOSTS_CHARS, "the hosts file is longer than 1000000 characters"),
    ):
        (tmp_path / "hosts").write_bytes(content)
        with pytest.raises(SystemExit) as ended:
            main(["-q", "provision", "ssh", "--hosts", str(tmp_path / "hosts"), "--token", "x"])
        err = capsys.readouterr().err
        assert (ended.value.code, err.count("\n"), told in err) == (3, 1, True)
