"""SideQuest's training: rows from traces in hindsight, LoRA, and what came of it (section 3.3)."""
