"""The micro model: its tokenizer, data, training and check."""
