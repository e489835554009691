"""The page in headless Chromium against the stub: what a person sees, and that what a model writes is only text.

Skipped, saying so, where there is no Chromium or no playwright.
"""

import re
import shutil

import httpx
import pytest

from eagle3_jax.serving import page as page_files
from tests.serving.running import serving
from tests.serving.stub import ANSWER, KEY, MARKUP, Stub

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (make setup)")
expect = playwright.expect
PATIENCE = 30_000  # milliseconds: for slow machines; nothing waits that long where all is well
expect.set_options(timeout=PATIENCE)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium in PATH (apt-get install chromium)")


@pytest.fixture(scope="module")
def stub():
    return Stub()


@pytest.fixture(scope="module")
def address(stub):
    with serving(stub.app) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, address, stub):
    """Opens the page in a fresh context; at the end nothing may have been complained of but what was allowed."""
    contexts, complaints, allowed = [], [], []

    def opened(allow: str | None = None, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: said.type in ("error", "warning", "debug") and complaints.append(said.text))
        page.on("request", lambda request: request.url.startswith(address) or complaints.append(request.url))
        allowed.append(allow)
        page.goto(address)
        return page

    stub.bodies.clear()
    stub.left.clear()
    stub.locked, stub.strategies, stub.failed = False, [], None
    yield opened
    for context in contexts:
        context.close()
    assert [text for text in complaints if not any(allow and re.search(allow, text) for allow in allowed)] == []


def ask(page, prompt: str) -> None:
    page.get_by_label("Message").fill(prompt)
    page.keyboard.press("Enter")


def finished(page):
    expect(page.locator("#send")).to_be_visible()


