"""Access: pages of other sites, host names after DNS rebinding, and folders of traces outside --profile-dir."""

import pytest

from tests.fake_server import FakeServer, read_until

COMPLETE = "/v1/completions"
BODY = b'{"prompt": "a", "max_tokens": 1}'


@pytest.fixture(scope="module")
def server():
    with FakeServer(profile_dir="traces") as server:
        yield server


def status(server, path, body=None, admin=False, **headers):
    return server.request(
        path, body, admin=admin, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )[0]


@pytest.mark.parametrize(
    "content_type", ["application/json", "text/plain", "application/x-www-form-urlencoded"]
)
@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost:1", "null", "http://127.0.0.1"])
def test_pages_of_other_sites_may_not_have_it_compute(origin, content_type, server):
    assert status(server, COMPLETE, BODY, Origin=origin, Content_Type=content_type) == 403


def test_its_own_pages_programs_and_pages_behind_a_proxy_may(server):
    assert status(server, COMPLETE, BODY) == 200
    assert status(server, COMPLETE, BODY, Origin=f"http://127.0.0.1:{server.port}") == 200
    assert status(server, COMPLETE, BODY, Origin="https://Chat.Example", Host="chat.example") == 200
    assert (
        status(server, COMPLETE, BODY, Origin="https://chat.example", X_Forwarded_Host="chat.example") == 200
    )
    assert status(server, COMPLETE, BODY, Origin="vscode-webview://1a2b") == 200


def test_the_chat_page_may_behind_a_proxy_that_names_the_server_otherwise(server):
    """Its browser says that page and request have one address, and pages of strangers it calls otherwise."""
    page = {"Origin": "https://chat.example", "Host": "10.0.0.7:8000"}
    assert status(server, COMPLETE, BODY, **page, Sec_Fetch_Site="same-origin") == 200
    for site in ("same-site", "cross-site", "none"):
        assert status(server, COMPLETE, BODY, **page, Sec_Fetch_Site=site) == 403, site
    assert status(server, "/pause", b"", admin=True, **page, Sec_Fetch_Site="same-origin") == 403


def test_what_is_not_there_is_answered_with_what_is(server):
    lost = server.json("/nowhere")[1]["error"]["message"]
    assert "/openapi.json" in lost and server.request("/openapi.json")[0] == 200
    lost = server.json("/nowhere", admin=True)[1]["error"]["message"]
    assert "/openapi.json" not in lost and "/sleep" in lost and "/check_weights" in lost
    assert server.request("/openapi.json", admin=True)[0] == 404


def test_operators_paths_on_the_public_port_are_answered_with_the_way_to_the_admin_port(server):
    status_code, body = server.json("/sleep?level=1", b"")
    assert status_code == 404 and "--admin-port" in body["error"]["message"]
    assert "/openapi.json" not in body["error"]["message"]


def test_sites_that_are_allowed_and_clients_with_keys_may():
    with FakeServer(allowed_origins=["https://friend.example"]) as server:
        assert status(server, COMPLETE, BODY, Origin="https://friend.example") == 200
        assert status(server, COMPLETE, BODY, Origin="https://evil.example") == 403
    with FakeServer(api_key=["sesame"]) as server:
        assert (
            status(server, COMPLETE, BODY, Origin="https://page.example", Authorization="Bearer sesame")
            == 200
        )
        assert (
            status(
                server,
                "/pause",
                b"",
                admin=True,
                Origin="https://page.example",
                Authorization="Bearer sesame",
            )
            == 403
        )


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example"]
)
def test_the_admin_port_does_not_answer_under_a_borrowed_name(host, server):
    assert status(server, "/check_weights", admin=True, Host=host) == 403
    assert status(server, "/pause", b"", admin=True, Host=host) == 403
    assert status(server, "/health", admin=True, Host=host) == 200


def test_the_admin_port_answers_under_its_own_names_and_with_keys_under_any(server):
    for host in (f"127.0.0.1:{server.admin_port}", "localhost", "LOCALHOST:8001", "[::1]:8001", "10.0.0.7"):
        assert status(server, "/is_sleeping", admin=True, Host=host) == 200, host
    with FakeServer(api_key=["sesame"]) as locked:
        assert (
            status(locked, "/is_sleeping", admin=True, Host="ops.example", Authorization="Bearer sesame")
            == 200
        )


@pytest.mark.parametrize(
    "folder", ["%00", "~nosuchuser/x", "/etc", "../../etc", "a/../../b", "x" * 60_000, "a%0Ab"]
)
def test_traces_are_written_below_their_folder_alone(folder, server):
    code, body = server.json(f"/start_profile?folder={folder}", b"", admin=True)
    assert code == 400 and body["error"]["param"] == "folder" and "--profile-dir" in body["error"]["message"]


def test_a_folder_below_is_taken(server):
    assert status(server, "/start_profile?folder=today/one", b"", admin=True) == 200
    assert server.json("/stop_profile", b"", admin=True)[1] == {
        "files": ["traces/today/one/fake.trace.json.gz"]
    }
    assert status(server, "/start_profile", b"", admin=True) == 200
    assert server.json("/stop_profile", b"", admin=True)[1] == {"files": ["traces/fake.trace.json.gz"]}


@pytest.mark.parametrize("host", ["[x", "[x]", "[::1"])
def test_a_host_that_is_half_an_address_is_a_borrowed_name(host, server):
    assert status(server, "/is_sleeping", admin=True, Host=host) == 403


@pytest.mark.parametrize("name", ["Access-Control-Request-Method", "Access-Control-Request-Headers"])
def test_a_preflight_in_letters_beyond_ascii_is_refused(name):
    asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "GET", name: "x-\xe9"}
    lines = "".join(f"{key}: {value}\r\n" for key, value in asked.items())
    with FakeServer(allowed_origins=["*"]) as server:
        head = f"OPTIONS /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{lines}\r\n"
        answer = read_until(server.raw(head.encode("latin-1")))
    assert answer.startswith(b"HTTP/1.1 400 ") and b"ASCII" in answer
