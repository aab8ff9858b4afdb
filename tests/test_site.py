"""The site, built as `make docs` does and opened from disk in headless Chromium, on a phone and on a desktop."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse
from xml.etree import ElementTree

import pytest

import qattn

ROOT = Path(qattn.__file__).parent.parent
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WIDTHS = {"phone": 390, "desktop": 1280}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("site"),
    pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs the extra docs"),
]
in_chromium = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs Debian's chromium and chromium-driver")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    site = os.environ.get("SITE")  # which `make docs` has just built
    site = built(tmp_path_factory.mktemp("site")) if site is None else ROOT / site
    found = [page for page in site.rglob("*.html") if page.name != "404.html"]  # whose links are of a server
    assert len(found) > 40
    return found


def built(site):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    return site


def test_links_lead_to_files_and_anchors(pages):
    for page in pages:
        for target in re.findall(r'(?:href|src)="(?!https?:|data:|mailto:)([^"]+)"', page.read_text(encoding="utf-8")):
            path, anchor = urldefrag(unquote(target))
            file = (page.parent / path).resolve() if path else page
            assert file.is_file(), f"{page.name}: {target}"
            if anchor and file.suffix == ".html" and anchor != "__skip":
                assert f'id="{anchor}"' in file.read_text(encoding="utf-8"), f"{page.name}: {target}"


def test_formulas_are_typeset(pages):
    """No formula in plain Unicode is left, and formulas are well formed, with scripts instead of their signs."""
    typeset = {}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r'<div class="language-output highlight">(.*?)</div>', text, re.DOTALL):
            assert html.unescape(block).isascii(), f"{page.name}: {block}"
        outside = re.sub(r"<(pre|code|math|script|style|svg)\b.*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL)
        assert not (found := re.findall(r"(?<![\w/.])\w[_^]\w{1,2}(?!\w)|\S\^\S+", outside)), f"{page.name}: {found}"
        assert "<em>batch" not in text, page.name  # of (*batch, N)
        typeset[page.parent.name, page.stem] = formulas = re.findall(r"<math.*?</math>", text)
        for formula in formulas:
            letters = "".join(ElementTree.fromstring(formula.replace("&nbsp;", " ")).itertext())
            assert not set(letters) & set("_^{}²ᵀ<>"), letters
    assert len(typeset["api", "operators"]) >= 1  # in a docstring
    assert sum(map(len, typeset.values())) >= 40


def test_notebooks_have_pictures_tables_and_no_warning(pages):
    notebooks = {page for page in pages if page.parent.name == "notebooks"}
    assert {page.stem for page in notebooks} == {path.stem for path in (ROOT / "docs" / "notebooks").glob("*.py")}
    for page in notebooks:
        text = page.read_text(encoding="utf-8")
        pictures = re.findall(rf'<img alt="[^"]+" src="({page.stem}_\d+\.png)"', text)
        assert len(pictures) >= 2
        assert all((page.parent / picture).stat().st_size > 5000 for picture in pictures)
        assert "Warning" not in text
        assert "never formed" in text or page.stem not in ("scan", "million", "splats")
        cells = json.loads(page.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]
        assert any(cell.get("outputs") for cell in cells)


@pytest.fixture
def browser():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@in_chromium
@pytest.mark.parametrize("device", WIDTHS)
def test_every_page_opens_without_error_or_overflow(pages, browser, device):
    screen = {"width": WIDTHS[device], "height": 900, "deviceScaleFactor": 1, "mobile": device == "phone"}
    broken = "return [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    for page in pages:
        browser.get(page.as_uri())
        width = browser.execute_script("return document.documentElement.scrollWidth")
        assert width <= WIDTHS[device], page.name
        assert browser.execute_script(broken) == [], page.name
        assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == [], page.name


@in_chromium
def test_code_and_formulas_do_not_scroll_on_a_desktop(pages, browser):
    screen = {"width": WIDTHS["desktop"], "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    cut = """return [...document.querySelectorAll("pre code, .formula")].filter(e => e.scrollWidth > e.clientWidth)
        .map(e => e.textContent)"""
    for page in pages:
        browser.get(page.as_uri())
        assert browser.execute_script(cut) == [], page.name


@in_chromium
def test_scripts_of_formulas_are_small_and_low(pages, browser):
    """Browsers that do not know MathML would show s_ij in one line."""
    browser.get(next(page for page in pages if page.stem == "mathematics").as_uri())
    places = """return [...document.querySelectorAll("msub")].map(e => [...e.children].map(
        c => [parseFloat(getComputedStyle(c).fontSize), c.getBoundingClientRect()]))
        .map(e => e.map(([size, box]) => [size, (box.top + box.bottom) / 2]))"""
    for (size, middle), (script_size, script_middle) in browser.execute_script(places):
        assert 0 < script_size < size
        assert script_middle > middle


@in_chromium
def test_search_works_from_disk(pages, browser):
    browser.get(next(page for page in pages if page.stem == "tutorial").as_uri())
    field = browser.find_element("css selector", "[data-md-component=search-query]")
    browser.execute_script("arguments[0].focus()", field)
    field.send_keys("geodesic_distance")
    end = time.monotonic() + 30
    while not (found := browser.find_elements("css selector", "a.md-search-result__link")):
        assert time.monotonic() < end, "no result"
        time.sleep(0.1)
    targets = [unquote(urldefrag(link.get_attribute("href")).url) for link in found]
    assert any(target.endswith("motion.html") for target in targets)
    assert all((Path(unquote(urlparse(target).path))).is_file() for target in targets)
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
