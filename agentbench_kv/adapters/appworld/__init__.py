"""AppWorld: tasks in nine everyday apps, scored by tests of the final state."""
