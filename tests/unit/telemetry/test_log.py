"""Log lines reach people with their origin and without secrets."""

import io
import logging
from collections.abc import Iterator

import pytest
from rich.console import Console

from rlsys.telemetry.log import get_logger, redact, redact_tree, setup_logging


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), logging.getLogger("rlsys").level
    yield
    root.handlers[:] = before
    logging.getLogger("rlsys").setLevel(level)


def plain_console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=False), out


def test_plain_line_names_role_rank_level_and_module() -> None:
    console, out = plain_console()
    setup_logging(role="actor", rank=3, console=console)
    get_logger("rlsys.engines.fsdp.engine").info("step %d done", 7)
    assert "INFO" in out.getvalue()
    assert "[actor 3] rlsys.engines.fsdp.engine: step 7 done" in out.getvalue()


def test_terminal_line_keeps_brackets_of_the_message() -> None:
    out = io.StringIO()
    setup_logging(role="critic", rank=0, console=Console(file=out, force_terminal=True, width=120, color_system=None))
    get_logger("rlsys.x").warning("shape [2, 3] and [bold]text[/bold]")
    assert "[critic 0] shape [2, 3] and [bold]text[/bold]" in out.getvalue()


def test_a_log_stays_a_text_file() -> None:
    """The end of a program's output, whose zero bytes made the log a binary file that grep does not show."""
    console, out = plain_console()
    setup_logging(console=console)
    get_logger("rlsys.x").warning("exited:\x00\x07 \x1b[31mboom\ttab\r\nnext")
    assert out.getvalue().endswith("exited:\ufffd\ufffd \x1b[31mboom\ttab\r\nnext\n")


def test_calling_twice_writes_each_line_once() -> None:
    first, out_first = plain_console()
    second, out_second = plain_console()
    setup_logging(console=first)
    setup_logging(console=second)
    get_logger("trainer.ppo").info("hello")
    assert out_first.getvalue() == ""
    assert out_second.getvalue().count("hello") == 1


def test_other_libraries_speak_from_warning() -> None:
    console, out = plain_console()
    setup_logging(console=console)
    get_logger("rlsys.x").info("ours")
    get_logger("somelib").info("theirs")
    get_logger("somelib").warning("theirs, serious")
    assert "ours" in out.getvalue()
    assert "theirs\n" not in out.getvalue()
    assert "theirs, serious" in out.getvalue()


def test_secret_of_the_environment_is_masked_even_inside_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "correct-horse-battery")
    console, out = plain_console()
    setup_logging(console=console)
    try:
        raise RuntimeError("refused correct-horse-battery")
    except RuntimeError:
        get_logger("rlsys.x").exception("login with %s failed", "correct-horse-battery")
    assert "correct-horse-battery" not in out.getvalue()
    assert "RuntimeError: refused [redacted]" in out.getvalue()


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Authorization: Bearer abcDEF123456789", "abcDEF123456789"),
        ("using hf_abcdefghijklmnopqrst", "hf_abcdefghijklmnopqrst"),
        ("key sk-proj-0123456789abcdefgh", "sk-proj-0123456789abcdefgh"),
        ("AKIAABCDEFGHIJKLMNOP is the id", "AKIAABCDEFGHIJKLMNOP"),
        ("api_key='s3cr3t'", "s3cr3t"),
        ("password: hunter2", "hunter2"),
        ('{"access_token": "abc.def"}', "abc.def"),
        ("http://me:pa55@proxy:3128/x", "pa55"),
    ],
)
def test_redact_masks(text: str, secret: str) -> None:
    assert secret not in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "perf/throughput 1234 tokens/s",
        "max_tokens=8192 response_token: 17",
        "ppo_max_token_len_per_gpu=16384",
        "eos_token='<|im_end|>'",
        "reading /data/authors.parquet at 127.0.0.1:8265",
    ],
)
def test_redact_leaves_ordinary_text(text: str) -> None:
    assert redact(text) == text


def test_redact_tree_masks_by_key_and_by_shape() -> None:
    tree = {
        "trainer": {"logger": ["console"], "wandb_api_key": "abc"},
        "url": "https://u:p@host",
        "n": 8,
        "eos_token": "<|im_end|>",
    }
    assert redact_tree(tree) == {
        "trainer": {"logger": ["console"], "wandb_api_key": "[redacted]"},
        "url": "https://[redacted]@host",
        "n": 8,
        "eos_token": "<|im_end|>",
    }
