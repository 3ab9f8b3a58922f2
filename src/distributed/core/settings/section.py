"""What every section of the settings has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class SettingsSection(BaseModel):
    """Some of the settings, each checked by itself."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False, protected_namespaces=())
