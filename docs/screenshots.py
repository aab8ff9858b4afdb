"""Screenshots of the panels of `qattn view`, in docs/images, by headless Chromium and its driver.

python docs/screenshots.py
"""

import argparse
import io as streams
import shutil
import time
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from qattn import diffusion, io, shapes
from qattn.viewer import PANELS, Viewer

SIGNS = {"Diffuse": "Dirac at", "Modes": "Mode ", "Signatures": "Heat kernel", "Distance from here": "Distance from"}
SIGNS |= {"Match": "Colors carried", "Operator": "Potential f"}
STEPS = {"Diffuse": (1, 30), "Modes": (1, 4)}  # which slider to move, and how often


def chromium(width: int, height: int) -> webdriver.Chrome:
    """Start a browser without a window."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    flags = "--headless=new --no-sandbox --disable-dev-shm-usage --use-angle=swiftshader --enable-unsafe-swiftshader"
    for flag in [*flags.split(), f"--window-size={width},{height}"]:
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def wait_for(browser: webdriver.Chrome, sign: str) -> None:
    """Wait until a text is shown."""
    end = time.monotonic() + 200
    while sign not in browser.find_element(By.TAG_NAME, "body").text:
        if time.monotonic() > end:
            raise SystemExit(f"{sign!r} was not shown")
        time.sleep(0.2)
    pointer = ActionBuilder(browser)
    pointer.pointer_action.move_to_location(5, 5)  # away from hints
    pointer.perform()
    time.sleep(2.0)  # until it is drawn


def main() -> None:
    """Take one screenshot per panel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=20_000)
    options = parser.parse_args()
    rest, _ = shapes.creature(options.points)
    diffusion(rest, 0.03)  # so that no picture tells how long loops take to load
    moved = shapes.posed(shapes.creature(options.points // 2, seed=1)[0], seed=3, bend=0.25)
    for other, panels in ((None, [p for p in PANELS if p != "Match"]), (io.Cloud(moved.numpy()), ["Match"])):
        viewer = Viewer(io.Cloud(rest.numpy()), other, port=8400)
        browser = chromium(1080, 900)
        browser.get(viewer.address)
        wait_for(browser, SIGNS["Diffuse"])
        for close in browser.find_elements(By.CSS_SELECTOR, "button.mantine-Notification-closeButton"):
            close.click()  # that WebGL is not on a graphics card
        for panel in panels:
            if panel != "Diffuse":
                browser.find_element(By.CSS_SELECTOR, "input[role=combobox][value]:not([value=Adaptive])").click()
                time.sleep(0.5)
                browser.find_element(By.XPATH, f"//*[@role='option' and normalize-space(.)='{panel}']").click()
            wait_for(browser, SIGNS[panel])
            if panel in STEPS:
                slider, times = STEPS[panel]
                browser.find_elements(By.CSS_SELECTOR, "[role=slider]")[slider].send_keys(Keys.ARROW_RIGHT * times)
                time.sleep(6.0)
                wait_for(browser, SIGNS[panel])
            image = Image.open(streams.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
            target = Path(__file__).parent / "images" / f"view_{panel.split()[0].lower()}.png"
            image.save(target, optimize=True)
            print(f"{target.name}: {target.stat().st_size / 1000:.0f} kB", flush=True)
        browser.quit()
        viewer.stop()


if __name__ == "__main__":
    main()
