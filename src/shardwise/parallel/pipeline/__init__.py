"""Pipeline parallelism: executes the action lists of `spec/schedules.py`."""
