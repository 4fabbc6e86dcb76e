"""Supervision: launches and relaunches replicas within budgets, ends legs, and deletes what retention allows."""
