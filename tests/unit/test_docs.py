"""The documents name files, links, commands, settings and code that exist, and their Python examples are valid."""

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from shutil import copytree

import pytest

from rlsys.config import DPOConfig, EvalConfig, PPOConfig, RMConfig, SFTConfig
from rlsys.config.arguments import parse_arguments
from rlsys.config.compat.reader import compat_table
from rlsys.config.introspect import is_open, leaves, sections
from rlsys.config.load import load
from rlsys.config.presets import preset_names
from rlsys.utils.errors import ConfigError
from tests.timing import scaled_s

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
JOBS = (PPOConfig, SFTConfig, RMConfig, DPOConfig, EvalConfig)
SECTIONS = "data|actor_rollout_ref|critic|algorithm|reward|trainer|ray_kwargs|optim|model|rollout|engine"
TOPS = ("rlsys", "workers", "trainer", "scripts", "tests")
INCLUDE = re.compile(r'--8<-- *"([^"]+)"')
RUN_AS_WRITTEN = {"oom.md"}
"""Documents whose examples are run although they do more than define something."""

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def blocks(document: Path, language: str) -> list[str]:
    """The fenced blocks in this language, without indentation."""
    fences = re.findall(rf"^( *)```{language}[^\n]*\n(.*?)^ *```", document.read_text(), re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in fences]


def code_spans(document: Path) -> list[str]:
    """Everything set as code: fenced blocks and spans in backticks."""
    text = document.read_text()
    fenced = re.findall(r"```[^\n]*\n(.*?)```", text, re.DOTALL)
    return [*fenced, *re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))]


