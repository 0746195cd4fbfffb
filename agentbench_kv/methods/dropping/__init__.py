"""Dropping whole messages: a policy decides what leaves, an execution how it leaves."""
