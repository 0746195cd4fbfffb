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
    arms), `curve_shape` and `curves` (over budgets), `aa` (A/A).
comparing
    `compare` (two sides) of `contrast` (rows) by `gate` (verdicts), with `drift` and `flips`;
    `compare_text`, `plan`, `sources`, `baseline`; `engines` (one run on several).
showing
    `tables/` and `papers` (`report`, published figures), `site/` (`report --html`), `submissions`.
"""
