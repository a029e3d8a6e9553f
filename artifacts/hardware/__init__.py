"""Machines by data sheet, machines as measured, and what a model costs on one."""

from artifacts.hardware.machines import MACHINES, Machine, machine

__all__ = ["MACHINES", "Machine", "machine"]
