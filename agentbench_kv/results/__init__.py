"""Run store, statistics, verdicts, tables and the report site.

Import from the modules: this package imports nothing, so that adapters can use
`results.records` without loading pandas or scipy. Where to find what:

writing a run
    `records` (of a trial and of a turn), `store` (the run's folder), `run_names`, `run_info` (its
    `run.json`), `files`, `lines` (files of a record a line), `objects` (what many processes share).
reading runs
    `run_reader` (one run's records), `summary` (its figures), `validity` (whether they count),
    `notes` (what else to know), `runs` (runs and groups of them as everybody reads them), `frame`
    (`load_results`), `export`, `trackers`, `index` (`ls runs`), `show` with `timeline` and
    `transcripts`, `terminal`.
statistics
    `stats`, `curves` (over budgets).
comparing
    `compare` (two sides) of `contrast` (rows) by `gate` (verdicts), with `drift`;
    `compare_text`, `baseline` (where the sides come from); `engines` (one run on several),
    `fidelity` (arms of forced sessions).
showing
    `ranking` (who is compared with whom), `tables` and `papers` (`report`, published figures),
    `site` (`report --html`), `submissions` (a leaderboard's).
"""
