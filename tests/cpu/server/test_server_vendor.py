"""The libraries that the chat page is served with: what npm has, with their licenses, and nothing else."""

import hashlib
import re
import runpy
from pathlib import Path

from shoal.server.operator.web_page import vendored, web_page
from tests.fake_server import FakeServer

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "shoal/server/pages/vendor"
PACKAGES = runpy.run_path(str(ROOT / ".ci/vendor"))["PACKAGES"]


def test_files_have_the_checksums_that_their_list_names():
    listed = dict(line.split("  ")[::-1] for line in (FOLDER / "SHA256SUMS").read_text().splitlines())
    found = {
        str(path.relative_to(FOLDER)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in FOLDER.rglob("*")
        if path.is_file() and path.name != "SHA256SUMS"
    }
    assert found == listed


def test_every_package_has_its_license_and_stays_small():
    licenses = {path.name.removeprefix("LICENSE.") for path in FOLDER.glob("LICENSE.*")}
    assert licenses == {name for name, _ in PACKAGES}
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 1 << 20
    assert {path.suffix for path in (FOLDER / "fonts").iterdir()} == {".woff2"}


def test_the_page_names_its_libraries_by_hash():
    page, headers = web_page("chat.html")
    tags = re.findall(rb'<script src="vendor/([\w.-]+)\?[^"]+" integrity="(sha256-[^"]+)"></script>', page)
    assert [name for name, _ in tags] == [b"markdown-it.min.js", b"purify.min.js", b"katex.min.js"]
    assert all(f"'{found.decode()}'" in headers["content-security-policy"] for _, found in tags)
    fonts = set(re.findall(rb"url\(([^)]+\.woff2)\)", page))
    assert fonts and all(vendored(name.decode().removeprefix("vendor/")) for name in fonts)


def test_libraries_and_fonts_are_served_and_nothing_beside_them():
    with FakeServer(api_key=["sesame"]) as server:
        status, headers, text = server.request("/vendor/purify.min.js?version")
        assert status == 200 and text == (FOLDER / "purify.min.js").read_text()
        assert headers["content-type"].startswith("text/javascript") and "max-age" in headers["cache-control"]
        for name in (
            "SHA256SUMS",
            "LICENSE.katex",
            "katex.min.css",
            "fonts",
            "fonts/",
            "../chat.js",
            "%2e%2e/chat.js",
            "no.js",
        ):
            assert server.request(f"/vendor/{name}")[0] == 404, name
