"""Secrets: what is written down or shown has `***` where a password, token or key stood. Ranks get the real values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"

_WORDS = (
    "password|passwd|passphrase|pass|pwd|secret|token|credential|credentials|auth|authorization|apikey|api[-_]?key"
    "|access[-_]?key|secret[-_]?key|private[-_]?key|account[-_]?key|shared[-_]?key|key[-_]?id|signature|sig|sas"
)
_NAME = re.compile(rf"(?:.*[-_.])?(?:{_WORDS})", re.IGNORECASE)
_USERINFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<user>[^\s/?#@:'\"]*)(?P<password>:[^\s/?#'\"]*)?@")
_PAIR = re.compile(
    rf"(?P<name>(?<![A-Za-z0-9])(?:[A-Za-z0-9]+[-_.])*(?:{_WORDS}|(?<=[?&])key))=(?P<value>[^\s&;,'\"#]+)", re.I
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_KNOWN = re.compile(
    r"\b(?:(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|hf_[A-Za-z0-9]{20,}"
    r"|sk-[A-Za-z0-9_-]{20,}|xox[abprs]-[A-Za-z0-9-]{10,})"
)


def mask_text(text: str) -> str:
    """
    >>> mask_text("postgresql://me:pw@host/db?sslkey=a&password=b")
    'postgresql://me:***@host/db?sslkey=a&password=***'
    >>> mask_text("https://host/x?sig=abc&page=2"), mask_text("max_tokens=512, step=3")
    ('https://host/x?sig=***&page=2', 'max_tokens=512, step=3')
    """
    if "://" in text:
        text = _USERINFO.sub(_without_password, text)
    if "=" in text:
        text = _PAIR.sub(lambda found: f"{found['name']}={MASK}", text)
    if "Bearer " in text or "Basic " in text:
        text = _BEARER.sub(lambda found: f"{found[1]} {MASK}", text)
    return _KNOWN.sub(MASK, text)


def mask(value: Any, name: str = "") -> Any:
    """The same of plain data: texts that are secrets by their names or by their looks are masked, numbers stay.

    >>> mask({"uri": "s3://me:pw@host", "api_key": "abc", "epochs": 3, "more": ["--token", "x"]})
    {'uri': 's3://me:***@host', 'api_key': '***', 'epochs': 3, 'more': ['--token', '***']}
    """
    if isinstance(value, str):
        return MASK if value and is_secret(name) else mask_text(value)
    if isinstance(value, Mapping):
        return {key: mask(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        masked = _mask_words(value, name)
        return masked if isinstance(value, list) else tuple(masked)
    return value


def mask_arguments(words: Sequence[str]) -> list[str]:
    """Of a command line.

    >>> mask_arguments(["train.py", "--api-key", "abc", "--token=x", "--lr", "1"])
    ['train.py', '--api-key', '***', '--token=***', '--lr', '1']
    """
    return list(_mask_words(words, ""))


def is_secret(name: str) -> bool:
    """
    >>> is_secret("AWS_SECRET_ACCESS_KEY"), is_secret("hf-token"), is_secret("tokenizer"), is_secret("key")
    (True, True, False, False)
    """
    return bool(_NAME.fullmatch(name))


def _mask_words(words: Sequence[Any], name: str) -> list[Any]:
    found: list[Any] = []
    for word in words:
        before = found[-1] if found and isinstance(found[-1], str) else ""
        is_value = isinstance(word, str) and before.startswith("-") and is_secret(before.lstrip("-"))
        found.append(MASK if is_value and not word.startswith("--") else mask(word, name))
    return found


def _without_password(found: re.Match[str]) -> str:
    scheme, user, password = found["scheme"], found["user"], found["password"]
    if password is not None:
        return f"{scheme}{user}:{MASK}@"
    is_token = scheme.lower() in ("http://", "https://") and user  # a token may stand where a user's name does
    return f"{scheme}{MASK}@" if is_token else found[0]
