"""Run store, statistics, verdicts, tables and the report site.

Import from the modules: this package imports nothing, so that adapters can use `records` without
loading pandas or scipy. A run is written by `store` as `records`, read as one by `runs` with the
figures of `summary`, and all runs together as a table of trials by `frame`. `stats` is the only
place for statistics; `ranking` says who leads, `compare` and `gate` who got worse.
"""
