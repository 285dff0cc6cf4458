"""``halfstep explore`` and ``halfstep plan --page``: which requests the server accepts, and the files of ``--out``."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lookup_run import complaint, lines, said

from halfstep.cli.pages.answers import EXAMPLES, answer
from halfstep.cli.pages.html import html
from halfstep.cli.pages.server import server

QUESTION = {"page": "explorer", "state": {"x": "1/3", "f": "fp16"}}


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[int, str]]:
    """Port and path of a served explorer."""
    serving, url = server("explorer", {"x": "0.3"})
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/[\w-]{22}/)explorer\.html", url)
    assert found, url
    yield int(found[1]), found[2]
    serving.shutdown()
    serving.server_close()


def asked(port: int, path: str, body: str | None = None, **headers: str) -> tuple[int, str]:
    """Status and text of the reply to GET, or with a body to POST."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    usual = {"Host": f"127.0.0.1:{port}", "Content-Type": "application/json"}
    connection.request("GET" if body is None else "POST", path, body, {**usual, **headers})
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


def test_the_server_serves_the_page_and_answers(address: tuple[int, str]) -> None:
    port, path = address
    assert asked(port, f"{path}explorer.html") == (200, html("explorer", "local", {"x": "0.3"}))
    status, text = asked(port, f"{path}answer", json.dumps(QUESTION), Origin=f"http://127.0.0.1:{port}")
    assert (status, json.loads(text)) == (200, json.loads(json.dumps(answer(QUESTION))))
    # Options are parsed in a thread of the server, which may not set what Ctrl-C does.
    plan = {"page": "planner", "state": {"params": "7000000000", "gpus": "8"}}
    status, text = asked(port, f"{path}answer", json.dumps(plan))
    assert status == 200 and json.loads(text)["error"] == "" and json.loads(text)["plan"]
    # Through `ssh -L 9000:127.0.0.1:PORT`
    assert (
        asked(port, f"{path}answer", json.dumps(QUESTION), Host="localhost:9000", Origin="http://localhost:9000")[0]
        == 200
    )


def test_requests_without_the_secret_or_from_other_sites_are_refused(address: tuple[int, str]) -> None:
    port, secret = address
    cases: list[tuple[str, dict[str, str]]] = [
        ("/explorer.html", {}),
        ("/" + "A" * 22 + "/explorer.html", {}),
        (f"{secret}explorer.html", {"Host": "evil.example:80"}),  # a name that resolves to 127.0.0.1
        (f"{secret}explorer.html", {"Host": ""}),
        (f"{secret}answer", {"Origin": "https://evil.example"}),
        (f"{secret}answer", {"Origin": "null"}),
    ]
    for path, headers in cases:
        body = json.dumps(QUESTION) if path.endswith("answer") else None
        assert asked(port, path, body, **headers)[0] == 403, (path, headers)


def test_wrong_requests_get_an_error_and_the_server_continues(address: tuple[int, str]) -> None:
    port, path = address
    cases: list[tuple[str, str | None, dict[str, str], int]] = [
        ("../../etc/passwd", None, {}, 404),
        ("server.py", None, {}, 404),
        ("other", "{}", {}, 400),
        ("answer", "{}", {"Content-Type": "text/plain"}, 400),  # what a form of another site can send
        ("answer", "{}", {"Content-Length": "65537"}, 400),
        ("answer", "{", {}, 400),
        ("answer", "[" * 60_000, {}, 400),
        ("answer", '{"page": "explorer", "state": {"x": 5}}', {}, 400),
    ]
    for name, body, headers, status in cases:
        assert asked(port, path + name, body, **headers)[0] == status, (name, headers)
        assert asked(port, f"{path}explorer.html")[0] == 200


@pytest.mark.parametrize("words", ["explore --no-open", "plan --params 5 --json --page --no-open"])
def test_the_commands_serve_until_ctrl_c(words: str) -> None:
    command = [sys.executable, "-m", "halfstep", *words.split()]
    surroundings = {**os.environ, "SSH_CONNECTION": "10.0.0.1 50000 10.0.0.2 22"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=surroundings
    ) as process:
        assert process.stdout and process.stderr
        spoken, lines = process.stderr if "--json" in words else process.stdout, []
        while not lines or not lines[-1].startswith("stop with Ctrl-C"):
            lines.append(spoken.readline())
            assert lines[-1], process.stderr.read()
        found = re.search(r"open in a browser: http://127\.0\.0\.1:(\d+)(/.+)", "".join(lines))
        assert found and f"ssh -N -L {found[1]}:127.0.0.1:{found[1]} 10.0.0.2" in lines[-2]
        assert asked(int(found[1]), found[2])[0] == 200
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=20)
        assert process.returncode == 0 and "Traceback" not in errors
        if "--json" in words:
            assert json.loads(out)["plans"]  # the output is JSON alone


def embedded(page: str) -> Any:
    return json.loads(re.findall(r'<script type="application/json" id="start">(.*?)</script>', page, re.DOTALL)[0])


def test_a_file_has_one_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "a page.html"
    words = ["explore", "--out", page.name]
    assert said(*words, "-f", "fp16")[1] == f"wrote a page.html: open {page.resolve().as_uri()} in a browser\n"
    state = embedded(page.read_text(encoding="utf-8"))["answer"]["state"]
    assert (state["f"], state["g"]) == ("fp16", "bf16")
    modes = ["--rounding", "up", "--overflow", "saturate"]
    assert said(*words, "--number", "-1/3", "-f", "half", "--format", "e5m7", *modes)[0] == 0
    written = page.read_text(encoding="utf-8")
    command = "halfstep explore --number=-1/3 --format fp16 --format e5m7 --rounding up --overflow saturate"
    assert embedded(written)["answer"]["command"] == command
    assert said(*words, "-1/3", "half", "e5m7", *modes)[0] == 0 and page.read_text(encoding="utf-8") == written
    assert not re.search(r' src="|<link rel="style|^import |url\(', written, flags=re.MULTILINE)


def test_a_plan_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "\x1b[2J.html"
    words = "plan --params 7e9 --gpus 8 --card h100 --offload --strategy zero2".split()
    printed = lines(*words, "--page", str(path), "--no-open")
    assert any(f"wrote {tmp_path}/\\x1b[2J.html: open " in line for line in printed) and "\x1b" not in "".join(printed)
    chosen = {"params": "7000000000", "gpus": "8", "card": "h100", "strategy": "zero2", "offload": ""}
    assert embedded(path.read_text(encoding="utf-8"))["answer"]["state"] == chosen
    lines("plan", "--page", str(path), "--no-open")
    assert embedded(path.read_text(encoding="utf-8"))["answer"]["state"] == EXAMPLES["planner"]
    path.unlink()
    assert "expected a model, but got none" in complaint("plan", "--gpus", "8", "--page", str(path))
    assert not path.exists()


def test_user_text_cannot_end_the_script_element() -> None:
    written = html("planner", "file", {"model": "</script><b>{{script}}", "gpus": "<!--"})
    assert written.count("</script>") == 2 and "<b>" not in written and "<!--" not in written
    assert embedded(written)["answer"]["state"] == {"model": "</script><b>{{script}}", "gpus": "<!--"}


def test_what_the_explorer_refuses(address: tuple[int, str]) -> None:
    for words, message in (
        (f"--no-open --port {address[0]}", "cannot be used: Address already in use; pass another one, or leave"),
        ("-f fp16 -f bf16 -f e5m2", "expected at most two formats, the second to compare with, but got"),
        ("0.1 --number 2", "--number 2 is a second number beside 0.1; leave one out"),
    ):
        assert message in complaint("explore", *words.split())
