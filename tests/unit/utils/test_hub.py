"""Models by name, from a hub on 127.0.0.1: what is downloaded, what is reused, and one line for what goes wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from rlsys.data.files import read_rows
from rlsys.utils.hub import is_hub_id, is_rows_id
from scripts.prepare_data import hub_row
from tests.hub import COMMIT, Hub
from tests.timing import scaled_s

ROOT = Path(__file__).resolve().parents[3]
CONFIG = json.dumps({"model_type": "llama"}).encode()
WEIGHTS = os.urandom(20_000)
SPLITS = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: main/test.jsonl}
---"""
MODELS = {
    "org/model": {
        "config.json": CONFIG,
        "model.safetensors": WEIGHTS,
        "pytorch_model.bin": b"x",
        "original/consolidated.00.pth": b"x",
        "model.gguf": b"x",
    },
    "org/pickled": {"config.json": CONFIG, "pytorch_model.bin": WEIGHTS},
    "openai/gsm8k": {
        "main/train.jsonl": b'{"question": "Ann has 1,000 + 1?", "answer": "It is 1,001\\n#### 1,001"}\n' * 3,
        "main/test.jsonl": b'{"question": "1 + 2?", "answer": "#### 3"}\n',
        "README.md": SPLITS,
    },
    "org/rows": {
        "README.md": SPLITS,
        "main/train.jsonl": b'{"question": "1 + 1?", "answer": "2"}\n{"question": "2 + 1?", "answer": "3"}\n',
        "main/test.jsonl": b'{"question": "1 + 2?", "answer": "3"}\n',
    },
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(MODELS).served() as served:
        yield served


def in_a_process(hub: Hub, home: Path, program: str, **more: str) -> str:
    """What a process prints; one of its own, since the hub's address is read at import."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment = {**kept, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.url, "HF_HOME": str(home), **more}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=scaled_s(60), check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def download(
    hub: Hub, home: Path, name: str, *, by: str = "download_model", max_bytes: int | None = None, **more: str
) -> str:
    """The folder, or the message of the error."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({max_bytes}, {max_bytes}))\n"
    program = (
        f"{limit if max_bytes else ''}from rlsys.utils.errors import ConfigError\n"
        f"from rlsys.utils.hub import {by}\ntry: print({by}({name!r}))\n"
        "except ConfigError as error: print('ERROR', error)"
    )
    printed = in_a_process(hub, home, program, **more)
    assert len(printed.splitlines()) == 1
    return printed


def test_names_of_the_hub_and_paths() -> None:
    assert all(map(is_hub_id, ["Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B@main", "a/b@v1.0/x"]))
    assert not any(map(is_hub_id, ["./model", "/a/b", "a/b/c", "model", "~/model", "../a", "tests/unit"]))


def test_a_model_is_downloaded_once_without_what_is_not_read(hub: Hub, tmp_path: Path) -> None:
    folder = Path(download(hub, tmp_path, "org/model@v1"))
    assert folder.name == COMMIT
    assert sorted(file.name for file in folder.rglob("*")) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert download(hub, tmp_path, "org/model") == str(folder)
    assert download(hub, tmp_path, "org/model@v1", HF_HUB_OFFLINE="1") == str(folder)
    assert hub.downloads == {"config.json": 1, "model.safetensors": 1}


def test_pickled_weights_are_taken_where_there_are_no_others(hub: Hub, tmp_path: Path) -> None:
    assert (Path(download(hub, tmp_path, "org/pickled")) / "pytorch_model.bin").read_bytes() == WEIGHTS


def test_another_node_downloads_the_same_folder(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--org--model" / "snapshots" / COMMIT
    program = f"from rlsys.utils.hub import ensure_downloaded as e; e({str(folder)!r}); e('/nowhere'); e(None)"
    in_a_process(hub, tmp_path / "other", program)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_a_cut_download_is_continued(hub: Hub, tmp_path: Path) -> None:
    hub.cut["model.safetensors"] = 100
    assert "check the connection to http://127.0.0.1" in download(hub, tmp_path, "org/model")
    hub.cut["model.safetensors"] = 1
    folder = Path(download(hub, tmp_path, "org/model"))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("name", "environment", "why"),
    [
        ("org/none", {}, "has no such model, or it is private; correct the name, or set HF_TOKEN"),
        ("org/none", {"HF_TOKEN": "ok"}, "has no such model, or it is private"),
        ("org/model@v9", {}, "has the model but not this revision"),
        ("org/model", {"HF_TOKEN": "hf_secret"}, "refused the token (401); set HF_TOKEN to a valid one"),
        ("org/gated", {}, "it is gated; accept its terms at http://127.0.0.1"),
        ("org/model", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set and"),
        ("org/model", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "check the connection to http://127.0.0.1:9"),
    ],
)
def test_what_cannot_be_downloaded_is_one_line(
    hub: Hub, tmp_path: Path, name: str, environment: dict[str, str], why: str
) -> None:
    hub.repositories["org/gated"] = hub.repositories["org/model"]
    hub.gated.add("org/gated")
    message = download(hub, tmp_path, name, **environment)
    assert message.startswith(f"ERROR {name} is not a folder here, and cannot be downloaded: ")
    assert why in message
    assert "hf_secret" not in message
    if name == "org/gated":
        assert Path(download(hub, tmp_path, name, HF_TOKEN="ok")).name == COMMIT


def test_a_full_disk_names_the_folder(hub: Hub, tmp_path: Path) -> None:
    message = download(hub, tmp_path, "org/model", max_bytes=8192)
    assert f"no space is left in {tmp_path / 'hub'}; set HF_HOME" in message


def test_names_of_rows_have_a_split() -> None:
    assert all(map(is_rows_id, ["openai/gsm8k:main:train", "a/b:test", "a/b@v1.0:c-1:test"]))
    assert not any(map(is_rows_id, ["a/b", "a/b.parquet", "s3://a/b", "/a/b:c", "./a:b", "C:/a/b"]))


def test_a_split_of_a_dataset_is_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    folder = download(hub, tmp_path, "org/rows@main:main:train", by="download_rows")
    assert [row.values["question"] for row in read_rows(folder)] == ["1 + 1?", "2 + 1?"]  # type: ignore[union-attr]
    assert download(hub, tmp_path, "org/rows@main:main:train", by="download_rows") == folder
    assert hub.downloads["main/train.jsonl"] == 1
    test = download(hub, tmp_path, "org/rows:main:test", by="download_rows")
    assert [row.values["answer"] for row in read_rows(test)] == ["3"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("org/none:train", "Dataset 'org/none' doesn't exist on the Hub or cannot be accessed"),
        ("org/rows:main:dev", "Unknown split"),
        ("org/rows:other:train", "'other' not found"),
    ],
)
def test_rows_that_cannot_be_downloaded_are_one_line(hub: Hub, tmp_path: Path, name: str, why: str) -> None:
    message = download(hub, tmp_path, name, by="download_rows")
    assert message.startswith(f"ERROR {name}")
    assert why in message


def test_a_split_is_streamed_without_being_stored(hub: Hub, tmp_path: Path) -> None:
    program = (
        "from rlsys.utils.hub import open_rows\n"
        "rows = open_rows(['org/rows:train', 'org/rows:test'])\n"
        "print([row['answer'] for row in rows])"
    )
    assert in_a_process(hub, tmp_path, program) == "['2', '3', '3']"
    assert not list(tmp_path.rglob("*.arrow"))


def test_a_task_of_the_hub_becomes_verls_rows(hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = (
        "from scripts.prepare_data import main\n"
        f"assert main(['--task', 'gsm8k', '--train', '2', '--out', {str(out)!r}]) == 0"
    )
    printed = in_a_process(hub, tmp_path, program)
    assert printed.splitlines()[0].endswith("train.parquet: 2 rows of openai/gsm8k")
    first, second = (row.values for row in read_rows(str(out / "train.parquet")))  # type: ignore[union-attr]
    assert first["reward_model"] == {"style": "rule", "ground_truth": "1001"}
    (message,) = first["prompt"]
    asked = 'Let\'s think step by step and output the final answer after "####".'
    assert message == {"role": "user", "content": f"Ann has 1,000 + 1? {asked}"}
    assert (second["extra_info"]["index"], second["extra_info"]["split"], second["ability"]) == (1, "train", "math")
    assert len(list(read_rows(str(out / "test.parquet")))) == 1


def test_rows_of_other_tasks_are_verls_too() -> None:
    row = hub_row("math", {"problem": "x?", "solution": r"so \boxed{\frac{1}{2}}."}, split="test", index=3)
    assert row["reward_model"]["ground_truth"] == r"\frac{1}{2}"
    assert row["data_source"] == "DigitalLearningGmbH/MATH-lighteval"
    assert row["prompt"][0]["content"].endswith(r"output the final answer within \boxed{}.")
    ready = {"data_source": "math_dapo", "prompt": [], "reward_model": {"ground_truth": "1"}}
    assert hub_row("dapo", ready, split="train", index=0) == ready
    row = hub_row("countdown", {"nums": [3, 4], "target": 12}, split="train", index=0)
    assert row["reward_model"]["ground_truth"] == {"target": 12, "numbers": [3, 4]}
    assert "numbers [3, 4]" in row["prompt"][0]["content"]
    image = Image.new("RGB", (2, 3))
    row = hub_row("geo3k", {"problem": "<image>x?", "answer": "4", "images": [image]}, split="train", index=0)
    assert (row["data_source"], row["images"][0]["bytes"][:4]) == ("hiyouga/geometry3k", b"\x89PNG")
