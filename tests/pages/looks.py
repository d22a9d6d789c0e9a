"""What every page of this project has to satisfy, on a desk and on a phone, by day and by night."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from chromium import Browser, Page

PICTURES = Path(__file__).resolve().parents[2] / "build/pages"

# Whether an element is in a part of the page that is scrolled sideways by itself, where it may be as wide as it likes.
SCROLLED = """
const scrolled = (element) => {
  for (; element; element = element.parentElement) {
    if (['auto', 'scroll'].includes(getComputedStyle(element).overflowX)) return true;
  }
  return false;
};
"""

# Texts that are cut off or stick out of the window: [tag, text].
MISPLACED = """
[...document.querySelectorAll('body *')].filter((element) => {
  const box = element.getBoundingClientRect();
  if (box.width === 0 || box.height === 0 || element.closest('[aria-hidden="true"], legend')) return false;
  const text = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
  if (!text || scrolled(element)) return false;
  return box.right > innerWidth + 1 || box.left < -1 || element.scrollWidth > Math.ceil(element.clientWidth) + 1 &&
    element.clientWidth > 0;
}).map((element) => [element.tagName, element.textContent.slice(0, 60)])
"""

# Tables that are wider than the place that they have.
TOO_WIDE = """
[...document.querySelectorAll('table')].filter((table) => {
  const style = getComputedStyle(table.parentElement);
  const room = table.parentElement.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  return table.offsetWidth > room + 1 && !scrolled(table);
}).map((table) => table.innerText)
"""


@dataclass(frozen=True)
class Look:
    name: str
    width: int
    height: int
    dark: bool
    phone: bool


LOOKS = [
    Look(f"{device}-{'dark' if dark else 'light'}", width, height, dark, phone)
    for device, width, height, phone in (("desktop", 1280, 800, False), ("phone", 360, 740, True))
    for dark in (False, True)
]


def check_quiet(page: Page, url: str) -> None:
    """No error in the console, and nothing loaded from elsewhere."""
    assert page.problems == []
    origin = urlsplit(url)[:2]
    strangers = [asked for asked in page.requests if not asked.startswith("data:") and urlsplit(asked)[:2] != origin]
    assert strangers == []


def check_layout(page: Page) -> None:
    width, window = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width <= window, f"{width} pixels wide in a window of {window}: it scrolls sideways"
    for misfits in (MISPLACED, TOO_WIDE):
        assert page.evaluate(f"(() => {{ {SCROLLED} return {misfits.strip()}; }})()") == []


def check_looks(browser: Browser, url: str, name: str, await_content: Callable[[Page], None]) -> Iterator[Page]:
    """Opens the page in every look, waits for its content, checks it and leaves a picture in build/pages.

    Yields each page while it is open, for checks of its own.
    """
    for look in LOOKS:
        page = browser.open_page()
        try:
            page.look(look.width, look.height, look.dark, look.phone)
            page.goto(url)
            await_content(page)
            check_layout(page)
            yield page
            check_quiet(page, url)
            page.screenshot(PICTURES / f"{name}-{look.name}.png")
        finally:
            page.close()
