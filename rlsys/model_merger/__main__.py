"""Checkpoints of training <-> Hugging Face model directories, tensor by tensor.

python -m rlsys.model_merger merge  --local_dir CHECKPOINT --target_dir MODEL
python -m rlsys.model_merger split  --hf_model_path MODEL --target_dir RANKS --tp 2 --pp 2 --ep 4
python -m rlsys.model_merger verify --local_dir CHECKPOINT --hf_model_path MODEL
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlsys.model_merger.convert import compare, merge, split
from rlsys.model_merger.formats import SplitLayout
from rlsys.utils.errors import CheckpointError, ConfigError

BACKENDS = ("fsdp", "megatron")
FLOATS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Code 0 when all went well, 1 when verify finds differences, 2 and one line for what is wrong."""
    options = vars(_parser().parse_args(arguments))
    try:
        return options.pop("run")(**options)
    except (CheckpointError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m rlsys.model_merger", description=__doc__, formatter_class=formatter)
    commands = parser.add_subparsers(required=True)
    folder = {"type": Path, "metavar": "DIR"}

    merging = commands.add_parser("merge", help="a checkpoint becomes a model directory")
    merging.set_defaults(run=_merge)
    merging.add_argument("--local_dir", required=True, help="a run, its global_step_N, or a split", **folder)
    merging.add_argument("--target_dir", required=True, help="the model directory to write", **folder)
    merging.add_argument("--backend", choices=BACKENDS, help="refuse a checkpoint of the other one")
    merging.add_argument("--hf_model_config_path", help="config.json and tokenizer; LOCAL_DIR/huggingface", **folder)
    merging.add_argument("--carry_from", help="a model directory with what training does not hold (MTP)", **folder)
    merging.add_argument("--dtype", choices=FLOATS, default="", help="type of the floats; that of config.json")
    merging.add_argument("--overwrite", action="store_true")

    splitting = commands.add_parser("split", help="a model directory becomes one file a Megatron rank")
    splitting.set_defaults(run=_split)
    splitting.add_argument("--hf_model_path", required=True, help="the model directory", **folder)
    splitting.add_argument("--target_dir", required=True, help="the folder to write", **folder)
    for name in ("tp", "pp", "vp", "ep", "etp"):
        splitting.add_argument(f"--{name}", type=int, default=1, metavar="N")
    splitting.add_argument("--first_layers", type=int, metavar="N", help="num_layers_in_first_pipeline_stage")
    splitting.add_argument("--last_layers", type=int, metavar="N", help="num_layers_in_last_pipeline_stage")
    splitting.add_argument("--head", choices=("lm", "value", "score"), default="lm")
    splitting.add_argument("--transformer_engine", action="store_true", help="names of the Transformer Engine spec")
    splitting.add_argument("--overwrite", action="store_true")

    verifying = commands.add_parser("verify", help="compare a checkpoint with a model directory, bit by bit")
    verifying.set_defaults(run=_verify)
    verifying.add_argument("--local_dir", required=True, help="the checkpoint, or another model directory", **folder)
    verifying.add_argument("--hf_model_path", required=True, help="the model directory", **folder)
    verifying.add_argument("--backend", choices=BACKENDS, help="refuse a checkpoint of the other one")
    return parser


def _merge(local_dir: Path, target_dir: Path, hf_model_config_path: Path | None, dtype: str, **more: Any) -> int:
    count = merge(local_dir, target_dir, config_dir=hf_model_config_path, dtype=FLOATS.get(dtype), **more)
    print(f"{target_dir}: {count} tensors")
    return 0


def _split(hf_model_path: Path, target_dir: Path, overwrite: bool, **layout: Any) -> int:
    if small := [name for name in ("tp", "pp", "vp", "ep", "etp") if layout[name] < 1]:
        raise ConfigError(f"--{small[0]}={layout[small[0]]}: must be at least 1")
    count = split(hf_model_path, target_dir, SplitLayout(**layout), overwrite=overwrite)
    print(f"{target_dir}: {count} files")
    return 0


def _verify(local_dir: Path, hf_model_path: Path, backend: str | None) -> int:
    differences = compare(local_dir, hf_model_path, backend=backend)
    for line in differences[:20]:
        print(line)
    print(f"{len(differences)} differences" if differences else "equal, bit by bit")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
