"""Plans what runs in each iteration. No torch."""

from penstock.engine.scheduling.scheduler import Scheduler

__all__ = ["Scheduler"]
