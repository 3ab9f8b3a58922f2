"""Secrets: what is written down or shown has none of them, by name or by looks, wherever they stand."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.core.secrets import mask, mask_arguments, mask_text

KEY = "hf_" + "a1B2" * 6


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("s3://me:hunter2@host/x", "s3://me:***@host/x"),
        ("https://hunter2@host/x", "https://***@host/x"),
        ("https://host/x?token=hunter2&page=2", "https://host/x?token=***&page=2"),
        ("Authorization: Bearer hunter2hunter2", "Authorization: Bearer ***"),
        (f"uploaded with {KEY} at step 3", "uploaded with *** at step 3"),
        ("s3://bucket/max_tokens=512/step=3", "s3://bucket/max_tokens=512/step=3"),
    ],
)
def test_text_is_masked_only_at_its_secret(text: str, masked: str) -> None:
    assert mask_text(text) == masked


@pytest.mark.parametrize(
    ("words", "masked"),
    [
        (["--api-key", "hunter2", "--lr", "1"], ["--api-key", "***", "--lr", "1"]),
        (["--password=hunter2"], ["--password=***"]),
        (["--token", "--verbose"], ["--token", "--verbose"]),
    ],
)
def test_secret_option_keeps_only_its_name(words: list[str], masked: list[str]) -> None:
    assert mask_arguments(words) == masked


def test_settings_are_masked_by_their_names_at_any_depth() -> None:
    settings: dict[str, Any] = {"store": {"secret_key": "hunter2", "more": [("password", "x"), {"auth": "hunter2"}]}}
    found = mask(settings | {"epochs": 3, "tokenizer": "bpe"})
    assert "hunter2" not in str(found)
    assert (found["epochs"], found["tokenizer"]) == (3, "bpe")
