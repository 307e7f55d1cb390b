"""Attacks on access: which requests are answered, and which information the answers reveal."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .clients import JSON, Answer, ask
from .figures import Figure
from .victims import PROGRAMS, Victim, serving, started

__all__ = ["failures", "pages", "probes", "redirects"]

FIELDS = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 1}
SECRET = "/srv/models/secret"
"""A path in the error of the forward, see programs/failing_server.py."""


def failures(tree: Path) -> Iterator[Figure]:
    """A forward fails with several requests in it."""
    attack = "a forward of 4 requests raises an error with a path"
    with started(tree, [str(PROGRAMS / "failing_server.py"), "--model", "tiny", "--port", "0"]) as victim:
        with ThreadPoolExecutor(4) as clients:
            waiting = [clients.submit(ask, victim.port, "/v1/completions", FIELDS) for _ in range(4)]
            answers = [each.result() for each in waiting]
    yield Figure("A5", attack, "clients that are told it, or of others", sum(map(_leaks, answers)), 0)
    yield Figure("A5", attack, "clients that are told of an error", sum(a.status == 500 for a in answers), 4, "", True)


def _leaks(answer: Answer) -> bool:
    return SECRET.encode() in answer.body or b"cmpl-" in answer.body


PAGES = (
    {"content-type": "text/plain"},
    {"content-type": "application/x-www-form-urlencoded"},
    {"content-type": "text/plain", "origin": "https://evil.example"},
    {**JSON, "origin": "https://evil.example"},
    {**JSON, "origin": "null"},
    {**JSON, "host": "evil.example"},
    {**JSON, "host": "127.0.0.1.evil.example:8000"},
    {**JSON, "host": "localhost@evil.example"},
    {**JSON, "host": "evil.example#127.0.0.1"},
)
"""What a browser can be made to send by a page that somebody on this machine looks at."""
OWN = ("127.0.0.1", "localhost:8000", "LOCALHOST", "localhost.", "[::1]:8000", "[::1]", "127.0.0.2")


def pages(tree: Path) -> Iterator[Figure]:
    """Web pages that somebody on this machine looks at, and clients without the key."""
    attack = f"{len(PAGES)} requests as foreign web pages can send them"
    with serving(tree) as victim:
        served = [ask(victim.port, "/v1/completions", FIELDS, headers).status == 200 for headers in PAGES]
        own = [ask(victim.port, "/v1/completions", FIELDS, {**JSON, "host": host}).status == 200 for host in OWN]
    yield Figure("A6", attack, "answered", sum(served), 0)
    yield Figure("A6", f"{len(OWN)} spellings of loopback", "answered", sum(own), len(OWN), "", True)
    with serving(tree, "--api-key=sesame") as victim:
        paths = ["/v1/models", "/v1/models/tiny", "/metrics", "//v1/models", "/v1/models?", "/health/../v1/models"]
        found = [ask(victim.port, path).status for path in paths]
        found += [ask(victim.port, "/v1/completions", FIELDS, {**JSON, **key}).status for key in KEYS]
    yield Figure("A6", f"{len(found)} requests without the key", "answered", sum(s not in (0, 401) for s in found), 0)
    with serving(tree, "--host=0.0.0.0") as victim:
        num_lines = len(victim.stderr_text.splitlines())
    yield Figure("A6", "--host 0.0.0.0 and no key", "lines of warning", num_lines, 1, "", True)


KEYS: tuple[dict[str, str], ...] = (
    {},
    {"authorization": "sesame"},
    {"authorization": "Basic sesame"},
    {"authorization": "Bearer sesam"},
    {"authorization": "Bearer sesame sesame"},
    {"authorization": "Bearer s\u00e9same"},
)


def redirects(tree: Path) -> Iterator[Figure]:
    """Paths with a slash too many, and the host of the client's choice."""
    with serving(tree) as victim:
        found = [_location(victim, path) for path in ("/v1/completions/", "/v1/chat/completions/", "/health/")]
    num_found = sum("evil" in location for location in found)
    yield Figure("A7", "a slash too many, Host: evil.example", "redirected there", num_found, 0)


def _location(victim: Victim, path: str) -> str:
    return ask(victim.port, path, FIELDS, {**JSON, "host": "evil.example"}).headers.get("location", "")


def probes(tree: Path) -> Iterator[Figure]:
    """Guesses at a prompt of somebody else, without a salt."""
    prompt = "The password of the lighthouse keeper is " + "open sesame, " * 20
    attack = "a prompt guessed without a salt, --require-salt"
    with serving(tree, "--require-salt") as victim:
        ask(victim.port, "/v1/completions", {**FIELDS, "prompt": prompt, "cache_salt": "tenant-a"})
        ask(victim.port, "/v1/completions", {**FIELDS, "prompt": prompt})
        guessed = ask(victim.port, "/v1/completions", {**FIELDS, "prompt": prompt})
        other = ask(victim.port, "/v1/completions", {**FIELDS, "prompt": prompt, "cache_salt": "tenant-b"})
    yield Figure("A8", attack, "tokens that are found", _cached(guessed), 0)
    yield Figure("A8", "the same under another salt", "tokens that are found", _cached(other), 0)


def _cached(answer: Answer) -> int:
    if answer.status != 200:
        return 0
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])
