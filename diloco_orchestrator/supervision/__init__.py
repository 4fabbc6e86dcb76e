"""Supervision: launches and relaunches replicas within budgets, stops runs, and deletes what retention allows."""
