"""Soak test of the server: many requests, several at a time, random lengths, clients that leave, on a tiny model.

Run: ``tools/dev.sh run python -m benchmarks.serve_soak`` (a few minutes; loopback only; stops by itself).

Two phases. *compressed*: kivi with 4 bits and windows of 32 tokens, no prompt cache (what is reused changes where the
chunks of a prompt end, and with a quantiser that may change an answer). *reuse*: the same with windows that keep every
row, and prompts that share beginnings, so that reuse must not change anything. Every answer that came, whole or in
part, must be what one sequence alone gives; memory after a fifth of the requests must not grow until the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil

from benchmarks.common import save, show
from tests.serve.served import Alone, figures_at, make_folder, text
from veloxquant_mlx import KVCacheConfig

WORKERS = 8
SECONDS = 60.0  # most for one request
KINDS = ("whole", "stream", "leave a stream", "leave unanswered")
SHARES = (0.4, 0.35, 0.15, 0.1)
PHASES: dict[str, dict[str, Any]] = {
    "compressed": {"bit_width_inlier": 4, "kivi_group_size": 32, "residual_length": 32},
    "reuse": {"bit_width_inlier": 4, "kivi_group_size": 32, "residual_length": 512},
}


@dataclass(frozen=True)
class Request:
    prompt: str
    max_tokens: int
    kind: str
    read: int  # pieces of a stream to read before leaving it


def requests(count: int, longest: int, seed: int, shared: bool) -> list[Request]:
    """Random requests; ``shared``: prompts begin with one of four texts."""
    draw = np.random.default_rng(seed)
    heads = [text(40, seed=s) for s in range(4)]
    made = []
    for i in range(count):
        own = text(int(draw.integers(1, longest)), seed=1000 + i)
        prompt = f"{heads[int(draw.integers(4))]} {own}" if shared else own
        kind = str(draw.choice(KINDS, p=SHARES))
        made.append(Request(prompt, int(draw.integers(1, 24)), kind, int(draw.integers(1, 6))))
    return made


@contextmanager
def served(folder: Path, fields: dict[str, Any], prompt_cache: int) -> Iterator[tuple[str, int]]:
    """The real command in a process of its own: URL and process id."""
    words = [sys.executable, "-c", "from veloxquant_mlx.cli import app; app()", "serve", "--model", str(folder)]
    words += ["--port", "0", "--method", "kivi", "--prompt-cache-size", str(prompt_cache)]
    words += [word for name, value in fields.items() for word in ("--option", f"{name}={value}")]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = next((m[1] for line in process.stderr if (m := re.search(r"(http://\S+) serves", line))), None)
        if url is None:
            raise RuntimeError("the server did not start")
        log: Counter[str] = Counter()

        def read(lines: Any) -> None:
            for line in lines:
                log[line.split(" ")[2] if line[:2] == "20" else "OTHER"] += 1

        reader = threading.Thread(target=read, args=(process.stderr,))
        reader.start()
        try:
            yield url, process.pid
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()  # or the reader would wait for ever
                raise
            finally:
                reader.join()
    if process.returncode or log["ERROR"] or log["OTHER"]:
        raise RuntimeError(f"the server ended with {process.returncode}; lines of its log: {dict(log)}")


def ask(url: str, request: Request) -> str | None:
    """The text of the answer, or as much of it as was read; None for a client that leaves without reading."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=SECONDS)
    leaves = request.kind.startswith("leave")
    # Those who leave ask for more than they will read, so that there is something left to stop.
    body = {"prompt": request.prompt, "max_tokens": 400 if leaves else request.max_tokens}
    try:
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": "stream" in request.kind}))
        if request.kind == "leave unanswered":
            return None
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.read()[:200]!r}")
        if request.kind == "whole":
            return json.loads(answer.read())["choices"][0]["text"]
        pieces = []
        for line in answer:
            if line.startswith(b"data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
                if leaves and len(pieces) == request.read:
                    break
        return "".join(pieces)
    finally:
        connection.close()


def soak(folder: Path, phase: str, count: int, longest: int = 160, seed: int = 0) -> dict[str, Any]:
    """Send ``count`` requests, compare all answers, and say what was found. Raises at the first failed request."""
    fields, shared = PHASES[phase], phase == "reuse"
    wanted = requests(count, longest, seed, shared)
    warm, found = count // 5, {}
    with served(folder, fields, 10 if shared else 0) as (url, pid), ThreadPoolExecutor(WORKERS) as pool:
        process, begun = psutil.Process(pid), time.perf_counter()
        answers: list[str | None] = []
        memory = []
        for part in (wanted[:warm], *(wanted[i : i + warm] for i in range(warm, count, warm))):
            answers += list(pool.map(lambda request: ask(url, request), part, timeout=count * SECONDS))
            found = quiet(url)
            memory.append((process.memory_info().rss, at_rest(url)))
        seconds = time.perf_counter() - begun
    alone = Alone(folder, KVCacheConfig(method="kivi", **fields))
    compared = different = 0
    for request, answer in zip(wanted, answers, strict=True):
        if answer is not None:
            compared += 1
            most = len(answer.split()) if request.kind == "leave a stream" else request.max_tokens
            different += alone.complete(request.prompt, max(1, most)).strip() != answer.strip()
    gone = found['requests_total{outcome="disconnected"}']
    return {
        "phase": phase,
        "requests": count,
        "at a time": WORKERS,
        "answers compared": compared,
        "different": different,
        "failed": int(found['requests_total{outcome="failed"}'] + found['requests_total{outcome="refused"}']),
        "clients gone": int(gone),
        "tokens generated": int(found['tokens_total{kind="generated"}']),
        "prompt tokens reused": int(found['tokens_total{kind="prompt_cached"}']),
        "live bytes at end": int(found["live_cache_bytes"]),
        "prompt cache B": int(found["prompt_cache_bytes"]),
        "array growth B": int(memory[-1][1] - memory[0][1]),
        "RSS warm MiB": memory[0][0] / 2**20,
        "RSS end MiB": memory[-1][0] / 2**20,
        "seconds": seconds,
    }


def faults(row: dict[str, Any]) -> list[str]:
    """What is wrong with a phase.

    An idle server holds its weights and the prompt cache. Stored caches that began as copies of each other share
    arrays, and shortened ones may keep the rows that they no longer count: a quarter of their size is allowed for it.
    """
    grown = row["RSS end MiB"] - row["RSS warm MiB"]
    allowed = 2**16 + row["prompt cache B"] // 4
    found = {
        f"{row['different']} answers differ": row["different"] > 0,
        f"{row['failed']} requests failed": row["failed"] > 0,
        f"{row['live bytes at end']} bytes of live caches left": row["live bytes at end"] > 0,
        f"arrays grew by {row['array growth B']} bytes": row["array growth B"] > allowed,
        f"the process grew by {grown:.1f} MiB": grown > 16,
    }
    return [fault for fault, wrong in found.items() if wrong]


def quiet(url: str, seconds: float = 20.0) -> dict[str, float]:
    """The figures of the server once it has nothing left to do."""
    until = time.monotonic() + seconds
    while (found := figures_at(url))["requests_running"] or found["live_cache_bytes"]:
        if time.monotonic() > until:
            raise RuntimeError(f"requests that clients have left go on: {found}")
        time.sleep(0.05)
    return found


def at_rest(url: str) -> float:
    """Bytes of arrays that are not the prompt cache's: the least of some readings, as a last step may still compute."""
    readings = []
    for _ in range(5):
        found = figures_at(url)
        readings.append(found["mlx_active_memory_bytes"] - found["prompt_cache_bytes"])
        time.sleep(0.05)
    return min(readings)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1000, help="requests of the first phase")
    count = parser.parse_args().requests
    with tempfile.TemporaryDirectory() as place:
        folder = make_folder(Path(place) / "tiny")
        rows = [soak(folder, "compressed", count), soak(folder, "reuse", max(10, count // 3))]
    show("serve_soak: a tiny qwen3 (2 layers), kivi 4 bits; prompts of 1 to 200 tokens, answers of 1 to 24", rows)
    save("serve_soak", {"workers": WORKERS, "kinds": dict(zip(KINDS, SHARES, strict=True)), "phases": PHASES}, rows)
    if any(faults(row) for row in rows):
        sys.exit("; ".join(fault for row in rows for fault in faults(row)))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
