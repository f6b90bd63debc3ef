"""The pages in a real browser, as people use them: Debian's chromium, led by Python's playwright."""

import contextlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("django", reason="the extra `server` is not installed; it needs Python 3.11")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("needs a browser: apt-get install chromium (`make test-server`)", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
from tests.support.team_server import PASSWORD, document, environment, running, set_up_link  # noqa: E402

PICTURES = os.environ.get("SERVER_PICTURES")  # a folder for the docs' pictures, where they are to be made


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browsed")
    with running(folder) as (base, log, _):
        yield base, set_up_link(log), folder


def fresh(chromium, **options):
    page = chromium.new_context(**options).new_page()
    page.set_default_timeout(60_000)
    return page


def sign_in(page, base, email, password=PASSWORD):
    page.goto(f"{base}/account/login/")
    page.fill("[name=login]", email)
    page.fill("[name=password]", password)
    page.click("main button")


def push(folder, base, token, count=3):
    """Runs that the command sends."""
    code = "import json, sys; from memscale.history.remote import Remote; remote = Remote(sys.argv[1])\n"
    code += "[remote._request('POST', remote._project + '/runs', each) for each in json.load(sys.stdin)]"
    runs = [realistic(number) for number in range(count)]
    command = [sys.executable, "-c", code, f"{base}/t/vision/llama/"]
    given = environment(folder, MEMSCALE_TOKEN=token)
    done = subprocess.run(command, env=given, input=json.dumps(runs), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def realistic(number):
    """A run that looks like one of a small language model, each commit a little larger."""
    data = document(number, name="llama batch=8 seq=2048", commit=f"{number + 1:x}".ljust(40, "0"))
    grown = (number // 2) * (300 << 20)
    categories = {
        "parameter": 5 << 30,
        "optimizer state": 4 << 30,
        "gradient": 2 << 30,
        "activation": (6 << 30) + grown,
    }
    columns = range(120)
    data["timeline"]["live"] = {
        "parameter": [5 << 30] * 120,
        "optimizer state": [4 << 30] * 120,
        "gradient": [max(0, at - 50) * (40 << 20) for at in columns],
        "activation": [int(categories["activation"] * max(0.02, 1 - abs(at - 55) / 60)) for at in columns],
    }
    data["timeline"]["phases"] = [["forward", 0.0], ["backward", 0.115], ["optimizer", 0.22]]
    peak = max(sum(column) for column in zip(*data["timeline"]["live"].values(), strict=True))
    data["predicted"] |= {"peak_bytes": peak, "first_step_peak_bytes": peak, "reserved_peak_bytes": peak + (700 << 20)}
    data["predicted"] |= {"by_category": categories, "step_seconds": 0.31 + number / 100}
    data["predicted"]["by_module"] = {
        **{f"layers.{at}.mlp": {"activation": (300 << 20) + grown // 12} for at in range(12)},
        "embed": {"parameter": 500 << 20},
    }
    data["hardware"] |= {"name": "NVIDIA GeForce RTX 4090", "memory_bytes": 24 << 30, "usable_bytes": 23 << 30}
    data["measured"] = {"peak_bytes": peak * 1.004, "parameter_bytes": 5 << 30} if number % 2 else {}
    rules = [{"path": "layers.*", "transform": {"type": "checkpoint", "policy": {"type": "policies.dots_saveable"}}}]
    data["plan"] = rules[: number % 3]
    return data


def test_a_team_from_the_set_up_link_to_a_lost_role(server, chromium):
    base, link, folder = server
    owner = fresh(chromium, java_script_enabled=False)  # the pages need no scripts
    owner.goto(link)
    for name, value in {"email": "ada@example.org", "password": PASSWORD, "again": PASSWORD}.items():
        owner.fill(f"[name={name}]", value)
    owner.fill("[name=team]", "Vision")
    owner.fill("[name=slug]", "vision")
    owner.keyboard.press("Enter")
    owner.wait_for_url("**/t/vision/")
    stranger = fresh(chromium)
    stranger.goto(link)
    assert "used or out of date" in stranger.content()
    sign_in(stranger, base, "ada@example.org", "wrong horse 9")
    assert "not correct" in stranger.content()

    owner.click("text=New project")
    owner.fill("[name=name]", "Llama")
    owner.fill("[name=slug]", "llama")
    owner.keyboard.press("Enter")
    owner.wait_for_url("**/t/vision/llama/")
    owner.goto(f"{base}/t/vision/-/tokens")
    owner.fill("[name=name]", "laptop")
    owner.click("text=Make the token")
    token = re.search(r"msc_[\w-]{43}", owner.content())[0]
    push(folder, base, token, 8)

    owner.goto(f"{base}/t/vision/llama/")
    assert owner.locator("tbody tr").count() == 8
    owner.fill("[name=commit]", "3".ljust(40, "0"))
    owner.click("text=Filter")
    assert owner.locator("tbody tr").count() == 1
    owner.goto(f"{base}/t/vision/llama/")
    boxes = owner.locator("[name=run]")
    boxes.nth(0).check()
    boxes.nth(7).check()
    owner.click("text=Compare two")
    assert "layers.0.mlp" in owner.content()
    for page in ("llama/commits", "llama/accuracy", "-/plans", "-/audit"):
        assert owner.goto(f"{base}/t/vision/{page}").status == 200
    owner.goto(f"{base}/t/vision/-/plans")
    owner.click("tbody a >> nth=0")
    pulling = re.search(r"plan pull (plan:\w+) --from (\S+?)<", owner.content())
    command = [sys.executable, "-m", "memscale", "plan", "pull", pulling[1], "--from", pulling[2]]
    done = subprocess.run(command, env=environment(folder, MEMSCALE_TOKEN=token), capture_output=True, text=True)
    assert '"rules"' in done.stdout, done.stderr

    owner.goto(f"{base}/t/vision/-/invite")
    owner.fill("[name=email]", "grace@example.org")
    owner.click("text=Make a link")
    member = fresh(chromium)
    member.goto(owner.input_value("#secret"))
    member.fill("[name=password]", PASSWORD)
    member.fill("[name=again]", PASSWORD)
    member.keyboard.press("Enter")
    member.wait_for_url("**/t/vision/")
    member.goto(f"{base}/t/vision/llama/")  # the open tab
    owner.goto(f"{base}/t/vision/")
    row = owner.locator("tr", has_text="grace@example.org")
    row.locator("select").select_option("0")
    row.locator("text=Change").click()
    member.click("tbody a >> nth=0")
    assert "There is nothing here" in member.content()

    elsewhere = fresh(chromium)
    sign_in(elsewhere, base, "ada@example.org")
    elsewhere.goto(f"{base}/account/sessions/")
    elsewhere.click("text=Sign Out Other Sessions")
    owner.goto(f"{base}/t/vision/")
    assert "/account/login/" in owner.url
    with second_factor(elsewhere, chromium, base):
        pictures_and_widths(chromium, elsewhere, base)
        forged_form(elsewhere, base)


def pictures_and_widths(chromium, signed_in, base):
    """No page is wider than a phone, in either colours; the pictures of the docs, where they are asked for."""
    cookies = signed_in.context.cookies()
    pages = {"team": "", "runs": "llama/", "commits": "llama/commits", "plans": "-/plans"}
    pages["run"] = f"llama/runs/{7:016x}/"
    pages["compare"] = f"llama/compare?run={0:016x}&run={7:016x}"
    for width, colours in ((1280, "light"), (390, "dark")):
        page = fresh(chromium, viewport={"width": width, "height": 844}, color_scheme=colours)
        page.context.add_cookies(cookies)
        blocked = []
        page.on("console", lambda message, found=blocked: found.append(message.text))
        for name, path in pages.items():
            page.goto(f"{base}/t/vision/{path}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (name, width)
            assert blocked == []  # nothing that the policy of the page forbids
            if PICTURES:
                page.screenshot(path=f"{PICTURES}/server-{name}-{'phone' if width == 390 else 'wide'}.png")
        page.goto(f"{base}/t/vision/llama/")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@contextlib.contextmanager
def second_factor(page, chromium, base):
    """The body runs while the first code is still the one of the time: a code is taken once."""
    from allauth.mfa.totp.internal.auth import format_hotp_value, hotp_value, yield_hotp_counters_from_time

    def code(secret):
        return format_hotp_value(hotp_value(secret, next(yield_hotp_counters_from_time())))

    page.goto(f"{base}/account/2fa/totp/activate/")
    if "reauthenticate" in page.url:
        page.fill("[name=password]", PASSWORD)
        page.click("main button")
    secret = page.input_value("#authenticator_secret")
    page.fill("[name=code]", first := code(secret))
    page.click("main button")
    yield
    other = fresh(chromium)
    sign_in(other, base, "ada@example.org")
    assert "/2fa/authenticate/" in other.url
    other.fill("[name=code]", "000000")
    other.click("main button >> nth=0")
    assert "/2fa/authenticate/" in other.url
    while code(secret) == first:
        time.sleep(1)
    other.fill("[name=code]", code(secret))
    other.click("main button >> nth=0")
    other.wait_for_url("**/t/vision/")


def forged_form(page, base):
    """A form of another port of this machine, in a browser that is signed in, changes nothing."""
    fields = "<input name=name value=X><input name=slug value=x>"
    form = f'<form method=post action="{base}/t/vision/-/project">{fields}</form>'

    class Evil(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(f"{form}<script>document.forms[0].submit()</script>".encode())

        def log_message(self, *_):
            pass

    evil = http.server.HTTPServer(("127.0.0.1", 0), Evil)
    threading.Thread(target=evil.serve_forever, daemon=True).start()
    page.goto(f"http://127.0.0.1:{evil.server_port}/")
    page.wait_for_url(f"{base}/**")
    assert "not sent from a page of this server" in page.content()
    evil.shutdown()
    evil.server_close()
    page.goto(f"{base}/t/vision/x/")
    assert "There is nothing here" in page.content()
