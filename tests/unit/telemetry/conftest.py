"""One headless browser for the tests of all pages."""

from collections.abc import Iterator

import pytest

from tests.unit.telemetry.browser import Browser, find_chromium


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium on this machine")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
