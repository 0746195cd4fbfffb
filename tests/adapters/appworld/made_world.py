"""Makes a small AppWorld data folder with AppWorld's own classes; runs in its environment.

`python made_world.py ROOT` writes ROOT/data: one person with notes, and six tasks about them in two
scenarios, with solutions as AppWorld records them. Texts and people are made up here.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(sys.argv[1])
os.environ["APPWORLD_ROOT"] = os.environ["APPWORLD_CACHE"] = str(ROOT)

from appworld.api_docs import prepare_api_docs  # noqa: E402
from appworld.apps import get_all_apps  # noqa: E402
from appworld.apps.admin.models import MainUserMunch  # noqa: E402
from appworld.apps.model_lib import get_db_home_path  # noqa: E402
from appworld.collections.models import ModelCollection  # noqa: E402
from appworld.common.constants import CANARY_STRING, DB_VERSION  # noqa: E402
from appworld.requester import Requester  # noqa: E402
from appworld.task import Task  # noqa: E402

APPS = get_all_apps()
NOW = datetime(2023, 5, 18, 12)
WHO = {"first_name": "Ann", "last_name": "Made", "email": "ann.made@gmail.com",
       "phone_number": "5550100"}  # fmt: skip
PASSWORD = "long-enough"
NOTES = {"Bread": "Flour, water, salt.", "Trip": "Leave at nine.", "Züge": "Der um acht."}

EVALUATION = """
import json


def evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):
    with test("the answer is right"):
        (task,) = models.end.supervisor.Task.all()
        test.answer(json.loads(task.answer), ground_truth_answer)
    with test("nothing but notes has changed"):
        test.case(models.changed_model_names(), "==", set(private_data.changed))
    with test("the notes are as they must be"):
        found = {note.title: note.content for note in models.end.simple_note.Note.all()}
        test.case(found, "==", dict(private_data.notes))
"""
LABELS = ("no_op_fail", "no_op_pass", "no_op_fail")
Calls = list[tuple[str, str, dict[str, Any]]]


def login() -> Calls:
    return [("post", "/simple_note/auth/token",
             {"username": WHO["email"], "password": PASSWORD})]  # fmt: skip


def asking(title: str) -> tuple[str, Any, dict[str, str], Calls]:
    """Ask for the content of a note."""
    number = list(NOTES).index(title) + 1
    read = ("get", f"/simple_note/notes/{number}", {"access_token": "TOKEN"})
    return f"What does my note {title} say?", NOTES[title], NOTES, [*login(), read]


def changing(number: int) -> tuple[str, Any, dict[str, str], Calls]:
    """Make, delete or write on a note."""
    token = {"access_token": "TOKEN"}
    if number == 1:
        made = {"title": "Milk", "content": "Two litres.", "tags": [], "pinned": False, **token}
        call = ("post", "/simple_note/notes", made)
        return ("Write a note Milk: Two litres.", None, {**NOTES, "Milk": "Two litres."},
                [*login(), call])  # fmt: skip
    if number == 2:
        call = ("delete", "/simple_note/notes/2", token)
        left = {title: content for title, content in NOTES.items() if title != "Trip"}
        return "Delete my note Trip.", None, left, [*login(), call]
    changes = [("patch", f"/simple_note/notes/{i}", {"content": "Done.", **token}) for i in (1, 3)]
    return ("Write Done. in place of what my notes Bread and Züge say.", None,
            {**NOTES, "Bread": "Done.", "Züge": "Done."}, [*login(), *changes])  # fmt: skip


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    write(path, json.dumps(content))


def make_base(folder: Path) -> None:
    models = ModelCollection.load(to_db_home_path=":memory:test", load_apps=APPS, create_db=True)
    about = {"birthday": "1980-01-02", "sex": "female"}
    models.admin.MainUser(**WHO, **about).save()
    models.supervisor.Supervisor(**WHO, **about).save()
    password = {"supervisor_id": 1, "account_name": "simple_note", "password": PASSWORD}
    models.supervisor.AccountPassword(**password).save()
    account = {key: WHO[key] for key in ("first_name", "last_name", "email")}
    models.simple_note.User(**account, password=PASSWORD, verified=True, created_at=NOW,
                            last_logged_in=NOW).save()  # fmt: skip
    for title, content in NOTES.items():
        models.simple_note.Note(user_id=1, title=title, content=content, tags=[], created_at=NOW,
                                updated_at=NOW).save()  # fmt: skip
    models.save(str(folder), format="full", app_names=APPS)
    models.close()


def make_task(data: Path, name: str, about: tuple[str, Any, dict[str, str], Calls]) -> None:
    instruction, answer, notes, calls = about
    home = get_db_home_path(storage_type="memory", type="task_input", task_id=name)
    models = ModelCollection.load(home, str(data / "base_dbs"), load_apps=APPS)
    models.supervisor.Task(supervisor_id=1, instruction=instruction).save()
    who = MainUserMunch(**WHO)
    Task(name, instruction, who, NOW, get_all_apps(skip_admin=True), DB_VERSION,
         model_collection=models).save(model_collection_format="changes",
                                       save_ground_truth=False)  # fmt: skip
    models.close()
    done = ("post", "/supervisor/message", {"answer": answer, "status": "success"})
    truth = data / "tasks" / name / "ground_truth"
    changed = [] if notes == NOTES else ["simple_note.Note"]
    labels = ("no_op_fail", "no_op_pass", "no_op_pass") if notes == NOTES else LABELS
    said = ("the answer is right", "nothing but notes has changed", "the notes are as they must be")
    tests = [{"requirement": r, "label": label} for r, label in zip(said, labels, strict=True)]
    write(truth / "evaluation.py", f"# {CANARY_STRING}\n{EVALUATION}")
    write_json(truth / "answer.json", answer)
    write_json(truth / "public_data.json", {})
    write_json(truth / "private_data.json", {"changed": changed, "notes": notes})
    write_json(truth / "test_data.json", tests)
    about = {"mode": "full", "difficulty": 1, "num_apps": 1, "num_apis": 2}
    sizes = {"num_api_calls": len(calls) + 1, "num_solution_code_lines": 3}
    write_json(truth / "metadata.json", about | sizes)
    keys = ("method", "url", "data")
    recorded = [dict(zip(keys, each, strict=True)) for each in [*calls, done]]
    write_json(truth / "api_calls.json", recorded)


def main() -> None:
    data = ROOT / "data"
    for app in get_all_apps(skip_admin=True):
        docs = {doc["api_name"]: {**doc, "canary_string": CANARY_STRING}
                for doc in prepare_api_docs(app)}  # fmt: skip
        write_json(data / "api_docs" / "standard" / f"{app}.json", docs)
    make_base(data / "base_dbs")
    tasks = {f"abcdef0_{i}": asking(title) for i, title in enumerate(NOTES, 1)}
    tasks |= {f"abcdef1_{i}": changing(i) for i in (1, 2, 3)}
    for name, about in tasks.items():
        make_task(data, name, about)
    for dataset in ("train", "test_normal"):
        write(data / "datasets" / f"{dataset}.txt", "\n".join(tasks) + "\n")
    Requester.close_all()


if __name__ == "__main__":
    main()
