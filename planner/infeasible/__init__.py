"""Why a job has no plan, and the smallest changes after which it has one."""

from planner.infeasible.explain import NoPlanError, no_crew, unreachable_batch, with_cures

__all__ = ["NoPlanError", "no_crew", "unreachable_batch", "with_cures"]
