"""Which planner a kernel needs; those that need optional packages are imported when asked for."""

from __future__ import annotations

from pageant.plan.build import Planner
from pageant.plan.host_plan import HostPlanner
from pageant.select.row import Row


def planner_of(row: Row) -> type[Planner]:
    """What plans for a decode kernel: on its device, if that is where it looks for its work."""
    if row.owner == "flashinfer":
        return HostPlanner
    if not row.is_planned_on_device:
        if row.owner == "reference":
            return Planner
        from pageant.plan.compiled_plan import CompiledPlanner  # only here is numba needed

        return CompiledPlanner
    from pageant.plan.device_groups import SharingPlanner  # only here is Triton needed

    return SharingPlanner
