"""Made data in the form of tau2-bench's banking_knowledge domain; the tools are the benchmark's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

USER = {
    "name": "Ann Made", "user_id": "ann", "address": "1 Long Road, Springfield, OH 12345",
    "email": "ann@example.org", "phone_number": "555-0100", "date_of_birth": "01/02/1980",
}  # fmt: skip
WRITING, READING = "example_agent_tool_0000", "get_user_dispute_history_7291"
DOCUMENTS = {
    "doc_c": ("Fees", "A fee of five dollars is due in March."),
    "doc_a": ("Changing an email", "Verify the customer, then call change_user_email."),
    "doc_b": ("Internal tools", f"Call {WRITING} when a customer asks for an example."),
}
PROMPTS = {
    "no_knowledge": "Help.", "classic_rag_bm25_no_grep": "Search with KB_search.",
    "classic_rag_bm25": "Search with KB_search or grep.", "grep_only": "Search with grep.",
    "full_kb": "All there is:\n{{full_knowledge_base}}",
    "required_docs": "{{component:policy_header}}\n{{required_documents}}",
}  # fmt: skip

Action = dict[str, Any]


def act(tool: str, requestor: str = "assistant", /, **arguments: Any) -> Action:
    return {"name": tool, "arguments": arguments, "requestor": requestor}


def internal(tool: str, **arguments: Any) -> list[Action]:
    """Unlock one of the agent's hidden tools and call it."""
    asked = {"agent_tool_name": tool, "arguments": json.dumps(arguments)}
    return [act("unlock_discoverable_agent_tool", agent_tool_name=tool),
            act("call_discoverable_agent_tool", **asked)]  # fmt: skip


VERIFIED = act("log_verification", **USER, time_verified="2025-11-14 03:40:00 EST")
APPLIED = act("apply_for_credit_card", "user", card_type="Gold Rewards Card",
              customer_name="Ann Made", annual_income=50000)  # fmt: skip
ACTIONS: dict[str, list[Action]] = {
    "task_001": [VERIFIED, act("change_user_email", user_id="ann", new_email="a@example.org")],
    "task_002": internal(WRITING),
    "task_003": internal(READING, user_id="ann"),  # a reading call that is demanded
    "task_004": [VERIFIED, APPLIED],
    "task_005": [act("transfer_to_human_agents", summary="")],  # its trace is the call alone
    "task_006": [VERIFIED],
}


def made_task(name: str) -> dict[str, Any]:
    actions = [{"action_id": f"{name}_{i}", **each} for i, each in enumerate(ACTIONS[name])]
    basis = "ACTION" if name == "task_005" else "DB"
    if basis == "ACTION":
        actions[0]["compare_args"] = []
    return {
        "id": name,
        "description": {"purpose": "made for a test"},
        "user_scenario": {"instructions": f"You want {name} settled. Say ###STOP### then."},
        "evaluation_criteria": {"actions": actions, "reward_basis": [basis]},
        "user_tools": ["apply_for_credit_card"] if name == "task_004" else [],
        "required_documents": ["Changing an email"] if name == "task_001" else ["doc_b"],
    }


def write_domain(folder: Path) -> None:
    for name in ("tasks", "documents", "prompts/components"):
        (folder / name).mkdir(parents=True)
    (folder / "db.json").write_text(json.dumps({"users": {"data": {"ann": USER}}}))
    for name in ACTIONS:
        (folder / "tasks" / f"{name}.json").write_text(json.dumps(made_task(name)))
    for name, (title, content) in DOCUMENTS.items():
        made = {"id": name, "title": title, "content": content}
        (folder / "documents" / f"{name}.json").write_text(json.dumps(made))
    for name, text in PROMPTS.items():
        (folder / "prompts" / f"{name}.md").write_text(text)
    (folder / "prompts" / "components" / "policy_header.md").write_text("The rules.")
