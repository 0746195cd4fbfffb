"""The micro tasks: procedurally generated tool-use episodes for the embedded micro model.

Everything here is text: episodes, the simulated tools and the score know neither tokens nor torch.
"""
