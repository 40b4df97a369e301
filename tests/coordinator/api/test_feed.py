from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl.coordinator.api import feed as feed_response
from edgefl.coordinator.api import feed as feeds
from edgefl.coordinator.api.feed import Feed, FeedClient, FeedResponse
from edgefl.coordinator.api.feed_state import MAX_ATTENTION, FeedState, list_attention, make_device_row
from edgefl.coordinator.fleet.presence import PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.core.errors import NetworkError, StoreError
from edgefl.core.protocol import EVALUATOR_NAME, Heartbeat, StatusMessage
from edgefl.storage.repositories.records import EvaluationRow, RunStatus
from edgefl.storage.store import Store


class Site:
    """A feed over a store and a registry of three devices."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.registry = DeviceRegistry(PresenceTracker(), lambda: 0.0)
        self.registry.record_broker_link(connected=True)
        for number, name in enumerate(("a", "b", "c")):
            self.registry.add(name, node_id=number + 1, role="trainer", groups=("lab",), examples={"digits": 5})
        self.feed = Feed(
            FeedState(store=store, registry=self.registry),
            last_seen=lambda: {"a": 3.0, "b": None},
            clock=lambda: 50.0,
        )
        self.registry.subscribe(self.feed.on_registry_event)

    def beat(self, name: str, seq: int = 1, **vitals: Any) -> None:
        self.registry.record_heartbeat(name, Heartbeat(seq=seq, session_no=1, uptime_s=1.0, **vitals))

    def update(self) -> None:
        self.feed._updated_s = feeds.time.monotonic() - feeds.UPDATE_INTERVAL_S
        self.feed.update()

    def begin_run(self, *, rounds: int = 0) -> None:
        self.store.add_run(
            run_id="r", name="n", task="t", strategy="s", config={"run": {"rounds": 9}}, seed=1, submitted_at=1.0
        )
        self.store.set_run_status("r", RunStatus.RUNNING, at=2.0)
        for number in range(1, rounds + 1):
            self.close_round(number)

    def close_round(self, number: int) -> None:
        self.store.open_round("r", number, started_at=10.0 * number, num_devices=1)
        self.store.close_round("r", number, version=number, closed_at=10.0 * number + 1)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Store.open(tmp_path / "edgefl.db") as store:
        yield Site(store)


class Page:
    """What one client reads; `next` waits for a message."""

    def __init__(self, feed: Feed, last_id: str | None = None) -> None:
        self.client: FeedClient = feed.add_client()
        self._stream: AsyncIterator[bytes] = feed.stream(self.client, last_id)

    async def next(self) -> tuple[str, str, Any]:
        async with asyncio.timeout(10):
            body = await anext(self._stream)
        lines = dict(line.split(": ", 1) for line in body.decode().strip().split("\n"))
        return lines["event"], lines["id"], json.loads(lines["data"])

    async def is_silent(self) -> bool:
        waiting = asyncio.ensure_future(anext(self._stream))
        await asyncio.sleep(0.05)
        is_silent = not waiting.done()
        self.client.close()
        await asyncio.wait([waiting])
        waiting.exception()
        return is_silent


def told(story: Callable[[], Any]) -> None:
    asyncio.run(story())


def test_a_page_gets_everything_first_and_then_what_changed(site: Site) -> None:
    async def story() -> None:
        page = Page(site.feed)
        event, _, first = await page.next()
        assert event == "snapshot"
        assert [row["device_id"] for row in first["devices"]] == ["a", "b", "c"]
        assert {row["presence"] for row in first["devices"]} == {"never seen"}
        site.beat("b", temperature_c=61.26, throttled="throttled", cpu_fraction=0.31)
        site.store.record_event("device-online", "heartbeat", at=1.0, device_id="b")
        site.update()
        event, _, news = await page.next()
        assert event == "changes"
        (row,) = news["devices"]
        assert (row["device_id"], row["presence"], row["temperature_c"]) == ("b", "online", 61.5)
        assert (row["throttled"], row["cpu_fraction"]) == ("throttled", 0.3)
        assert [entry["kind"] for entry in news["events"]] == ["device-online"]

    told(story)


def test_a_heartbeat_that_says_nothing_new_is_no_message(site: Site) -> None:
    async def story() -> None:
        site.beat("a", temperature_c=50.0)
        page = Page(site.feed)
        await page.next()
        site.beat("a", seq=2, temperature_c=50.1)
        site.update()
        assert await page.is_silent()

    told(story)


def test_all_pages_share_the_bytes_of_a_message(site: Site) -> None:
    async def story() -> None:
        pages = [Page(site.feed) for _ in range(3)]
        for page in pages:
            await page.next()
        site.beat("a")
        site.update()
        await asyncio.sleep(0.05)
        messages = {id(page.client.queue[0].body) for page in pages}
        assert len(messages) == 1

    told(story)


def test_nothing_is_built_while_nobody_listens(site: Site) -> None:
    site.beat("a")
    site.update()
    assert site.feed._changed.keys() == {"a"}
    assert not site.feed._epoch


def test_who_comes_back_gets_what_it_missed_and_no_second_snapshot(site: Site) -> None:
    async def story() -> None:
        page, other = Page(site.feed), Page(site.feed)
        _, last_id, _ = await page.next()
        await other.next()
        page.client.close()
        for name in ("a", "b"):
            site.beat(name)
            site.update()
        back = Page(site.feed, last_id)
        for name in ("a", "b"):
            event, _, news = await back.next()
            assert (event, news["devices"][0]["device_id"]) == ("changes", name)

    told(story)


@pytest.mark.parametrize(
    "last_id",
    ["", "x", "00000000-3", "-1", "{epoch}-99", "{epoch}-x", "{epoch}--1", "{epoch}-\u00b3", "{epoch}-" + "9" * 5000],
)
def test_who_comes_back_with_an_id_that_is_none_gets_a_snapshot(site: Site, last_id: str) -> None:
    async def story() -> None:
        page = Page(site.feed)
        _, known, _ = await page.next()
        back = Page(site.feed, last_id.replace("{epoch}", known.partition("-")[0]))
        assert (await back.next())[0] == "snapshot"

    told(story)


def test_a_page_that_reads_too_slowly_gets_a_snapshot_in_place_of_its_queue(site: Site) -> None:
    async def story() -> None:
        page = Page(site.feed)
        await page.next()
        for turn in range(feeds.MAX_QUEUED_MESSAGES + 5):
            site.beat("a", seq=turn + 1, temperature_c=float(turn))
            site.update()
        await asyncio.sleep(0.05)
        assert len(page.client.queue) <= feeds.MAX_QUEUED_MESSAGES
        event, _, whole = await page.next()
        assert event == "snapshot"
        assert whole["devices"][0]["temperature_c"] == feeds.MAX_QUEUED_MESSAGES + 4
        site.beat("b")
        site.update()
        event, _, news = await page.next()
        assert (event, news["devices"][0]["device_id"]) == ("changes", "b")

    told(story)


def test_what_a_snapshot_holds_is_not_told_again(site: Site) -> None:
    async def story() -> None:
        other = Page(site.feed)
        await other.next()
        page = Page(site.feed)
        site.beat("a")
        site.update()
        await other.next()
        assert page.client.queue, "it was told before it had begun"
        _, _, whole = await page.next()
        assert whole["devices"][0]["presence"] == "online"
        assert await page.is_silent()

    told(story)


def test_rounds_of_the_run_that_goes_on_come_as_they_close_and_again_when_they_are_judged(site: Site) -> None:
    async def story() -> None:
        site.begin_run(rounds=2)
        page = Page(site.feed)
        _, _, whole = await page.next()
        assert (whole["live_run"], whole["runs"][0]["goal_rounds"]) == ("r", 9)
        site.close_round(3)
        site.update()
        _, _, news = await page.next()
        assert [row["round"] for row in news["courses"][0]["rows"]] == [3]
        assert (news["courses"][0]["run"], news["courses"][0]["spans"]["num_devices"]) == ("r", 0)
        judged = EvaluationRow(
            assignment_id="e", round=3, version=3, device_id="own", source="coordinator", loss=1.0, accuracy=0.5,
            num_examples=10, at=1.0,
        )  # fmt: skip
        site.store.record_evaluations("r", [judged])
        site.update()
        _, _, news = await page.next()
        assert [(row["round"], row["accuracy"]) for row in news["courses"][0]["rows"]] == [(3, 0.5)]
        site.store.set_run_status("r", RunStatus.FINISHED, at=99.0)
        site.update()
        _, _, news = await page.next()
        assert (news["live_run"], news["runs"][0]["status"]) == (None, "finished")

    told(story)


def test_after_a_long_gap_the_page_is_told_to_load_the_course_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgefl.coordinator.api.feed_state.MAX_ROUNDS", 3)

    async def story() -> None:
        site.begin_run(rounds=1)
        page = Page(site.feed)
        await page.next()
        for number in range(2, 7):
            site.close_round(number)
        site.update()
        _, _, news = await page.next()
        assert news["courses"] == [{"run": "r", "reload": True}]

    told(story)


def test_what_a_run_did_before_the_feed_saw_it_is_told_to_pages_that_are_open(site: Site) -> None:
    async def story() -> None:
        page = Page(site.feed)
        await page.next()
        site.begin_run(rounds=4)
        site.update()
        _, _, news = await page.next()
        assert news["live_run"] == "r"
        assert [row["round"] for row in news["courses"][0]["rows"]] == [1, 2, 3, 4]

    told(story)


def test_a_device_that_left_says_since_when_and_one_that_was_removed_is_named(site: Site) -> None:
    async def story() -> None:
        site.beat("a")
        page = Page(site.feed)
        await page.next()
        site.registry.record_status("a", StatusMessage(state="offline", boot_id="b", session_no=1))
        site.registry.remove("c")
        site.update()
        _, _, news = await page.next()
        assert (news["devices"][0]["presence"], news["devices"][0]["since"]) == ("offline", 50.0)
        assert news["removed"] == ["c"]

    told(story)


def test_what_needs_attention_is_told_the_worst_first_and_no_more_than_a_page_can_show(site: Site) -> None:
    async def story() -> None:
        page = Page(site.feed)
        assert (await page.next())[2]["attention"] == []
        site.beat("a", temperature_c=81.0, throttled="under-voltage,capped")
        site.beat("b")
        site.registry.record_status("b", StatusMessage(state="offline", boot_id="b", session_no=1))
        site.begin_run()
        site.store.set_run_status("r", RunStatus.RUNNING, at=2.0, reason="waits for 2 more devices")
        site.update()
        rows = (await page.next())[2]["attention"]
        assert [(row.get("device_id") or row.get("run_id"), row["text"]) for row in rows] == [
            ("r", "waits for 2 more devices"),
            ("a", "throttled: under-voltage, capped"),
            ("a", "hot: 81 °C"),
            ("b", "offline"),
        ]

    told(story)
    crowd = [{"device_id": str(n), "presence": "offline" if n < 50 else "gone", "since": 5.0} for n in range(60)]
    crowd[7]["cloned"] = "two boards share its card"
    missing = [{"device_id": "a", "presence": "online", "problem": "shard of cifar: No module named 'cifar'"}]
    assert [(row["level"], row["text"]) for row in list_attention(missing, [], 0.0)] == [
        ("bad", missing[0]["problem"])
    ]
    rows = list_attention(crowd, [], 0.0)
    assert len(rows) == MAX_ATTENTION
    assert [row["level"] for row in rows] == ["bad"] * 11 + ["warn"] * 19
    assert rows[0] == {"device_id": "7", "level": "bad", "text": "two boards share its card", "at": 5.0}
    assert rows[-1] == {"level": "warn", "text": f"{61 - MAX_ATTENTION + 1} more"}


def test_a_label_page_is_linked_while_its_board_is_there_and_no_other_address_is(site: Site) -> None:
    for name, address in (
        ("d", "https://192.0.2.7:8443/"),
        ("e", "https://bank.example:443/"),
        ("f", "https://192.0.2.8:1/"),
    ):
        site.registry.add(
            name, node_id=ord(name), role="trainer", groups=(), examples={}, facts={"label_page": address}
        )
    for name in ("d", "e"):
        site.beat(name)
    linked = [(make_device_row(site.registry, name) or {}).get("label_page") for name in ("d", "e", "f")]
    assert linked == ["https://192.0.2.7:8443/", None, None]


def test_a_board_whose_data_has_drifted_needs_attention_and_a_small_drift_is_only_shown(site: Site) -> None:
    for name, psi in (("a", 0.1), ("b", 0.3)):
        claim = {"column": "heat", "psi": psi, "ks": None, "num_reference": 9, "num_newer": 8}
        facts = {"drift": {"table": claim}}
        site.registry.add(name, node_id=ord(name), role="trainer", groups=(), examples={}, facts=facts)
    rows = [make_device_row(site.registry, name) for name in ("a", "b")]
    assert [row["drift"] for row in rows] == [f"table: psi {psi} of heat, 8 examples against 9" for psi in (0.1, 0.3)]
    told = [(row["device_id"], row["text"]) for row in list_attention(rows, [], 0.0) if "drift" in row["text"]]
    assert told == [("b", "data has drifted: table: psi 0.3 of heat, 8 examples against 9")]


def test_a_board_whose_signatures_end_or_whose_list_lags_behind_needs_attention(site: Site) -> None:
    day = 86400

    def report(name: str, version: Any, expires: Any, pack: Any = 90 * day) -> None:
        installs = {"list": {"version": version, "expires": expires}, "valid_until": {"gulls": pack}}
        site.registry.add(
            name, node_id=ord(name), role="trainer", groups=(), examples={}, facts={"installs": installs}
        )

    def list_texts(now: float) -> dict[str, str]:
        rows = [make_device_row(site.registry, info.device_id) for info in site.registry.list_devices()]
        return {
            row["device_id"]: row["text"] for row in list_attention(rows, [], now) if "offline" not in row["text"]
        }

    before = set(list_texts(0.0))
    for name in "abc":
        report(name, 2, 80 * day)
    assert set(list_texts(65 * day)) == before
    report("a", 999, 80 * day)
    assert set(list_texts(65 * day)) == before, "one board alone makes no list the newest"
    report("b", 3, 80 * day)
    report("c", 2, 80 * day)
    assert list_texts(1.0) == {"c": "it has list 2 of signers, others have list 3: is it held back?"}
    report("c", 3, 80 * day, pack=20 * day)
    assert list_texts(5 * day) == {}
    assert list_texts(6 * day) == {"c": "its signatures expire on 1970-01-21: sign and send newer ones"}
    assert list_texts(20 * day)["c"].startswith("its signatures expired on 1970-01-21: sign and send newer ones, or")
    assert set(list_texts(66 * day)) == {"a", "b", "c"}
    for nonsense in ("3", True, -1, 2**80, None, [], {}, 0.5):
        report("c", nonsense, nonsense, pack=nonsense)
        assert "signed" not in make_device_row(site.registry, "c")
        assert "c" not in list_texts(5 * day)
    for installs in (None, [], {"list": 3, "valid_until": []}, "x"):
        site.registry.add("c", node_id=99, role="trainer", groups=(), examples={}, facts={"installs": installs})
        assert "signed" not in make_device_row(site.registry, "c")


def test_a_board_says_what_it_is_and_the_evaluator_of_the_coordinator_is_none(site: Site) -> None:
    facts = {"family": "pi", "model": "Raspberry Pi 5", "libraries": {"edgefl-fleet": "0.2.0"}}
    site.registry.add("a", node_id=1, role="trainer", groups=(), examples={"digits": 5}, facts=facts)
    site.registry.add(EVALUATOR_NAME, node_id=9, role="evaluator", groups=(), examples={"digits": 7, "mnist": 3})
    rows = {row["device_id"]: row for row in (make_device_row(site.registry, name) for name in ("a", EVALUATOR_NAME))}
    assert [rows["a"][name] for name in ("model", "version", "examples")] == ["Raspberry Pi 5", "0.2.0", 5]
    assert "built_in" not in rows["a"]
    assert (rows[EVALUATOR_NAME]["built_in"], rows[EVALUATOR_NAME]["examples"]) == (True, 10)
    for libraries in (None, [], {"edgefl-fleet": 7}):
        site.registry.add("a", node_id=1, role="trainer", groups=(), examples={}, facts={"libraries": libraries})
        assert "version" not in make_device_row(site.registry, "a")


def test_whatever_a_name_holds_the_message_stays_one_line(site: Site) -> None:
    async def story() -> None:
        name = "<script>\n\ndata: x\u2028</script>"
        site.registry.add(name, node_id=9, role="trainer", groups=(), examples={})
        _, _, whole = await Page(site.feed).next()
        assert whole["devices"][-1]["device_id"] == name

    told(story)


def test_too_many_pages_are_refused_and_after_the_end_all_are(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "MAX_CLIENTS", 1)

    async def story() -> None:
        page = Page(site.feed)
        with pytest.raises(NetworkError, match="1 pages are open"):
            site.feed.add_client()
        await page.next()
        site.feed.close()
        with pytest.raises(StopAsyncIteration):
            await page.next()
        assert site.feed.num_clients == 0
        with pytest.raises(NetworkError, match="stopping"):
            site.feed.add_client()

    told(story)


def test_silence_is_broken_by_a_comment(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "KEEP_ALIVE_S", 0.01)

    async def story() -> None:
        client = site.feed.add_client()
        stream = site.feed.stream(client, None)
        assert (await anext(stream)).startswith(b"id: ")
        assert await anext(stream) == b": still here\n\n"

    told(story)


class LostState(FeedState):
    """A state whose store cannot be read any more."""

    def pop_changes(self, changed: dict[str, float]) -> Any:
        raise StoreError(f"the disk is gone, and with it news of {', '.join(changed)}")


def test_a_store_that_cannot_be_read_delays_the_news_and_does_not_end_the_coordinator(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        page = Page(site.feed)
        await page.next()
        site.feed._state = LostState(store=site.store, registry=site.registry)
        site.beat("a")
        site.update()
        assert "the disk is gone, and with it news of a" in caplog.text
        site.feed._state = FeedState(store=site.store, registry=site.registry)
        site.update()
        event, _, everything = await page.next()
        assert (event, everything["devices"][0]["presence"]) == ("snapshot", "online"), "what was lost comes whole"

    told(story)


class Connection:
    """The ASGI side of one request, whose client may stop reading or leave."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.reads, self.leaves, self.has_sent = asyncio.Event(), asyncio.Event(), asyncio.Condition()
        self.reads.set()

    async def receive(self) -> Any:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        async with self.has_sent:
            self.sent.append(message)
            self.has_sent.notify_all()

    async def begun(self, count: int) -> None:
        async with asyncio.timeout(10), self.has_sent:
            await self.has_sent.wait_for(lambda: len(self.sent) >= count)


def test_a_client_that_leaves_is_forgotten(site: Site) -> None:
    async def story() -> None:
        connection = Connection()
        answer = FeedResponse(site.feed, site.feed.add_client(), None)
        task = asyncio.ensure_future(answer({}, connection.receive, connection.send))
        await connection.begun(2)
        assert dict(connection.sent[0]["headers"])[b"content-type"].startswith(b"text/event-stream")
        connection.leaves.set()
        await asyncio.wait_for(task, 10)
        assert site.feed.num_clients == 0

    told(story)


def test_a_client_that_takes_nothing_is_let_go(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_response, "SEND_TIMEOUT_S", 0.05)

    async def story() -> None:
        connection = Connection()
        answer = FeedResponse(site.feed, site.feed.add_client(), None)
        task = asyncio.ensure_future(answer({}, connection.receive, connection.send))
        await connection.begun(2)
        connection.reads.clear()
        site.beat("a")
        site.update()
        await asyncio.wait_for(task, 10)
        assert site.feed.num_clients == 0
        assert len(connection.sent) == 2

    told(story)
