"""Why a plan is as it is: from the plan file alone, by the cost model that made it."""
