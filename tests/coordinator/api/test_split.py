"""Batches over HTTPS: from a device's exchange through the route, with what breaks on the way."""

import hashlib
import threading

import numpy as np
import pytest
from fastapi import Request
from split_networks import DEVICE, PLAN, SEED_KEY, WIRE_ID, SplitSite, some_images

from edgefl.compression.codec import decode_body
from edgefl.coordinator.api.server import WebServer, make_app, open_listener
from edgefl.coordinator.api.split import split_router
from edgefl.coordinator.directory import init_directory
from edgefl.coordinator.split.service import SplitRuns
from edgefl.core.errors import NetworkError, NotAllowedError, SplitSessionError, TaskError
from edgefl.core.protocol import BODY_HASH_HEADER, SPLIT_PATH
from edgefl.core.types import derive_rng
from edgefl.device.rollouts.download import DownloadSource
from edgefl.device.training import split_exchange
from edgefl.device.training.split_exchange import CoordinatorExchange, ExchangeLink, SplitPlan
from edgefl.device.training.trainer import DeviceTrainer
from edgefl.system.https_client import create_pinned_context, request
from edgefl.tasks.learners.torch_split import cut_front
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.registry import make_task

pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")


async def no_fleet(_scope, _receive, _send):
    raise AssertionError("not asked")


def admit(http_request: Request):
    """Stands for the check of a signature."""
    device = http_request.headers.get("x-device")
    if device is None:
        raise NotAllowedError("unsigned")
    http_request.state.device_id = device


class Site:
    """A coordinator's port with the route, and a device that trains."""

    def __init__(self, root, **split):
        self.split = SplitSite(**split)
        self.runs = SplitRuns()
        self.runs.open("r1", self.split.run)
        directory = init_directory(root, hosts=["127.0.0.1"], fleet="lab", port=8000)
        listener = open_listener("127.0.0.1", 0)
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.web = WebServer(make_app(no_fleet, [split_router(self.runs, signer=admit)]), directory, listener)
        self.web.start()
        self.trust = create_pinned_context(directory.ca_cert.read_bytes())
        self.before_request = lambda: None
        self.check_waiting = lambda: None

    def source(self):
        self.before_request()
        return DownloadSource(address=self.address, tls_context=self.trust, sign=self.sign)

    @staticmethod
    def sign(_method, _path, body):
        return {"x-device": DEVICE, BODY_HASH_HEADER: hashlib.sha256(body).hexdigest()}

    def exchange(self, assignment_id=WIRE_ID):
        return CoordinatorExchange(
            SplitPlan.parse(self.split.components.header["split"]),
            assignment_id=assignment_id,
            rng=derive_rng(*SEED_KEY, "activations"),
            link=ExchangeLink(get_source=self.source, check_waiting=self.wait),
        )

    def wait(self):
        self.check_waiting()

    def train(self, exchange):
        learner = make_task("mnist", {"model": "cnn-small"}).learner(threads=1)
        learner.load(self.split.components.model)
        front = cut_front(learner, "pool2", threads=1)
        front.exchange = exchange
        clock = {"clock": lambda: 0.0, "on_iteration": lambda *_: False}
        try:
            return train(front, some_images(), PLAN, derive_rng(*SEED_KEY), **clock)
        finally:
            exchange.close()


@pytest.fixture
def open_site(tmp_path):
    sites = []

    def open_site(**split):
        sites.append(Site(tmp_path / "site", **split))
        return sites[-1]

    yield open_site
    for site in sites:
        site.web.stop()
        site.split.run.close()


def whole_update(components):
    learner = make_task("mnist", {"model": "cnn-small"}).learner(threads=1)
    learner.load(components.model)
    run = {"clock": lambda: 0.0, "on_iteration": lambda *_: False}
    return train(learner, some_images(), PLAN, derive_rng(*SEED_KEY), **run)


@pytest.mark.parametrize("labels", ["coordinator", "device"])
def test_a_device_and_the_port_train_as_the_whole_network_does(open_site, labels):
    site = open_site(labels=labels)
    result, expected = site.train(site.exchange()), whole_update(site.split.components)
    assert result.loss == pytest.approx(expected.loss, abs=1e-5)
    for name, displacement in result.displacement.items():
        np.testing.assert_allclose(displacement, expected.displacement[name], atol=1e-6)


def test_a_broken_connection_costs_a_request_again_and_no_training_twice(open_site):
    site = open_site()
    exchange, lost = site.exchange(), []

    def lose_an_answer():
        connection = exchange._connection
        if connection is not None and exchange._number == 1 and not lost:
            receive = connection.request

            def request_in_vain(*arguments, **options):
                lost.append(receive(*arguments, **options))
                raise NetworkError("cut")

            connection.request = request_in_vain

    site.before_request = lose_an_answer
    result = site.train(exchange)
    assert [status for status, _ in lost] == [200]
    assert site.split.processes[0].calls.count("step") == result.iterations
    for name, displacement in result.displacement.items():
        np.testing.assert_allclose(
            displacement, whole_update(site.split.components).displacement[name], atol=1e-6, err_msg=name
        )


