"""Command lines that are nearly right: a setting written as an option, a script without --script."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Any

from typer.core import TyperCommand

from distributed.core.config import DistributedConfig
from distributed.core.errors import ConfigError, Problem
from distributed.core.registry import initials


class ScriptCommand(TyperCommand):
    """A command that runs a script with settings."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {option for parameter in self.params for option in (*parameter.opts, *parameter.secondary_opts)}
        if problems := misplaced(args, known, self.name or ""):
            raise ConfigError(problems)
        return super().parse_args(ctx, args)


def misplaced(words: Sequence[str], options: Collection[str], verb: str) -> list[Problem]:
    """
    >>> [problem.do for problem in misplaced(["train.py"], {"--script"}, "train")]
    ['distributed train --script train.py']
    >>> [problem.do for problem in misplaced(["--script", "a.py", "--epochs", "3"], {"--script"}, "train")]
    ['write the setting epochs=3; or for the script: -- --epochs 3']
    >>> [problem.do for problem in misplaced(["--script", "a.py", "--data", "/d"], {"--script"}, "train")]
    ['for the script: -- --data /d']
    >>> [problem.do for problem in misplaced(["-m", "a.train", "-b", "64"], {"--script", "-m"}, "train")]
    ['for the script: -- -b 64']
    """
    found: list[Problem] = []
    values = {place + 1 for place, word in enumerate(words) if word.startswith("--") and "=" not in word}
    free = (word for place, word in enumerate(words) if place not in values and "=" not in word)
    script = next((word for word in free if word.endswith(".py")), None)
    named = ("--script", "--module", "-m", "--help")
    if script is not None and not any(word.partition("=")[0] in named for word in words):
        found.append(Problem("--script is missing", do=f"distributed {verb} --script {script}"))
    for place, word in enumerate(words):
        option, equals, value = word.partition("=")
        is_short = option.startswith("-") and option[1:2].isalpha() and option[:2] not in options
        if not (is_short or option.startswith("--")) or option in options or option in ("--help", "-h"):
            continue
        name = None if is_short else _setting(option.removeprefix("--").replace("-", "_"))
        if not equals and place + 1 < len(words) and not words[place + 1].startswith("-"):
            value, word = words[place + 1], f"{word} {words[place + 1]}"
        if name is not None:
            why, do = "settings are written without dashes", f"write the setting {name}={value or 'VALUE'}; or "
        else:
            why, do = "the options of the script follow after a --", _nearest_option(option, options)
        found.append(Problem(f"there is no option {option}", why=why, do=f"{do}for the script: -- {word}"))
    return found


def _nearest_option(option: str, options: Collection[str]) -> str:
    close = get_close_matches(option, [known for known in options if known.startswith("--")], cutoff=0.75)
    return f"did you mean {' or '.join(close)}? Or " if close else ""


def _setting(name: str) -> str | None:
    """By its name, or by its initials."""
    settings = DistributedConfig.model_fields
    return name if name in settings else next((known for known in settings if initials(known) == name), None)
