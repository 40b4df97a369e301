"""Clients that hang up in the middle of a request, on every route of a whole coordinator."""

import logging

import pytest
from cut_requests import make_bearer_headers, make_signed_headers, send_all
from fuzz.api_readers import open_coordinator

pytestmark = pytest.mark.extended


@pytest.mark.parametrize("kind", ["bearer", "signed"])
def test_a_request_that_is_cut_off_anywhere_gives_neither_a_traceback_nor_an_internal_error(tmp_path, caplog, kind):
    coordinator, token = open_coordinator(tmp_path)
    try:
        headers = make_signed_headers(coordinator) if kind == "signed" else make_bearer_headers(token)
        with caplog.at_level(logging.WARNING):
            num_sent, statuses, faults = send_all(coordinator, headers, tmp_path / "c" / "ca.pem", every=7)
        text = coordinator._monitoring.metrics.render().decode()
    finally:
        coordinator.__exit__(None, None, None)
    assert num_sent > 200
    assert statuses.get(400), "some are whole, and let in"
    assert not faults
    assert not [record for record in caplog.records if record.exc_info]
    counted = [line for line in text.splitlines() if line.startswith("edgefl_http_responses_total")]
    assert not [line for line in counted if 'code="5' in line]
