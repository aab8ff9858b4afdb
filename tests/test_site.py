"""The site, built as `make docs` does and opened from disk in headless Chromium, on a phone and on a desktop."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urldefrag

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
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    found = [page for page in site.rglob("*.html") if page.name != "404.html"]  # whose links are of a server
    assert len(found) > 30
    return found


def test_links_lead_to_files_and_anchors(pages):
    for page in pages:
        for target in re.findall(r'(?:href|src)="(?!https?:|data:|mailto:)([^"]+)"', page.read_text(encoding="utf-8")):
            path, anchor = urldefrag(unquote(target))
            file = (page.parent / path).resolve() if path else page
            assert file.is_file(), f"{page.name}: {target}"
            if anchor and file.suffix == ".html" and anchor != "__skip":
                assert f'id="{anchor}"' in file.read_text(encoding="utf-8"), f"{page.name}: {target}"


@in_chromium
@pytest.mark.parametrize("device", WIDTHS)
def test_every_page_opens_without_error_or_overflow(pages, device):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    screen = {"width": WIDTHS[device], "height": 900, "deviceScaleFactor": 1, "mobile": device == "phone"}
    broken = "return [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
    try:
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        for page in pages:
            browser.get(page.as_uri())
            width = browser.execute_script("return document.documentElement.scrollWidth")
            assert width <= WIDTHS[device], page.name
            assert browser.execute_script(broken) == [], page.name
            assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == [], page.name
    finally:
        browser.quit()
