"""What runs in the next iteration. No torch."""

from penstock.engine.scheduling.scheduler import Scheduler

__all__ = ["Scheduler"]
