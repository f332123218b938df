"""What a run reports: rows of numbers, the executors' timeline, the live view, the picture at the end, and the stall watchdog."""
