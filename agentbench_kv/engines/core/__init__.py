"""What engines that compress share: a session's accounting, its rows, kept queries, spans.

Imported inside serving engines' interpreters too: torch and the methods only.
"""
