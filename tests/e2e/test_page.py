"""The router's page in a real browser, over a real router and instances that replay tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from browser import open_browser, prefer_scheme, read_console
from processes import wait_until
from replay_service import Replay, Service
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from pdserve.router.keys.api_key import ApiKey, digest_of, make_secret


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service(tmp_path_factory.mktemp("page"))
    made.add("prefill", "--instance-id", "prefill-0", "--handoff-ms", "10")
    made.add("decode", "--instance-id", "decode-0", "--step-ms", "2")
    late = Replay("decode", made.directory, ["--instance-id", "decode-1", "--weights", "other"])
    made.instances.append(late)
    try:
        made.start().wait_for(1, 1)
        # The first one that a router meets says which model it is: the odd one comes last.
        late.start()
        wait_until(lambda: "is refused" in made.log.read_text(), "the odd one being refused")
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with open_browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


def text_of(browser: Chrome, selector: str) -> str:
    return browser.execute_script(
        "const e = document.querySelector(arguments[0]); return e ? e.innerText : '';", selector
    )


def complete(service: Service, max_tokens: int = 40, **headers: str) -> str:
    body = {"model": "smollm2-135m-instruct", "prompt": "SECRET-PROMPT stands here", "max_tokens": max_tokens}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, headers=headers, timeout=30)
    assert answer.status_code == 200
    return str(answer.json()["id"])


def test_page_shows_pools_and_opens_a_request_as_a_waterfall(service: Service, browser: Chrome) -> None:
    response_id = complete(service)
    browser.get(service.url)
    wait_until(lambda: "serving" in text_of(browser, "#serving"), "the page showing that the router serves")
    wait_until(lambda: "prefill-0" in text_of(browser, "#pool-prefill"), "the prefill pool")
    wait_until(lambda: "refused" in text_of(browser, "#pool-decode"), "the refused instance")
    assert "decode-0" in text_of(browser, "#pool-decode")
    assert "weights w0 here, other there" in text_of(browser, "#pool-decode")
    assert "1" in text_of(browser, "#stat-handoffs")

    # By keyboard alone: to the request, open, and out again with the focus back where it was.
    button = browser.find_element(By.CSS_SELECTOR, f"[data-key='{response_id}'] button")
    browser.execute_script("arguments[0].focus()", button)
    button.send_keys(Keys.ENTER)
    wait_until(lambda: browser.find_element(By.ID, "timeline").is_displayed(), "the timeline")
    assert text_of(browser, "#timeline-title") == response_id
    fall = text_of(browser, "#fall")
    for label in (
        "router",
        "prefill-0",
        "decode-0",
        "queue",
        "prefill",
        "KV save",
        "KV transfer",
        "decode wait",
        "stream",
    ):
        assert label in fall, fall
    bars = browser.find_elements(By.CSS_SELECTOR, "#fall .bar")
    assert len(bars) >= 7
    lane = browser.find_element(By.CSS_SELECTOR, "#fall .row .lane").rect
    for bar in bars:
        assert lane["x"] - 1 <= bar.rect["x"] <= bar.rect["x"] + bar.rect["width"] <= lane["x"] + lane["width"] + 3
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    wait_until(lambda: not browser.find_element(By.ID, "timeline").is_displayed(), "the timeline closing")
    assert browser.switch_to.active_element == button
    assert read_console(browser) == []


def test_page_follows_what_happens_until_it_is_paused(service: Service, browser: Chrome) -> None:
    browser.get(service.url)
    first = complete(service)
    wait_until(lambda: browser.find_elements(By.CSS_SELECTOR, f"[data-key='{first}']"), "the request appearing")
    browser.find_element(By.ID, "pause").click()
    assert browser.find_element(By.ID, "pause").get_attribute("aria-pressed") == "true"
    assert text_of(browser, "#pause") == "Resume"
    browser.find_element(By.ID, "pause").click()
    second = complete(service)
    wait_until(lambda: browser.find_elements(By.CSS_SELECTOR, f"[data-key='{second}']"), "the next one appearing")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 500])
def test_page_fits_wide_and_narrow_windows_in_light_and_dark(
    service: Service, browser: Chrome, scheme: str, width: int
) -> None:
    prefer_scheme(browser, scheme)
    browser.set_window_size(width, 900)
    browser.get(service.url)
    wait_until(lambda: "decode-0" in text_of(browser, "#pool-decode"), "the pools")
    script = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    assert browser.execute_script(script), "the page is wider than its window"
    color = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", color)[:3])) / 3
    assert (brightness < 80) == (scheme == "dark")


def test_policy_forbids_what_is_not_in_the_file(service: Service, browser: Chrome) -> None:
    policy = httpx.get(service.url).headers["content-security-policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    browser.get(service.url)
    read_console(browser)
    inject = """
        const s = document.createElement("script"); s.textContent = "window.injected = 1"; document.body.append(s);
        return window.injected === undefined;
    """
    assert browser.execute_script(inject)
    assert any("Content Security Policy" in line for line in read_console(browser))
    html = httpx.get(service.url).text
    assert not re.search(r"<[^>]+\son\w+=", html)
    assert not re.search(r"(src|href)=\"(?!data:,)", html)


def test_status_is_bounded_and_has_no_text(service: Service) -> None:
    ids = [complete(service, 10, **{"X-Request-Id": f"mine-{number}"}) for number in range(60)]
    answer = httpx.get(f"{service.url}/v1/status")
    assert answer.headers["cache-control"] == "no-store"
    assert "SECRET" not in answer.text
    assert len(answer.content) < 64 * 1024
    status = answer.json()
    assert [request["id"] for request in status["recent"]] == ids[:9:-1]
    assert status["recent"][0]["request_id"] == "mine-59"
    assert status["recent"][0]["completion_tokens"] == 10
    by_name = {instance["name"]: instance for pool in status["pools"] for instance in pool["instances"]}
    decode = by_name["decode-0"]
    num_others = decode["tally"]["num_legs"] - 60
    assert decode["state"] == "ready"
    assert by_name["decode-1"]["state"] == "refused"
    assert decode["tally"]["num_legs"] == status["counters"]["handoffs"] >= 60
    assert decode["tally"]["num_tokens"] == 9 * 60 + 39 * num_others
    assert decode["tally"]["num_cached_tokens"] == decode["tally"]["num_hittable_tokens"] > 0
    assert 0 <= decode["tally"]["least_event_age_ms"] < 1000


def test_page_asks_for_a_key_where_one_is_needed(browser: Chrome, tmp_path: Path) -> None:
    secret = make_secret()
    (tmp_path / "api-keys").write_text(ApiKey("alice", digest_of(secret.encode())).format())
    locked = Service(tmp_path)
    locked.add("decode", "--instance-id", "decode-9")
    try:
        locked.start("--api-keys-file", str(tmp_path / "api-keys")).wait_for(0, 1)
        browser.get(locked.url)
        field = browser.find_element(By.ID, "key")
        wait_until(field.is_displayed, "the page asking for a key")
        assert "decode-9" not in browser.page_source
        field.send_keys("not-the-key", Keys.ENTER)
        wait_until(lambda: "not valid here" in text_of(browser, "#problem-text"), "the wrong key being refused")
        field.send_keys(secret, Keys.ENTER)
        wait_until(lambda: "decode-9" in text_of(browser, "#pool-decode"), "the pools being shown")
        assert not field.is_displayed()
        assert secret not in browser.page_source
    finally:
        locked.close()
        read_console(browser)  # holds the refusals, which are no mistakes of the page
