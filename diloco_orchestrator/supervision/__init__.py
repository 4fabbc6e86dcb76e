"""What keeps the replicas of a run alive: launches, relaunches, budgets, the end of a leg, retention."""
