"""The small server: what it answers, and what it answers to requests that it should refuse."""
import http.client
import json
import socket
import threading

import pytest

from bridges import serve
from conftest import ROOT


class Handler(serve.Handler):
    """With a model of its own, and a patience that a test can change."""


@pytest.fixture(scope="module")
def server():
    Handler.sampler = serve.Sampler(ROOT / "models/tiny")
    server = serve.Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


GOOD = {"prompt": [5, 6, 7], "stop_token_ids": [2], "n": 2, "max_tokens": 4, "seed": 3,
        "temperature": 1.0}
JSON = {"Content-Type": "application/json"}


def ask(server, body: str, path="/v1/completions", method="POST", **headers):
    """Status and content of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, JSON | names)
    response = connection.getresponse()
    content = json.loads(response.read())
    connection.close()
    return response.status, content


def answers_well(server) -> bool:
    status, content = ask(server, json.dumps(GOOD))
    return status == 200 and len(content["choices"]) == 2


def changed(**fields) -> str:
    return json.dumps(GOOD | fields)


@pytest.mark.parametrize("request_of, status, words", [
    (dict(body=changed(), Host="evil.example"), 403, "the Host should be 127.0.0.1 or localhost"),
    (dict(body=changed(), Host="localhost.evil.example:8000"), 403, "the Host should be"),
    (dict(body=changed(), Origin="null"), 403, "requests of web pages"),
    (dict(body=None, method="GET", path="/v1/models", Host="evil.example"), 403, "the Host"),
    (dict(body=changed(), Content_Type="text/plain"), 403, "should be application/json"),
    (dict(body="{}", path="/elsewhere"), 400, "/elsewhere"),
    (dict(body="[1]"), 400, "the body should hold a JSON object"),
    (dict(body="\xff"), 400, "UnicodeDecodeError"),
    (dict(body=changed(prompt=[10 ** 6])), 400, "index out of range"),
    (dict(body=changed(prompt="3 * 5")), 400, "str"),
    (dict(body=changed(max_tokens=900_000)), 400, "the model takes 1024"),
    (dict(body="{}", path="/collective_rpc"), 400, "method"),
    (dict(body=json.dumps({"method": "reload_weights", "kwargs": {"weights_path": "nowhere"}}),
          path="/collective_rpc"), 400, "there is no model folder nowhere")])
def test_a_bad_request_gets_a_reason_and_the_next_one_an_answer(server, request_of, status, words):
    got, content = ask(server, **request_of)
    assert got == status and words in content["error"]
    assert answers_well(server)


def test_a_silent_client_is_given_up(server, monkeypatch):
    assert Handler.timeout <= 60  # nobody waits for that here
    monkeypatch.setattr(Handler, "timeout", 0.5)
    begun = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
        connection.sendall(begun)
        assert connection.makefile("rb").read()[:13] == b"HTTP/1.0 400 "
    assert answers_well(server)
