"""What a request body must look like. mlx_lm takes much on trust and fails later, in the thread that serves all."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any, NoReturn

from ..core.exceptions import VeloxError

INT_MAX = 2**31 - 1
# Smaller temperatures overflow when logits are divided by them; what they mean is the most likely token.
COLDEST = 1e-5
# name -> (type, least, most)
NUMBERS: dict[str, tuple[type, float, float]] = {
    "max_tokens": (int, 1, INT_MAX),
    "max_completion_tokens": (int, 1, INT_MAX),
    "n": (int, 1, 1),
    "seed": (int, 0, 2**64 - 1),
    "temperature": (float, 0, 100),
    "top_p": (float, 0, 1),
    "min_p": (float, 0, 1),
    "top_k": (int, 0, INT_MAX),
    "top_logprobs": (int, 0, 11),
    "num_draft_tokens": (int, 0, 64),
    "xtc_probability": (float, 0, 1),
    "xtc_threshold": (float, 0, 0.5),
    "repetition_penalty": (float, 0, 100),
    "presence_penalty": (float, -100, 100),
    "frequency_penalty": (float, -100, 100),
    **dict.fromkeys([f"{kind}_context_size" for kind in ("repetition", "presence", "frequency")], (int, 0, INT_MAX)),
}
MOST_STOPS = 16


class RequestError(VeloxError):
    """A request that cannot be served; ``status`` is the HTTP status to answer."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


def checked(raw: bytes, chat: bool, models: Collection[str], images: bool) -> bytes:
    """The body of a completion request as mlx_lm may have it; RequestError for one that it cannot serve.

    ``chat`` says which of the two kinds of request it is, ``models`` the names under which the model is known,
    ``images`` whether it can see. ``null`` is the same as a missing field.
    """
    body = {name: value for name, value in _parse(raw).items() if value is not None}
    for name, (kind, least, most) in NUMBERS.items():
        if name in body:
            body[name] = _number(name, body[name], kind, least, most)
    if body.get("temperature", 1.0) < COLDEST:
        body["temperature"] = 0.0
    for name in ("stream", "logprobs"):
        _need(isinstance(body.get(name, False), bool), f"{name} must be true or false")
    _model(body, models)
    _stops(body)
    _stream_options(body)
    _logit_bias(body)
    if chat:
        _messages(body, images)
        _template(body)
    else:
        _prompt(body)
    return json.dumps(body).encode()


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_no_number, parse_float=_finite)
        json.dumps(body, ensure_ascii=False).encode("utf-8")  # half of a surrogate pair is no text
    except RecursionError:
        raise RequestError("the request body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the request body is no JSON text in UTF-8: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the request body must be a JSON object")
    return body


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError("a number is too large")
    return value


def _need(right: bool, message: str) -> None:
    if not right:
        raise RequestError(message)


def _number(name: str, value: Any, kind: type, least: float, most: float) -> Any:
    number = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    valid = f"only {least}" if least == most else f"{least} to {most}"
    _need(number and least <= value <= most, f"{name} must be {kind.__name__}; valid: {valid}")
    return kind(value)


def _model(body: dict[str, Any], models: Collection[str]) -> None:
    name = body.get("model", "default_model")
    _need(isinstance(name, str), "model must be a string")
    if name not in models:
        raise RequestError(f"model {name[:200]!r} is not served here; served: {', '.join(sorted(models))}", 404)
    fixed = "belongs to the server's command line, not to a request"
    _need("adapters" not in body, f"adapters {fixed}: --adapter-path")
    _need(body.get("draft_model", "default_model") == "default_model", f"draft_model {fixed}: --draft-model")


def _stops(body: dict[str, Any]) -> None:
    stops = body.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    right = isinstance(stops, list) and len(stops) <= MOST_STOPS and all(isinstance(s, str) and s for s in stops)
    _need(right, f"stop must be a string, or a list of at most {MOST_STOPS}, none of them empty")
    body["stop"] = stops


def _stream_options(body: dict[str, Any]) -> None:
    if "stream_options" in body:
        options = body["stream_options"]
        _need(isinstance(options, dict), "stream_options must be an object")
        usage = options.get("include_usage") or False
        _need(isinstance(usage, bool), "stream_options.include_usage must be true or false")
        body["stream_options"] = {"include_usage": usage}


def _logit_bias(body: dict[str, Any]) -> None:
    bias = body.get("logit_bias", {})
    _need(isinstance(bias, dict), "logit_bias must be an object: token id to number")
    for token, value in bias.items():
        _need(token.isascii() and token.isdigit() and len(token) < 10, "a key of logit_bias must be a token id")
        _number(f"logit_bias[{token}]", value, float, -1e4, 1e4)


def _prompt(body: dict[str, Any]) -> None:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    _need(isinstance(prompt, str) and bool(prompt), "prompt must be a string that is not empty; lists are not served")
    body["prompt"] = prompt


def _messages(body: dict[str, Any], images: bool) -> None:
    messages = body.get("messages")
    _need(isinstance(messages, list) and bool(messages), "messages must be a list that is not empty")
    assert isinstance(messages, list)
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        _need(isinstance(message, dict), f"{at} must be an object")
        _need(isinstance(message.get("role"), str), f"{at}.role must be a string")
        content = message.get("content")
        _need(content is None or isinstance(content, (str, list)), f"{at}.content must be a string or a list of parts")
        for part in content if isinstance(content, list) else []:
            _need(isinstance(part, dict), f"{at}.content: every part must be an object")
            if part.get("type") == "text":
                _need(isinstance(part.get("text"), str), f"{at}.content: a text part needs text, a string")
            else:
                _need(images, f"{at}.content: this model takes text parts only")
        _tool_calls(message.get("tool_calls"), f"{at}.tool_calls")


def _tool_calls(calls: Any, at: str) -> None:
    if calls is None:
        return
    _need(isinstance(calls, list) and all(isinstance(call, dict) for call in calls), f"{at} must be a list of objects")
    for call in calls:
        function = call.get("function")
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        _need(named, f"{at}: every call needs a function with a name")


def _template(body: dict[str, Any]) -> None:
    tools = body.get("tools", [])
    right = isinstance(tools, list) and all(
        isinstance(t, dict) and isinstance(t.get("function"), dict) and isinstance(t["function"].get("name"), str)
        for t in tools
    )
    _need(right, "tools must be a list of objects, each with a function that has a name")
    for name in ("role_mapping", "chat_template_kwargs"):
        _need(isinstance(body.get(name, {}), dict), f"{name} must be an object")
    fixed = "chat_template belongs to the server's command line, not to a request: --chat-template"
    _need("chat_template" not in body.get("chat_template_kwargs", {}), fixed)
