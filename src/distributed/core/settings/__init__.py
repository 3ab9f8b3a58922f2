"""Every setting of a run, in sections: its name, its values, its default, and what it means.

The sections are one flat `DistributedConfig`; docs/settings.md and the trainers' typed keywords are made from them.
"""

from __future__ import annotations

from distributed.core.settings.run import (
    BackendSettings,
    CheckpointSettings,
    DataSettings,
    MonitoringSettings,
    ResourceSettings,
    SurvivalSettings,
    TrainingSettings,
)
from distributed.core.settings.section import SettingsSection
from distributed.core.settings.step import (
    CommunicationSettings,
    MemorySettings,
    OptimizationSettings,
    ParallelismSettings,
    SpeedSettings,
)

SECTIONS: dict[str, type[SettingsSection]] = {
    "Resources": ResourceSettings,
    "Backend": BackendSettings,
    "Training": TrainingSettings,
    "Parallelism": ParallelismSettings,
    "Memory": MemorySettings,
    "Speed": SpeedSettings,
    "Optimization": OptimizationSettings,
    "Communication": CommunicationSettings,
    "Survival": SurvivalSettings,
    "Data": DataSettings,
    "Checkpoints": CheckpointSettings,
    "Monitoring": MonitoringSettings,
}