def test_a_lost_process_is_told_to_the_device(open_site):
    site = open_site()
    exchange = site.exchange()
    site.before_request = lambda: site.split.processes[-1].lose() if exchange._number == 2 else None
    with pytest.raises(SplitSessionError):
        site.train(exchange)
    site.before_request = lambda: None
    site.train(site.exchange())


def test_an_assignment_that_is_not_out_is_asked_for_until_it_is_too_late(open_site, monkeypatch):
    site = open_site()
    asked = []
    site.check_waiting = lambda: asked.append(1) or (len(asked) == 2 and site.split.dispatch("r1/late"))
    site.train(site.exchange("r1/late"))
    assert len(asked) == 2
    monkeypatch.setattr(split_exchange, "UNKNOWN_S", 0.0)
    with pytest.raises(TaskError, match="takes no batches of this assignment"):
        site.train(site.exchange("r1/never"))


def test_a_device_that_waits_obeys_a_stop(open_site):
    site = open_site()

    def stop():
        raise KeyboardInterrupt

    site.check_waiting = stop
    with pytest.raises(KeyboardInterrupt):
        site.train(site.exchange("r1/never"))


def post(site, body=b"x", device=DEVICE, signed=None, **query):
    values = {"assignment": WIRE_ID, "session": "s", "number": 0, "examples": 1, **query}
    path = f"{SPLIT_PATH}?{'&'.join(f'{name}={value}' for name, value in values.items())}"
    headers = {BODY_HASH_HEADER: hashlib.sha256(body if signed is None else signed).hexdigest()}
    headers |= {} if device is None else {"x-device": device}
    return request(site.address, site.trust, "POST", path, body=body, headers=headers)


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({}, 400),
        ({"device": None}, 401),
        ({"device": "other"}, 404),
        ({"assignment": "r2/a"}, 404),
        ({"signed": b"y"}, 401),
        ({"number": -1}, 422),
        ({"examples": 0}, 422),
        ({"session": "s" * 65}, 422),
        ({"body": bytes(200_000)}, 400),
    ],
)
def test_what_makes_no_sense_is_refused_and_the_next_batch_taken(open_site, options, status):
    site = open_site()
    assert post(site, **options)[0] == status
    site.train(site.exchange())


def test_one_batch_of_an_assignment_at_a_time(open_site):
    site = open_site()
    go, entered = threading.Event(), threading.Event()
    site.split.run.exchange = lambda *_: (entered.set(), go.wait(30), b"done")[2]
    first = []
    thread = threading.Thread(target=lambda: first.append(post(site)))
    thread.start()
    assert entered.wait(30)
    assert post(site)[0] == 400
    go.set()
    thread.join()
    assert first == [(200, b"done")]


@pytest.mark.parametrize(
    "split", ["pool2", {}, {"after": "pool2"}, {"after": None, "num_outputs": 3}, {"after": "x", "num_outputs": 0}]
)
def test_a_malformed_split_of_an_instruction_is_refused(split):
    with pytest.raises(Exception, match="split"):
        SplitPlan.parse(split)
    assert SplitPlan.parse(None) is None


def make_trainer(site, root, get_source):
    shard = root / "shard"
    if not shard.exists():
        shard.mkdir()
        np.savez(shard / "data.npz", inputs=some_images().inputs, labels=some_images().targets)
    (root / "state").mkdir(exist_ok=True)
    return DeviceTrainer(
        device_id=DEVICE,
        role="trainer",
        shards=lambda: {"mnist": str(shard)},
        accelerator="cpu",
        threads=1,
        state_dir=root / "state",
        on_progress=lambda *_: None,
        get_source=get_source,
    )


def instruct(site):
    components = site.split.components
    plan = {"plan": PLAN.to_json(), "codec": "dense"}
    header = {**components.header, "test_fraction": 0.0, "assignment": WIRE_ID, "version": 0, **plan}
    return header, components.split.encode_front(components.model, 0)


def test_a_board_begins_an_assignment_again_whose_rest_is_lost_and_ends_as_if_it_was_not(open_site, tmp_path):
    site = open_site()
    lost = []

    def lose_once():
        processes = site.split.processes
        if processes and processes[-1].calls.count("step") == 2 and not lost:
            lost.append(processes[-1].lose())

    site.before_request = lose_once
    reply, body = make_trainer(site, tmp_path, site.source).train(*instruct(site))
    assert (len(lost), reply["metrics"]["iterations"]) == (1, 3)
    joined, _, _ = site.split.run.join(WIRE_ID, reply, 3, body)
    expected = whole_update(site.split.components).displacement
    for name, tensor in decode_body(joined, site.split.components.shapes).items():
        np.testing.assert_allclose(tensor, expected[name], atol=1e-6)


def test_a_board_evaluates_the_whole_network_of_a_split_run(open_site, tmp_path):
    site = open_site()
    header, _ = instruct(site)
    whole = site.split.components.encode(site.split.components.model, 0)
    reply, _ = make_trainer(site, tmp_path, site.source).evaluate({**header, "test_fraction": 0.5}, whole)
    assert reply["metrics"]["num_examples"] > 0


def test_a_process_without_a_connection_cannot_train_a_split_network(open_site, tmp_path):
    site = open_site()
    reply, _ = make_trainer(site, tmp_path, None).train(*instruct(site))
    assert "this process has none, as it is confined" in reply["error"]
