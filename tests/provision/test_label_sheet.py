import re

import pytest
from requirements import PARTS, require

from edgefl.core.protocol import JoinToken
from edgefl.provision.label_sheet import DeviceLabel, render_sheet


def labels(count):
    def token(number):
        addresses = ("coordinator.example.org:8000", "10.0.0.1:8000")
        secret, ca = "s3cret" * 4, "0123456789abcdef" * 4
        return JoinToken(ca_fingerprint=ca, token_id=f"t{number}", secret=secret, fleet="lab", addresses=addresses)

    numbers = range(1, count + 1)
    return [DeviceLabel(name=f"pi-{one:02d}", token=token(one), expires="2026-11-23 06:00 UTC") for one in numbers]


def test_each_board_has_a_label_with_its_name_its_site_and_the_ca():
    page = render_sheet(labels(3), has_tokens=False)
    assert page.count("<article>") == page.count("<svg") == 3
    assert re.findall(r"<h2>(.+?)</h2>", page) == ["pi-01", "pi-02", "pi-03"]
    assert "coordinator.example.org:8000" in page
    assert "01234567 89abcdef" in page
    assert "2026-11-23 06:00 UTC, once" in page
    assert "@" not in re.sub(r"@page", "", page)
    assert "holds no secrets" in page
    assert not re.search(r"(src|href)=|url\(|@import", page), "it loads something from elsewhere"
    with_tokens = render_sheet(labels(1), has_tokens=True)
    assert "This sheet holds join tokens" in with_tokens
    assert "holds no secrets" not in with_tokens
    label = DeviceLabel(name="<b>x", token=labels(1)[0].token, addresses=('"><script>:1',))
    page = render_sheet([label], has_tokens=False)
    assert "<script>" not in page
    assert "<b>x" not in page


@pytest.fixture(scope="module")
def chromium():
    require("chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=PARTS["chromium"].path(), args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.mark.slow
def test_ten_labels_fill_one_page_of_a4_and_nothing_is_cut_off(chromium, tmp_path):
    for count, pages in ((10, 1), (11, 2)):
        page = chromium.new_page()
        page.set_content(render_sheet(labels(count), has_tokens=True))
        cut = page.evaluate(
            "[...document.querySelectorAll('article, .words')].filter(e => e.scrollHeight > e.clientHeight + 1 "
            "|| e.scrollWidth > e.clientWidth + 1).length"
        )
        assert cut == 0
        pdf = page.pdf(format="A4", prefer_css_page_size=True)
        assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == pages
        page.close()
