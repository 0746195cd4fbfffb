"""Run store, statistics, verdicts, tables and the report site.

Import from the modules: this package imports nothing, so that adapters can use
`results.records` without loading pandas or scipy. Where to find what:

writing a run
    `records` (the two records), `rundir`, `runinfo`, `files`, `store`.
reading runs
    `reader` (one run), `summary` and `validity` (its figures and whether they count), `index` and
    `listing` (`ls runs`), `rows`, `columns`, `frame` and `places` (`load_results`), `export`,
    `views`, `render`, `timeline`, `transcripts`, `terminal` (`show`).
statistics
    `statistics` (one arm), `paired` (two arms), `passk`, `speed`, `resample` (one draw for all
    arms), `curve_shape` and `curves` (over budgets), `noise` (A/A).
comparing
    `arms` (runs as arms), `matching`, `drift`, `gap`, `paired_metrics`, `contrast`, `verdict`,
    `compare`, `compare_text`, `sources`, `baseline`, `baseline_views`.
showing
    `tables/` and `papers` (`report`, published figures), `site/` (`report --html`), `submissions`.
"""
