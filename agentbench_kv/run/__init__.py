"""Running: what to run, one trial, all of them; playing sessions again; where figures come from."""