def no_sideways_scroll(page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@needs_chromium
def test_a_message_streams_in_colours_and_numbers(open_page, stub):
    page = open_page()
    expect(page.locator("#model")).to_have_text("stub")
    page.get_by_label("system prompt").fill("Be brief.")
    page.get_by_role("radio", name="chain").check()
    page.get_by_label("depth").first.fill("3")
    ask(page, "why is the sky blue?")
    finished(page)
    answer = page.locator(".message:not(.user) .text")
    assert answer.evaluate("node => node.textContent") == ANSWER
    classes = answer.locator("span").evaluate_all("nodes => nodes.map(n => n.className.split(' ')[0])")
    assert classes == ["d0", "d1", "d2", "d3", "d0", "d1", "d0", "d0", "d1", "d2", "d0"]
    grounds = answer.locator("span").evaluate_all("nodes => nodes.map(n => getComputedStyle(n).backgroundColor)")
    assert len(set(grounds[:5])) == 4 and grounds[0] == "rgba(0, 0, 0, 0)"  # four kinds, the model's own is bare
    assert page.locator("#live-speed").inner_text() == "12.5"  # the server's own number, at the end
    assert page.locator("#live-tau").inner_text() == "2.50" and page.locator("#live-tokens").inner_text() == "11"
    said = page.get_by_role("img", name="Guesses right").get_attribute("aria-label")
    assert said == "Guesses right. depth 1: 75 %, depth 2: 50 %, depth 3: 25 %"
    assert page.locator("#live-steps > i").evaluate_all("nodes => nodes.map(n => n.childElementCount)") == [4, 2, 1, 3]
    assert "tau 2.50" in page.locator("#status").inner_text()
    body = stub.bodies[0]
    assert body["eagle3"] == {"strategy": "chain:3", "stats": True} and body["stream"] and body["model"] == "stub"
    assert [m["role"] for m in body["messages"]] == ["system", "user"]
    ask(page, "and why red?")
    finished(page)
    assert [m["content"] for m in stub.bodies[1]["messages"]] == [
        "Be brief.",
        "why is the sky blue?",
        ANSWER,
        "and why red?",
    ]


@needs_chromium
def test_the_strategy_that_is_shown_is_asked_for(open_page, stub):
    page = open_page()
    page.get_by_label("max tokens").fill("12")
    page.get_by_label("temperature").fill("0.7")
    ask(page, "markup")
    finished(page)
    for kind, fields in (("plain", {}), ("chain", {"chain-depth": 5}), ("tree", {"tree-depth": 4, "tree-top": 2})):
        page.get_by_role("radio", name=kind).check()
        for field, value in fields.items():
            page.locator(f"#{field}").fill(str(value))
        ask(page, "markup")
        finished(page)
    asked = [body["eagle3"]["strategy"] for body in stub.bodies]
    assert asked == ["auto", "plain", "chain:5", "tree:4x2x12"]
    assert all((body["max_tokens"], body["temperature"]) == (12, 0.7) for body in stub.bodies)
    page.locator("#tree-nodes").fill("1")
    ask(page, "markup")
    assert len(stub.bodies) == 4 and page.get_by_label("Message").input_value() == "markup"  # told at the field


@needs_chromium
def test_what_the_server_has_compiled_is_offered_first(open_page, stub):
    stub.strategies = ["plain", "chain:2", "chain:4"]
    page = open_page()
    expect(page.get_by_role("radio", name="tree")).to_be_enabled()
    page.get_by_role("radio", name="chain").check()
    assert page.locator("#chain-depth").input_value() == "2"
    assert "This server has chain:2, chain:4" in page.locator("#kind-note").inner_text()
    stub.strategies = ["plain"]
    page = open_page()
    expect(page.locator("#kind-note")).to_contain_text("no draft")
    expect(page.get_by_role("tab", name="Race")).to_be_disabled()  # there would be nothing to race against


@needs_chromium
def test_stop_keeps_what_came_and_frees_the_server(open_page, stub):
    page = open_page()
    ask(page, "endless")
    expect(page.locator(".message:not(.user) .text span").nth(9)).to_be_visible()
    page.keyboard.press("Escape")
    finished(page)
    assert stub.left.wait(PATIENCE / 1000)
    expect(page.locator(".facts")).to_contain_text("stopped")
    assert page.locator(".message:not(.user) .text").inner_text().startswith("word more word")
    ask(page, "endless")
    page.get_by_role("button", name="Stop").click(force=True)  # the growing text moves it
    finished(page)
    ask(page, "hello")
    finished(page)
    assert stub.bodies[-1]["messages"][1]["content"].startswith("word more")
    assert page.locator("#error").is_hidden()


@needs_chromium
def test_a_race_shows_both_and_who_won(open_page, stub):
    page = open_page()
    page.get_by_role("tab", name="Chat").press("ArrowRight")
    expect(page.get_by_role("tab", name="Race")).to_be_focused()
    ask(page, "why?")
    expect(page.locator("#verdict")).to_contain_text("times as fast")
    finished(page)
    assert "the same text" in page.locator("#verdict").inner_text()
    for lane in ("plain", "spec"):
        assert page.locator(f"#lane-{lane} .text").evaluate("node => node.textContent") == ANSWER
    clocks = [float(page.locator(f"#lane-{lane} .clock").inner_text().split()[0]) for lane in ("plain", "spec")]
    assert clocks[0] > clocks[1] > 0
    assert "winner" in page.locator("#lane-spec").get_attribute("class")
    assert page.locator("#lane-spec .text .d3").count() == 1 and page.locator("#lane-plain .text .d1").count() == 0
    asked = [(body["eagle3"]["strategy"], body["seed"]) for body in stub.bodies]
    assert [strategy for strategy, _ in asked] == ["plain", "auto"] and asked[0][1] == asked[1][1]
    page.get_by_label("temperature").fill("0.5")
    page.get_by_label("temperature").blur()
    expect(page.locator("#verdict")).to_contain_text("times as fast")  # another setting does not take the result away
    ask(page, "broken")
    expect(page.get_by_role("alert")).to_contain_text("NaN logits")
    finished(page)
    expect(page.locator("#model")).to_have_text("stub")
    assert page.locator("#lane-spec .phase").inner_text() == "not run"
    assert page.locator("#lane-plain .text").inner_text() == "The sky"  # what came stays
    ask(page, "halfway")  # the second half of the race breaks, while the first is played again
    expect(page.get_by_role("alert")).to_contain_text("NaN logits")
    assert page.locator("#lane-plain .text").evaluate("node => node.textContent") == ANSWER  # and plays no longer
    finished(page)
    ask(page, "endless")
    expect(page.locator("#lane-plain .text span").nth(5)).to_be_visible()
    page.keyboard.press("Escape")
    finished(page)
    assert page.get_by_label("Message").input_value() == "endless"


@needs_chromium
def test_what_a_model_writes_stays_text(open_page):
    page = open_page()
    ask(page, "markup")
    finished(page)
    text = page.locator(".message:not(.user) .text")
    assert text.evaluate("node => node.textContent") == MARKUP + "<b>bold"
    assert text.locator("img, script, b").count() == 0 and page.title() == "eagle3-jax"
    ask(page, MARKUP)
    finished(page)
    assert page.locator(".message.user img").count() == 0


@needs_chromium
def test_errors_say_what_to_do_and_lose_nothing(open_page, stub):
    page = open_page(allow="status of (429|400|401|503)|Failed to load resource")
    for prompt, words in (
        ("full", "try again in 7 s"),
        ("bad", "max_tokens 160 does not fit"),
        ("broken", "NaN logits"),
    ):
        ask(page, prompt)
        expect(page.get_by_role("alert")).to_contain_text(words)
        finished(page)
        assert page.get_by_label("Message").input_value() == prompt
    expect(page.locator(".facts").last).to_contain_text("broken off")
    stub.failed = "boom"
    ask(page, "bad")
    expect(page.locator("#model")).to_have_text("the server has failed: boom")
    finished(page)
    stub.failed = None
    stub.locked = True
    ask(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("wants an API key")
    expect(page.get_by_label("API key")).to_be_focused()
    page.get_by_label("API key").fill(KEY)
    page.get_by_label("API key").press("Enter")
    ask(page, "hello")
    finished(page)
    assert page.locator("#error").is_hidden()
    assert page.evaluate("sessionStorage.getItem('api-key')") == KEY and page.evaluate("localStorage.length") == 0


@needs_chromium
def test_a_server_that_has_gone(browser):
    stub = Stub()
    with serving(stub.app) as address:
        page = browser.new_page()
        page.goto(address)
        expect(page.locator("#model")).to_have_text("stub")
    ask(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("does not answer")
    page.close()


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screens_and_both_schemes(open_page, scheme):
    page = open_page(viewport={"width": 320, "height": 640}, color_scheme=scheme)
    assert no_sideways_scroll(page)
    ask(page, "wide")
    finished(page)
    assert no_sideways_scroll(page)
    page.get_by_role("tab", name="Race").click()
    page.locator("#settings summary").click()
    page.get_by_role("radio", name="tree").check()
    assert no_sideways_scroll(page)
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) == 7 and min(contrasts) >= 4.5, contrasts  # WCAG AA for text
    grounds = page.evaluate(LIGHTNESS)
    assert grounds == sorted(grounds, reverse=scheme == "light"), grounds  # in order for those who see no hue


_LUMINANCE = """
const luminance = (colour) => {
  const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(Number).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const chips = [...document.querySelectorAll('.scale .chip')].map((chip) => getComputedStyle(chip));
"""
LIGHTNESS = f"(() => {{ {_LUMINANCE} return chips.map((c) => luminance(c.backgroundColor)); }})()"
CONTRASTS = f"""(() => {{ {_LUMINANCE}
  return chips.map((c) => {{
    const [dark, light] = [luminance(c.color), luminance(c.backgroundColor)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  }});
}})()"""


def test_files_policy_and_names(address):
    client = httpx.Client(base_url=address)
    for path in page_files.paths():
        answer = client.get(path)
        assert answer.status_code == 200 and answer.headers["content-security-policy"] == page_files.POLICY, path
        text = answer.text
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), path
        assert not re.search(r"(?:src|href)=\"(?:https?:)?//|@import|url\(", text), path  # works offline
    assert "unsafe" not in page_files.POLICY and "script-src 'self'" in page_files.POLICY
    html = client.get("/").text
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", html)  # all of which the policy would block
    assert client.get("/page/__init__.py").status_code == 404
    client.close()
