"""The report in a real browser: it runs without errors, shows its figures, answers hover and keys, and fits a phone."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from test_report import NASTY, data, drawn, files, nasty, rendered, routed

__all__ = ["data", "files", "nasty", "rendered", "routed"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [drawn, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")]

PROBE = """
const found = {};
const seen = (node) => { const box = node.getBoundingClientRect(); return box.width > 100 && box.height > 60; };
const figures = [...document.querySelectorAll("figure")];
found.figures = figures.length;
found.empty = figures.filter((f) => {
  const svg = f.querySelector("svg");
  return !svg || !seen(svg) || svg.querySelectorAll("path, image, use").length < 5 || !svg.querySelector("text");
}).map((f) => f.id);
const tokens = [...document.querySelectorAll("#tokens .t")];
const field = (name) => document.querySelector(`#panel [data-f=${name}]`).textContent;
found.first = field("place");
tokens[7].dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
found.hovered = [field("place"), field("share"), field("attention"), field("ffn"), tokens[7].classList.contains("on")];
found.bars = document.querySelectorAll("#panel svg rect.ffn").length;
tokens[0].focus();
const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
press("ArrowRight"); press("ArrowRight"); press("ArrowRight"); press("ArrowLeft");
found.focused = [tokens.indexOf(document.activeElement), field("place"), document.activeElement.tabIndex];
press("ArrowDown"); found.down = tokens.indexOf(document.activeElement);
press("End"); found.end = tokens.indexOf(document.activeElement);
found.stops = tokens.filter((t) => t.tabIndex === 0).length;
const before = tokens.map((t) => t.className).join();
document.querySelector("input[value=ffn]").click();
found.tinted = before !== tokens.map((t) => t.className).join();
found.shown = document.getElementById("tokens").textContent;
found.markup = document.querySelectorAll("#tokens script, #tokens img, header img, figure b, figure i").length;
found.title = document.title;
found.width = document.documentElement.scrollWidth;
found.window = window.innerWidth;
found.dark = getComputedStyle(document.body).backgroundColor;
found.errors = window.errors;
document.documentElement.dataset.found = JSON.stringify(found);
"""


def chromium(page: Path, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    fixed = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking".split()
    fixed += (
        "--disable-component-update --disable-sync --enable-logging=stderr --v=0 --virtual-time-budget=5000".split()
    )
    command = [CHROMIUM, *fixed, f"--user-data-dir={profile}", *flags, "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def probe(rendered: str, folder: Path, *flags: str) -> dict[str, Any]:
    """What PROBE finds in the page; the page's policy is taken out, since it would not let a foreign script run."""
    opened, changed = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", rendered)
    assert changed == 1
    listen = "<script>window.errors = []; addEventListener('error', (e) => errors.push(e.message), true);</script>"
    opened = opened.replace("<title>", listen + "<title>", 1).replace("</body>", f"<script>{PROBE}</script></body>")
    path = folder / "probed.html"
    path.write_text(opened, encoding="utf-8")
    dom = chromium(path, folder / "profile", *flags).stdout
    found = re.search(r'data-found="([^"]*)"', dom)
    assert found is not None, dom[-2000:]
    result: dict[str, Any] = json.loads(html.unescape(found[1]))
    return result


@pytest.fixture(scope="module")
def found(rendered: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return probe(rendered, tmp_path_factory.mktemp("wide"), "--window-size=1280,900")


def test_the_page_as_it_is_logs_nothing(rendered: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(rendered, encoding="utf-8")
    result = chromium(path, tmp_path / "profile")
    assert not [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    assert 'class="t q' in result.stdout and 'class="bars"' in result.stdout, "its own script ran"


def test_its_policy_keeps_a_foreign_script_from_running(rendered: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(rendered.replace("</body>", "<script>document.title = 'taken over'</script></body>"))
    result = chromium(path, tmp_path / "profile")
    assert "<title>taken over" not in result.stdout and "CONSOLE" in result.stderr


def test_figures_are_there_and_nothing_fails(found: dict[str, Any], data: dict[str, Any]) -> None:
    assert found["errors"] == [] and found["empty"] == [] and found["figures"] == 15


def test_hover_shows_what_a_token_computed(found: dict[str, Any], data: dict[str, Any]) -> None:
    layers = data["model"]["layers"]
    means = [
        f"{100 * sum(data['tokens'][kind][7]) / (layers * data['model']['groups'][kind]):.1f}%"
        for kind in ("attention", "ffn")
    ]
    total = len(data["tokens"]["ids"])
    assert found["first"] == f"1 of {total}"
    assert found["hovered"] == [f"8 of {total}", f"{100 * data['tokens']['share'][7]:.1f}%", *means, True]
    assert found["bars"] == layers


def test_the_keyboard_walks_the_text(found: dict[str, Any], data: dict[str, Any]) -> None:
    total = len(data["tokens"]["ids"])
    assert found["focused"] == [2, f"3 of {total}", 0]
    assert found["down"] > 2 and found["end"] == total - 1 and found["stops"] == 1
    assert found["tinted"]


def test_foreign_text_is_shown_as_text(found: dict[str, Any]) -> None:
    assert found["markup"] == 0 and "taken over" not in found["title"]
    for part in ("<script>document.title = 'taken over'</script>", "&amp;", "\U0001f600", "[U+001B]"):
        assert part in found["shown"]
    plain = found["shown"].replace("\u21b5", "").replace("\u00b7", "")  # signs of line ends and of further bytes
    assert plain.startswith(NASTY[: NASTY.index("\x07")]) and "שלום עולם مرحبا" in plain and "[U+202E]evil" in plain


def test_a_phone_has_no_sideways_scrolling_and_the_dark_is_dark(rendered: str, tmp_path: Path) -> None:
    narrow = probe(rendered, tmp_path, "--window-size=390,800", "--blink-settings=preferredColorScheme=0")
    assert narrow["width"] <= narrow["window"] <= 500 and narrow["empty"] == []
    assert narrow["dark"] == "rgb(20, 23, 27)"
