"""Events that wait until the device has enough to do are told in their order, and none is lost."""

from __future__ import annotations

from typing import Any, cast

from distributed.core.events import Event, Warned
from distributed.train.run_events import RunEvents


class Heard:
    def __init__(self) -> None:
        self.messages: list[str] = []

    def on(self, event: Event) -> None:
        assert isinstance(event, Warned)
        self.messages.append(event.message)


def test_deferred_events_are_emitted_in_order() -> None:
    heard = Heard()
    telling = RunEvents(cast(Any, None), heard)
    telling.tell_later(Warned(time=0.0, message="first"))
    telling.tell_later(Warned(time=0.0, message="second"))
    assert heard.messages == []
    telling.warn("third")
    assert heard.messages == ["first", "second", "third"]
    telling.tell_later(Warned(time=0.0, message="fourth"))
    telling.catch_up()
    telling.catch_up()
    assert heard.messages[3:] == ["fourth"]
