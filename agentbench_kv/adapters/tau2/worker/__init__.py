"""What runs in the tau2 environment, which has nothing of ours but `adapters/agent_client.py`."""