def commands(document: Path) -> Iterator[list[str]]:
    """The words of every command line of a shell block."""
    for block in blocks(document, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.replace("&&", " && "), comments=True)
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                yield words[:end]
                words = words[end + 1 :]


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@cache
def anchors(document: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ +(.+)$", text, re.MULTILINE)}


@cache
def names_of(module: str) -> frozenset[str] | None:
    """The names that a module of this repository defines or imports, read without running it; None: no such module."""
    path = ROOT.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not source.exists():
        return frozenset() if path.is_dir() else None
    names = {p.stem for p in path.iterdir()} if path.is_dir() else set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(names)


def exists(dotted: str) -> bool:
    """Whether `rlsys.room.module.Name.attribute` leads to a module and a name in it."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        names = names_of(".".join(parts[:length]))
        if names is not None:
            return length == len(parts) or parts[length] in names
    return False


@cache
def known_keys() -> frozenset[str]:
    """Every key and section of every job, whole or without its first parts, and the keys of other projects."""
    keys: set[str] = set()
    for schema in JOBS:
        keys |= {*leaves(schema), *sections(schema)}
        table = compat_table(schema)
        keys |= {*table.aliases, *table.foreign, *table.engines, *table.expansions}
    parts = [key.split(".") for key in keys]
    return frozenset(".".join(words[start:]) for words in parts for start in range(len(words)))


def is_known(key: str) -> bool:
    free = {name for schema in JOBS for name, field in leaves(schema).items() if is_open(field)}
    every = {name: section for schema in JOBS for name, section in sections(schema).items()}
    free |= {name for name, section in every.items() if section.model_config.get("extra") == "allow"}
    parents = {key.rsplit(".", n)[0] for n in range(1, key.count(".") + 1)}
    return key in known_keys() or bool(parents & free)


@each_document
def test_links_point_at_files_and_headings(document: Path) -> None:
    missing = []
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", document.read_text()):
        target = document.parent / link if link else document
        if "://" in link or link.startswith("mailto:"):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            missing.append(f"{link}#{anchor}")
    assert not missing


@each_document
def test_settings_exist(document: Path) -> None:
    text = "\n".join(code_spans(document))
    named = set(re.findall(rf"(?<![\w./])((?:{SECTIONS})(?:\.[a-z_]+)+)(?=[=\s`,)]|$)", text, re.MULTILINE))
    modules = {name for name in named if exists(name) or exists(f"rlsys.{name}")}
    assert not {key for key in named - modules if not is_known(key)}


@each_document
def test_modules_names_and_files_exist(document: Path) -> None:
    text = "\n".join(code_spans(document))
    dotted = set(re.findall(r"(?<![\w./:])((?:rlsys|workers|trainer)(?:\.\w+)+)(?![\w=]|\.\w)", text))
    files = set(re.findall(r"(?<![\w./~-])((?:rlsys|workers|trainer|scripts|tests|docs)/[\w./]*\w)(?![\w*{<])", text))
    methods = {name for module in ("ppo", "loop") for name in names_of(f"trainer.{module}") or ()}
    missing = {name for name in dotted if not (exists(name) or is_known(name) or name.split(".")[1] in methods)}
    missing |= {name for name in files if not (ROOT / name).exists() and not list(ROOT.glob(f"{name}*"))}
    assert not missing


@each_document
def test_commands_exist(document: Path) -> None:
    wrong = []
    for words in commands(document):
        program = next((word for word in words if word.endswith((".py", ".sh")) and "/" in word), None)
        module = words[words.index("-m") + 1] if "python" in words and "-m" in words else None
        if program and program.split("/")[0] in TOPS:
            path = ROOT / program
            source = path.read_text() if path.exists() else ""
            wrong += [] if path.exists() else [program]
            options = {word.split("=")[0] for word in words if word.startswith("--")} - {"--help", "--dry-run"}
            wrong += [f"{program} {option}" for option in options if path.suffix == ".py" and option not in source]
        if module and module.split(".")[0] in TOPS and not exists(module):
            wrong.append(module)
        if "--config-name" in words and words[words.index("--config-name") + 1] not in preset_names():
            wrong.append(words[words.index("--config-name") + 1])
    assert not wrong


BENCHES = [path for path in sorted((ROOT / "scripts/bench").glob("*.py")) if "add_argument" in path.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in BENCHES if path.name != "trl_job.py"], ids=lambda path: path.stem)
def test_benches_start_from_the_folder_of_the_repository(path: Path) -> None:
    done = subprocess.run([sys.executable, str(path), "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


PARSES = """
import argparse, runpy, sys

def parsing(parse):
    def stop(*args, **kwargs):
        parsed = parse(*args, **kwargs)
        is_inner = sys._getframe(1).f_code.co_filename == argparse.__file__
        return parsed if is_inner else sys.exit(0)

    return stop

for name in ("parse_args", "parse_known_args", "parse_intermixed_args"):
    setattr(argparse.ArgumentParser, name, parsing(getattr(argparse.ArgumentParser, name)))
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program until its arguments are parsed."""


@pytest.mark.slow
def test_commands_within_sentences_of_the_figures_have_right_arguments() -> None:
    text = re.sub(r"```.*?```", "", (ROOT / "docs/performance.md").read_text(), flags=re.DOTALL)
    spans = {" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)}
    given = {named[1] for span in spans if (named := re.search(r"(scripts/[\w/]+\.py .+)", span))}
    wrong = []
    for command in sorted(given - {"scripts/bench/decode.py ENGINE MODEL --rows 512 --tokens 256"}):
        words = shlex.split(command.replace("--ks K", "--ks 4"))
        call = [sys.executable, "-c", PARSES, *words]
        done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=scaled_s(60), check=False)
        wrong += [f"{command}: {done.stderr[-300:]}"] if done.returncode else []
    assert not wrong, "\n".join(wrong)
    assert len(given) > 10


JOB_OF = {"train": "main_ppo", "sft": "main_sft", "rm": "main_rm", "dpo": "main_dpo", "eval": "main_eval"}
SCHEMAS = dict(zip(JOB_OF.values(), (PPOConfig, SFTConfig, RMConfig, DPOConfig, EvalConfig), strict=True))
MODEL = "actor_rollout_ref.model.path=model"
FILES = {"files": "rows.jsonl", "model.path": "model", "model_path": "model", ".path": "f.py", "external_lib": "f.py"}
"""Ends of keys whose values are files, and what stands for the files of the documents."""


def job_commands(document: Path) -> Iterator[tuple[str, list[str]]]:
    """The jobs that a document starts, with their arguments; variables of the shell are replaced by their values."""
    variables: dict[str, list[str]] = {}
    for words in commands(document):
        name, _, value = words[-1].partition("=")
        if name.isidentifier() and words[:-1] in ([], ["export"]):
            variables[f"${name}"] = value.split()
        at = next((i for i, word in enumerate(words) if word.startswith("trainer.main_")), 1)
        job = words[at].removeprefix("trainer.") if len(words) > at else ""
        job = JOB_OF.get(job, "") if words[0] == "rlsys" else job
        if job in SCHEMAS:
            arguments = [part for word in words[at + 1 :] for part in variables.get(word, [word])]
            yield job, list(takewhile(lambda word: word not in ("|", ">", "&"), arguments))


def with_stubs(argument: str) -> str:
    """The argument with a file that exists."""
    key, _, value = argument.partition("=")
    stub = next((stub for end, stub in FILES.items() if key.endswith(end)), None)
    return argument if stub is None or value == "null" else f"{key}={stub}"


@pytest.mark.slow
def test_the_jobs_of_the_documents_have_right_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and models of the reader are replaced by stubs; nothing is started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 100000}')
    for name in ("mix", "vision"):
        copytree(tmp_path / "model", tmp_path / "data" / name / "model")
        for part in ("train", "test"):
            (tmp_path / "data" / name / f"{part}.parquet").write_bytes(b"PAR1")
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    (tmp_path / "f.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info): ...\n")
    wrong, count = [], 0
    for document in DOCUMENTS:
        for job, arguments in job_commands(document):
            given = [with_stubs(argument) for argument in arguments if argument != "..."]
            given += [MODEL] * any("smollm2" in argument for argument in arguments)
            count += 1
            try:
                load(parse_arguments(given), SCHEMAS[job])
            except ConfigError as error:
                wrong.append(f"{document.name}: {job} {' '.join(arguments)}: {error}")
    assert not wrong, "\n".join(wrong)
    assert count > 20


@each_document
def test_python_examples_compile_and_their_imports_exist(document: Path) -> None:
    missing = []
    for block in blocks(document, "python"):
        for included in INCLUDE.findall(block):
            missing += [] if (ROOT / included).exists() else [included]
        for node in ast.walk(ast.parse(INCLUDE.sub("", block))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in TOPS:
                missing += [f"{node.module}.{a.name}" for a in node.names if not exists(f"{node.module}.{a.name}")]
            elif isinstance(node, ast.Import):
                missing += [a.name for a in node.names if a.name.split(".")[0] in TOPS and not exists(a.name)]
    assert not missing


def test_python_examples_that_only_define_something_run() -> None:
    """All in one process, which imports torch once."""
    chosen = []
    for document in DOCUMENTS:
        for block in blocks(document, "python"):
            tree = ast.parse(INCLUDE.sub("", block))
            defines = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Assign | ast.Expr
            simple = all(isinstance(node, defines) and not _acts(node) for node in tree.body)
            if (
                tree.body
                and not INCLUDE.search(block)
                and (document.name in RUN_AS_WRITTEN or simple)
                and not _undefined_names(block)
            ):
                chosen.append((str(document.relative_to(ROOT)), block))
    assert len(chosen) >= 5
    code = f"for name, block in {chosen!r}:\n    exec(compile(block, name, 'exec'), {{'__name__': name}})\n"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=scaled_s(60), check=False
    )
    assert done.returncode == 0, done.stderr


def _acts(node: ast.stmt) -> bool:
    """Whether a statement calls something at the top level, other than a class of the example or a decorator."""
    if not isinstance(node, ast.Assign | ast.Expr):
        return False
    calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
    return any(not (isinstance(call.func, ast.Name) and call.func.id[0].isupper()) for call in calls)


def _undefined_names(block: str) -> bool:
    command = [Path(sys.executable).with_name("ruff"), "check", "--isolated", "--no-cache", "--select", "F821", "-"]
    return bool(subprocess.run(command, input=block, capture_output=True, text=True, check=False).returncode)


@pytest.mark.parametrize(
    "shown_by",
    [
        "--model 7B",
        *(pytest.param(f"--model {name}", marks=pytest.mark.slow) for name in ("30B-A3B", "235B-A22B", "671B")),
        pytest.param("scripts/bench/step_times.py", marks=pytest.mark.slow),
    ],
)
def test_tables_of_planned_steps_are_what_their_commands_print(shown_by: str) -> None:
    text = (ROOT / "docs" / "scaling.md").read_text().replace("\\\n", "").replace("```bash\n", "`")
    shown = re.search(rf"`(python [^`\n]*{re.escape(shown_by)}[^`\n]*)\n?`.*?```\n(.*?)\n```", text, re.DOTALL)
    assert shown is not None
    command = [sys.executable, *shlex.split(shown[1])[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled_s(120), check=True)
    assert done.stdout.strip() == shown[2]


def test_the_memory_table_is_what_its_command_prints() -> None:
    text = (ROOT / "docs" / "oom.md").read_text()
    shown = re.search(
        r"(python scripts/plan.py --memory smollm2 --model 7B .*)\n```.*?prints\n\n```\n(.*?)\n```", text, re.DOTALL
    )
    assert shown is not None
    command = [sys.executable, *shlex.split(shown[1])[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled_s(60), check=False)
    assert done.returncode == 1, "it does not fit"
    assert done.stdout.strip() == shown[2]
