"""Opening a page in headless Chromium, and what it says of itself once it has loaded."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

PROBE = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(String(event.message)), true);
addEventListener("securitypolicyviolation", (event) => errors.push(event.violatedDirective));
console.error = (...parts) => errors.push(parts.join(" "));
addEventListener("load", () => {
  const size = (element) => [element.getBoundingClientRect().width,
                             element.getBoundingClientRect().height];
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify({
    errors,
    plots: [...document.querySelectorAll("figure svg")].map(size),
    texts: [...document.querySelectorAll("figure svg text")].map(size),
    ink: getComputedStyle(document.querySelector("h1")).color,
    width: document.documentElement.scrollWidth,
    requests: performance.getEntriesByType("resource").length,
  });
  document.body.append(out);
});
</script>"""


def open_in_browser(page: str, folder: Path, *options: str) -> dict[str, Any]:
    """Return what a page shows in a window as narrow as a phone: errors, sizes, requests.

    The page, which forbids scripts, is opened as a copy in `folder` that allows the one that looks.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("chromium is not installed: the page is not opened in a browser")
    probed = page.replace("default-src 'none';", "default-src 'none'; script-src 'unsafe-inline';")
    probed = probed.replace("<title>", PROBE + "<title>", 1)
    assert probed.count("unsafe-inline") == 2
    path = folder / "probed.html"
    path.write_text(probed)
    done = subprocess.run(
        [
            browser,
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}"),
            *("--enable-logging=stderr", "--virtual-time-budget=5000", "--window-size=500,900"),
            *(*options, "--dump-dom", path.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    found = re.search('<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, "the page did not load"
    return json.loads(unescape(found[1]))
