"""A real Chromium without a screen, driven by the tests of the router's page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1280,1000"),
)


@contextmanager
def open_browser(profile: Path) -> Iterator[webdriver.Chrome]:
    """A browser with a profile of its own; its console's lines are kept for `read_console`."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert chromium is not None, "tests/system_packages.sh installs it"
    assert driver is not None, "tests/system_packages.sh installs it"
    options = Options()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield browser
    finally:
        browser.quit()


def read_console(browser: webdriver.Chrome) -> list[str]:
    """What the page's console got since the last call: errors and violations of its policy are there."""
    return [entry["message"] for entry in browser.get_log("browser")]


def prefer_scheme(browser: webdriver.Chrome, scheme: str) -> None:
    """As if the user's system were light or dark."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
