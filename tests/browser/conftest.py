"""One Chromium for the tests of a file, and a tab for each test of the dashboard."""

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
    """The command has none: pages are in the browser's."""
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
    """Says nothing on its console, and asks nobody but the dashboard that it was opened from."""
    with browser.tab() as made:
        yield made
        assert made.complaints == []
        others = {urlsplit(url).netloc for url in made.asked if not url.startswith("data:")}
        assert others <= {made.value("location.host")}
        assert not any(TOKEN in url for url in made.asked if "#" not in url)
