"""One Chromium for the tests of a file, and a tab for each test."""

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from cuadrilla.messages import VARIABLES
from tests.chromium import CHROMIUM, Browser, Tab
from tests.dashboards import TOKEN
from tests.spawn.conftest import ana as ana
from tests.spawn.conftest import coordinator as coordinator


@pytest.fixture(autouse=True)
def languages(monkeypatch: pytest.MonkeyPatch) -> None:
    """No language is set for the command, so that pages are in the browser's language."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt install chromium")
    with Browser(tmp_path_factory.mktemp("chromium")) as made:
        yield made


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """A tab. It fails the test if its console has messages, or if it sends requests to any server but its own."""
    with browser.tab() as made:
        yield made
        assert made.complaints == []
        others = {urlsplit(url).netloc for url in made.asked if not url.startswith("data:")}
        assert others <= {made.value("location.host")}
        assert not any(TOKEN in url for url in made.asked if "#" not in url)
