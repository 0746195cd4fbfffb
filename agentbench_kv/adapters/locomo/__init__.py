"""LoCoMo: questions about long conversations; the data (CC BY-NC 4.0) is the user's, not ours."""
