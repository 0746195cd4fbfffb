"""Run store, statistics, verdicts, tables and the report site.

Import from the modules: this package imports nothing, so that adapters can use
`results.records` without loading pandas or scipy. Where to find what:

writing a run
    `records` (the two records), `rundir`, `runinfo`, `files`, `store`.
reading runs
    `reader` and `lines` (one run), `summary` and `validity` (its figures and whether they count),
    `runs` (a run as everybody reads it), `index` and `listing` (`ls runs`), `columns`, `frame` and
    `places` (`load_results`), `export`, `card` and `trackers`, `views`, `render`, `timeline`,
    `transcripts` and `terminal` (`show`).
statistics
    `stats`, `curves` (over budgets), `aa` (A/A).
comparing
    `compare` (two sides) of `contrast` (rows) by `gate` (verdicts), with `drift` and `flips`;
    `compare_text`, `plan`, `sources`, `baseline`; `engines` (one run on several).
showing
    `groups` and `ranking` (who is compared with whom), `tables` and `papers` (`report`, published
    figures), `site` (`report --html`), `submissions` (a leaderboard's), `serving` (under load).
"""
