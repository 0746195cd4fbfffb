"""Run store, statistics, validity and tables.

Import from the modules: this package imports nothing, so that adapters can use
`results.records` without loading pandas or scipy.
"""
