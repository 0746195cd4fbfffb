"""Berkeley Function-Calling Leaderboard, run in an environment of its own."""
