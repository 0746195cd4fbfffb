"""What runs in the bfcl environment, which has nothing of ours but `adapters/agent_client.py`."""
