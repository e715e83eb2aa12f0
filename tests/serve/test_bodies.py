"""Whatever a client sends, it gets a 4xx with a reason, and the next request is answered."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest

from veloxquant_mlx.serve import Server
from veloxquant_mlx.serve.handler import Handler

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "w5 w6"}]


def post(server: Server, path: str, body: bytes) -> tuple[int, Any]:
    """Status and JSON of one request."""
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text)


def send(server: Server, raw: bytes, more: bool = False) -> bytes:
    """The whole answer to ``raw``; ``more`` keeps our side open as if more were to come."""
    host, _, port = urlsplit(server.url).netloc.partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(raw)
        if not more:
            connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.fixture(autouse=True)
def lives_on(server: Server) -> Iterator[None]:
    yield
    status, answer = post(server, TEXT, b'{"prompt": "w1 w2 w3", "max_tokens": 2}')
    assert status == 200 and answer["usage"]["completion_tokens"] == 2


# Words of the reason -> bodies.
RAW: dict[str, list[bytes]] = {
    "no JSON": [
        b"",
        b"{",
        b"no",
        b'{"prompt": "\xff\xfe"}',
        b'\xef\xbb\xbf{"prompt": "w1"}',
        b'{"prompt": "w1", "temperature": NaN}',
        b'{"prompt": "w1", "temperature": -Infinity}',
        b'{"prompt": "w1", "temperature": 1e999}',
        b'{"prompt": "w1", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "w1", "stop": "\\udfff"}',
        '{"prompt": "w1"}'.encode("utf-16"),
    ],
    "nested too deeply": [b"[" * 200_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000],
    "JSON object": [b"[]", b"1", b"null", b'"text"', b"true"],
}


@pytest.mark.parametrize(("words", "raw"), [(words, raw) for words, raws in RAW.items() for raw in raws])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_what_is_no_json_object(server: Server, path: str, words: str, raw: bytes) -> None:
    status, answer = post(server, path, raw)
    assert status == 400
    assert words in answer["error"]["message"]


# Field -> values that it cannot have; each is tried in both kinds of request.
FIELDS: dict[str, list[Any]] = {
    "max_tokens": [-1, 0, 1.5, "7", True, [], {}, 10**30],
    "max_completion_tokens": [-1, "x"],
    "temperature": [-1, "hot", True, [1], 1e30],
    "top_p": [-0.1, 1.1, "x"],
    "min_p": [2, "x"],
    "top_k": [-1, 128, 10**12, 2.5, "x"],
    "seed": [-1, 2**64, 1.5, "x", True],
    "n": [0, 2, "x"],
    "top_logprobs": [-2, 12, "x"],
    "num_draft_tokens": [-1, 10**9, "x"],
    "xtc_probability": [2, "x"],
    "xtc_threshold": [0.7, "x"],
    "repetition_penalty": [-1, 1e300, "x"],
    "repetition_context_size": [-1, 1.5, 10**30],
    "presence_penalty": [1e300, "x", [1]],
    "frequency_penalty": [-1e300, {}],
    "stream": ["yes", 1, []],
    "stream_options": ["x", [], {"include_usage": "yes"}],
    "logprobs": [3, "x"],
    "logit_bias": ["x", [1], {"x": 1}, {"1": "x"}, {"1": []}, {"-1": 1}, {"128": 1}, {"9" * 5000: 1}, {"1": 1e300}],
    "stop": [5, [5], {}, "", [""], [["w1"]], ["w1"] * 17, " "],
    "model": [5, [], {}],
    "adapters": ["/etc", 5],
    "draft_model": ["other", 5],
}


@pytest.mark.parametrize(("field", "value"), [(name, value) for name, values in FIELDS.items() for value in values])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_field_of_the_wrong_type_or_size(server: Server, path: str, field: str, value: Any) -> None:
    rest = {"messages": USER} if path == CHAT else {"prompt": "w5 w6"}
    status, answer = post(server, path, json.dumps({"max_tokens": 2, **rest, field: value}).encode())
    assert status == 400
    assert field.partition("_tokens")[0] in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


PROMPTS = [{}, *({"prompt": p} for p in [None, "", "  ", 5, [], ["w1", "w2"], [1, 2], [[1, 2]], {}, True])]


@pytest.mark.parametrize("body", PROMPTS)
def test_a_wrong_prompt(server: Server, body: dict[str, Any]) -> None:
    status, answer = post(server, TEXT, json.dumps(body).encode())
    assert status == 400 and "prompt" in answer["error"]["message"]


CALL = {"role": "assistant", "content": None}
MESSAGES: list[Any] = [
    *(None, [], {}, "w1", 5, [5], ["w1"], [None], [{}], [{"role": 5, "content": "w1"}], [{"content": "w1"}]),
    *([{"role": "user", "content": content}] for content in (5, {}, True, [5], ["w1"], [{}], [{"type": "text"}])),
    [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}]}],
    [{"role": "nobody", "content": "w1"}],  # the template knows no such role
    *([{**CALL, "tool_calls": calls}] for calls in (5, [5], [{}], [{"function": 5}], [{"function": {"name": 5}}])),
    [{**CALL, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
]
AROUND = [
    *({"tools": tools} for tools in (5, [5], [{}], [{"type": "function"}], [{"function": {"name": 5}}])),
    *({"role_mapping": mapping} for mapping in (5, [])),
    *({"chat_template_kwargs": k} for k in (5, [], {"tokenize": False}, {"chat_template": "w1"}, {"tools": 1})),
]


@pytest.mark.parametrize(
    "body", [{}, *({"messages": m} for m in MESSAGES), *({"messages": USER, **a} for a in AROUND)], ids=str
)
def test_wrong_messages(server: Server, body: dict[str, Any]) -> None:
    status, answer = post(server, CHAT, json.dumps({"max_tokens": 2, **body}).encode())
    assert status == 400 and answer["error"]["message"]


def test_a_model_that_is_not_served(server: Server) -> None:
    status, answer = post(server, TEXT, b'{"prompt": "w1", "model": "another/model"}')
    assert status == 404 and "not served" in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/completions/x", "/other/completions"])
def test_another_path(server: Server, path: str) -> None:
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    connection.request("POST", path, b'{"prompt": "w1"}')
    assert connection.getresponse().status == 404
    connection.close()


BODY = b'{"prompt": "w1", "max_tokens": 2}'
HEADS: list[tuple[bytes, int, bool]] = [
    (b"", 411, False),
    (b"Transfer-Encoding: chunked\r\n", 411, False),
    *((b"Content-Length: %s\r\n" % n, 400, False) for n in (b"x", b"-5", b"+33", b"1_0", b"", b"9" * 5000, b"0x21")),
    (b"Content-Length: 20\r\n", 400, False),  # the text stops early
    (b"Content-Length: 5000\r\n", 400, False),  # the client stops sending
    (b"Content-Length: 5000\r\n", 408, True),  # the client sends nothing more
    (b"Content-Length: 99999999999\r\n", 413, False),
]


@pytest.mark.parametrize(("head", "status", "more"), HEADS)
def test_a_wrong_length(server: Server, head: bytes, status: int, more: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "timeout", 0.5)
    answer = send(server, b"POST /v1/completions HTTP/1.1\r\n" + head + b"\r\n" + BODY, more)
    assert answer.startswith(b"HTTP/1.0 %d " % status)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "HEAD"])
def test_another_method(server: Server, method: str) -> None:
    raw = f"{method} /v1/completions HTTP/1.1\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY
    assert send(server, raw).startswith(b"HTTP/1.0 405 ")


def test_no_http_at_all(server: Server) -> None:
    assert b"400" in send(server, b"\x16\x03\x01\x02\x00 hello\r\n\r\n")


def test_null_is_the_same_as_nothing(server: Server) -> None:
    names = [name for name in FIELDS if name != "max_tokens"]
    body = {"prompt": "w5 w6", "max_tokens": 2, **dict.fromkeys(names)}
    assert post(server, TEXT, json.dumps(body).encode())[0] == 200


ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**40, 1.5, -1e300, "", "w1", "\u0000", "é" * 50, [], {}, [None], ["w1"], [[]]),
    *({"a": 1}, {"1": 1}, USER, {"type": "text", "text": "w1"}, [{"function": {"name": "f"}}]),
]
NAMES = [*FIELDS, "prompt", "messages", "tools", "role_mapping", "chat_template_kwargs", "user", "response_format"]


@pytest.mark.parametrize("seed", range(4))
def test_random_bodies_never_fail_inside(server: Server, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        path, body = draw.choice([(TEXT, {"prompt": "w5 w6"}), (CHAT, {"messages": USER})])
        body = {**body, **{name: draw.choice(ODD) for name in draw.sample(NAMES, draw.randint(0, 3))}, "max_tokens": 2}
        connection = HTTPConnection(urlsplit(server.url).netloc, timeout=20)
        connection.request("POST", path, json.dumps(body))
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        assert answer.status in (200, 400, 404), (body, text)
        assert answer.status != 200 or b'"error"' not in text, (body, text)
