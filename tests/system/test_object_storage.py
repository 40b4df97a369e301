"""Files in an S3 storage: what is there after a whole try, after one that broke off, and after damage."""

import fcntl
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from s3_server import run_s3_server

from edgefl.core.errors import DataError, NetworkError, NotFoundError, StoreError, UsageError
from edgefl.system import object_storage
from edgefl.system.object_storage import ObjectAddress, download_file, has_open_upload, parse_address, upload_file

PART = 5 * 1024 * 1024
"""The least that S3 takes for a part that is not the last."""
CONTENT = os.urandom(2 * PART + 7)
TARGET = ObjectAddress("lab", "backups/fleet.tar.gz")


def list_names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.setattr(object_storage, "PART_BYTES", PART)
    with run_s3_server(monkeypatch, tmp_path) as server:
        yield server


def list_uploads(server):
    return server.files.call_s3("list_multipart_uploads", Bucket="lab").get("Uploads", [])


def set_endpoint(monkeypatch, url):
    for name, value in {
        "ENDPOINT_URL": url,
        "ACCESS_KEY_ID": "key",
        "SECRET_ACCESS_KEY": "s",
        "MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class Calls(list):
    """Requests, and after how many of a method the process is killed."""

    def __init__(self):
        super().__init__()
        self.limit = {}


@pytest.fixture
def calls(monkeypatch):
    """The requests, as (method, number of the part or the range); one after `limit` of its method is a kill."""
    seen, whole = Calls(), object_storage._StoredObject.call

    def call(self, method, **options):
        if [name for name, _ in seen].count(method) == seen.limit.get(method, 1000):
            raise KeyboardInterrupt
        seen.append((method, options.get("PartNumber") or options.get("Range")))
        return whole(self, method, **options)

    monkeypatch.setattr(object_storage._StoredObject, "call", call)
    return seen


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "fleet.tar.gz"
    path.write_bytes(CONTENT)
    return path


@pytest.mark.extended
def test_a_file_that_was_sent_comes_back_whole_and_leaves_nothing_beside_it(server, path, tmp_path):
    assert str(upload_file(path, parse_address("s3://lab/backups/"))) == "s3://lab/backups/fleet.tar.gz"
    (tmp_path / "new").mkdir()
    download_file(TARGET, tmp_path / "new" / "copy")
    assert (tmp_path / "new" / "copy").read_bytes() == CONTENT
    assert [name for name in list_names(tmp_path) if name.startswith(".")] == []
    assert list_names(tmp_path / "new") == ["copy"]
    path.write_bytes(b"")
    upload_file(path, ObjectAddress("lab", "empty"))
    download_file(ObjectAddress("lab", "empty"), tmp_path / "empty")
    assert (tmp_path / "empty").read_bytes() == b""


@pytest.mark.extended
def test_a_sending_that_was_killed_goes_on_behind_its_parts_and_shows_no_object_before_the_end(server, calls, path):
    calls.limit = {"upload_part": 2}
    with pytest.raises(KeyboardInterrupt):
        upload_file(path, TARGET)
    assert server.keys() == []
    calls.clear()
    calls.limit = {}
    upload_file(path, TARGET)
    assert [part for method, part in calls if method == "upload_part"] == [3]
    assert server.read("backups/fleet.tar.gz") == CONTENT
    calls.clear()
    upload_file(path, TARGET)
    assert calls == [("head_object", None)]


@pytest.mark.extended
@pytest.mark.parametrize("change", ["content", "address", "given up", "state"])
def test_what_does_not_belong_to_the_file_any_more_is_sent_anew(server, calls, path, change):
    calls.limit = {"upload_part": 2}
    with pytest.raises(KeyboardInterrupt):
        upload_file(path, TARGET)
    calls.limit, expected, target = {}, CONTENT, TARGET
    if change == "content":
        expected = CONTENT[::-1]
        path.write_bytes(expected)
    elif change == "address":
        target = ObjectAddress("lab", "elsewhere")
    elif change == "given up":
        (upload,) = server.files.call_s3("list_multipart_uploads", Bucket="lab")["Uploads"]
        server.files.call_s3("abort_multipart_upload", Bucket="lab", Key=TARGET.key, UploadId=upload["UploadId"])
    else:
        path.with_name(".fleet.tar.gz.upload").write_bytes(b'{"address": 1')
    calls.clear()
    upload_file(path, target)
    assert [part for method, part in calls if method == "upload_part"] == [1, 2, 3]
    assert server.read(target.key) == expected
    download_file(target, path.with_name("copy"))  # whose hash is noted
    if change != "state":  # which alone knew of the parts
        assert list_uploads(server) == []


@pytest.mark.extended
def test_parts_go_on_by_the_storages_own_tags_which_are_no_md5_where_it_encrypts(server, calls, path, monkeypatch):
    plain = object_storage._StoredObject.call

    def turn(parts):
        return [{**part, "ETag": part["ETag"][::-1]} for part in parts]

    def call(self, method, **options):
        if method == "complete_multipart_upload":
            options["MultipartUpload"] = {"Parts": turn(options["MultipartUpload"]["Parts"])}
        answer = plain(self, method, **options)
        if method == "upload_part":
            (answer,) = turn([answer])
        if method == "list_parts":
            answer["Parts"] = turn(answer["Parts"])
        return answer

    monkeypatch.setattr(object_storage._StoredObject, "call", call)
    calls.limit = {"upload_part": 2}
    with pytest.raises(KeyboardInterrupt):
        upload_file(path, TARGET)
    calls.clear()
    calls.limit = {}
    upload_file(path, TARGET)
    assert [part for method, part in calls if method == "upload_part"] == [3]
    assert server.read(TARGET.key) == CONTENT


@pytest.mark.extended
@pytest.mark.parametrize("asks_again", [True, False])
def test_a_whole_object_whose_last_answer_was_lost_is_enough(server, calls, path, monkeypatch, asks_again):
    plain = object_storage._StoredObject.call

    def call(self, method, **options):
        answer = plain(self, method, **options)
        if method == "complete_multipart_upload" and asks_again:
            return None  # of the second time: there is no such sending
        if method == "complete_multipart_upload":
            raise NetworkError("lost")
        return answer

    monkeypatch.setattr(object_storage._StoredObject, "call", call)
    if not asks_again:
        with pytest.raises(NetworkError, match="lost"):
            upload_file(path, TARGET)
        assert has_open_upload(path, TARGET)
        calls.clear()
    upload_file(path, TARGET)
    assert [part for method, part in calls if method == "upload_part"] == ([1, 2, 3] if asks_again else [])
    assert server.read(TARGET.key) == CONTENT
    assert list_names(path.parent) == ["fleet.tar.gz"]


@pytest.mark.extended
def test_a_file_that_changes_while_it_is_sent_leaves_no_parts_and_nothing_to_go_on_with(server, path, monkeypatch):
    plain = object_storage._StoredObject.call

    def call(self, method, **options):
        if options.get("PartNumber") == 1:
            path.write_bytes(CONTENT[::-1])
        return plain(self, method, **options)

    monkeypatch.setattr(object_storage._StoredObject, "call", call)
    with pytest.raises(DataError, match="changed while it was sent"):
        upload_file(path, TARGET)
    assert (server.keys(), list_uploads(server)) == ([], [])
    assert list_names(path.parent) == ["fleet.tar.gz"]


@pytest.mark.parametrize(
    ("body", "error", "match"),
    [
        (
            "<Error><Code>NoSuchBucket</Code><Message></Message></Error>",
            NotFoundError,
            "no such bucket; make it first",
        ),
        ("", NetworkError, "no such object, sending or bucket"),
    ],
)
@pytest.mark.parametrize("content", [b"small", b"of several parts"])
def test_nothing_counts_as_sent_that_a_storage_without_words_did_not_take(
    monkeypatch, path, body, error, match, content
):
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'edgefl-fleet[s3]' -c constraints.txt")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(404)
            self.send_header("Content-Length", "0" if self.command == "HEAD" else str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body.encode())

        do_HEAD = do_PUT = do_POST = answer  # noqa: N815 http.server's own names

        def log_message(self, *_):
            pass

    monkeypatch.setattr(object_storage, "PART_BYTES", 8)
    path.write_bytes(content)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as stub:
        threading.Thread(target=stub.serve_forever, daemon=True).start()
        set_endpoint(monkeypatch, f"http://127.0.0.1:{stub.server_port}")
        with pytest.raises(error, match=match):
            upload_file(path, TARGET)
        stub.shutdown()
    assert has_open_upload(path, TARGET)
    path.write_bytes(b"another")
    assert not has_open_upload(path, TARGET)


@pytest.mark.parametrize(
    "endpoint", ["https://user:hidden@storage.example", "http://user:1/hidden@a", "x://a:hidden@b c"]
)
def test_a_password_in_the_endpoint_is_refused_and_never_printed(monkeypatch, path, endpoint):
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'edgefl-fleet[s3]' -c constraints.txt")
    set_endpoint(monkeypatch, endpoint)
    with pytest.raises((UsageError, NetworkError)) as caught:
        upload_file(path, TARGET)
    assert "hidden" not in str(caught.value)
    assert "user" not in str(caught.value).replace("no user and no password", "")
    if endpoint.startswith("https"):
        assert (type(caught.value), "no user and no password" in str(caught.value)) == (UsageError, True)


@pytest.mark.extended
def test_another_object_is_replaced_only_where_that_is_asked_for(server, path):
    server.write(TARGET.key, b"older")
    with pytest.raises(UsageError, match=r"another object at s3://lab/backups/fleet\.tar\.gz"):
        upload_file(path, TARGET)
    assert server.read(TARGET.key) == b"older"
    upload_file(path, TARGET, replace=True)
    assert server.read(TARGET.key) == CONTENT


@pytest.mark.extended
def test_a_file_with_another_hash_than_its_sender_expects_is_not_sent(server, path):
    with pytest.raises(DataError, match="changed while it was sent"):
        upload_file(path, TARGET, sha256="0" * 64)
    assert not list(server.keys())


def test_a_fetch_that_was_killed_goes_on_where_it_was(server, calls, path, tmp_path):
    upload_file(path, TARGET)
    calls.limit = {"get_object": 1}
    with pytest.raises(KeyboardInterrupt):
        download_file(TARGET, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    calls.clear()
    calls.limit = {}
    download_file(TARGET, tmp_path / "copy")
    assert [part for method, part in calls if method == "get_object"] == [
        f"bytes={PART}-{2 * PART - 1}", f"bytes={2 * PART}-{2 * PART + 6}",
    ]  # fmt: skip
    assert (tmp_path / "copy").read_bytes() == CONTENT


@pytest.mark.extended
def test_of_an_object_that_was_replaced_meanwhile_no_part_is_kept(server, calls, path, tmp_path):
    upload_file(path, TARGET)
    calls.limit = {"get_object": 1}
    copy = tmp_path / "copy[1]"
    with pytest.raises(KeyboardInterrupt):
        download_file(TARGET, copy)
    calls.limit = {}
    (part,) = tmp_path.glob(".copy*.part")
    with part.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="another command fetches"):
            download_file(TARGET, copy)
    server.write(TARGET.key, CONTENT[::-1])
    download_file(TARGET, copy)
    assert copy.read_bytes() == CONTENT[::-1]
    assert [name for name in list_names(tmp_path) if name.endswith(".part")] == []


@pytest.mark.extended
def test_what_is_not_what_it_must_be_is_refused(server, path, tmp_path):
    upload_file(path, TARGET)
    copy = tmp_path / "copy"
    with pytest.raises(DataError, match=f"has {len(CONTENT)} bytes, at most 100 are taken"):
        download_file(TARGET, copy, max_bytes=100)
    with pytest.raises(DataError, match=f"must have SHA-256 {'0' * 64}"):
        download_file(TARGET, copy, sha256="0" * 64)
    server.files.call_s3("put_object", Bucket="lab", Key=TARGET.key, Body=b"other", Metadata={"sha256": "1" * 64})
    with pytest.raises(DataError, match=f"must have SHA-256 {'1' * 64}"):
        download_file(TARGET, copy)
    with pytest.raises(NotFoundError, match="no object s3://lab/absent"):
        download_file(ObjectAddress("lab", "absent"), copy)
    with pytest.raises(NotFoundError, match="no such bucket; make it first"):
        upload_file(path, ObjectAddress("nobody", "x"))
    assert list_names(tmp_path) == [".fleet.tar.gz.upload", "fleet.tar.gz"]
    state = json.loads((tmp_path / ".fleet.tar.gz.upload").read_bytes())
    assert (state["address"], state["id"]) == ("s3://nobody/x", "")


@pytest.mark.extended
def test_a_storage_is_not_spoken_to_in_the_clear_and_one_that_is_away_is_one_line(server, path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://storage.example:9000")
    with pytest.raises(UsageError, match="must be https"):
        upload_file(path, TARGET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(NetworkError, match=r"s3://lab/backups/fleet\.tar\.gz: the storage cannot be used"):
        upload_file(path, TARGET)


@pytest.mark.parametrize(
    "text", ["s3://", "s3://L/x", "s3:/lab/x", "http://lab/x", "s3://lab/a\nb", "s3://lab/" + "a" * 1025]
)
def test_what_is_no_address_says_what_one_is(text):
    with pytest.raises(UsageError, match="such as s3://lab/fleet"):
        parse_address(text)


@pytest.mark.parametrize("text", ["s3://lab", "s3://lab/", "s3://lab/folder/"])
def test_a_folder_is_an_address_to_send_to_and_none_to_fetch_from(text):
    assert parse_address(text).join("x").name == "x"
    with pytest.raises(UsageError, match="such as s3://lab/fleet"):
        parse_address(text, allow_folder=False)
