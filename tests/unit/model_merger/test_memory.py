"""What the merger keeps in memory is a few tensors, not the model: measured in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.timing import scaled_s

MIB = 1 << 20
MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from rlsys.model_merger.convert import merge, split
from rlsys.model_merger.formats import SplitLayout

torch.set_num_threads(1)
def own_memory():
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split("RssAnon:")[1].split()[0])

def peak_of(work):
    base, peak, done = own_memory(), 0, threading.Event()
    def watch():
        nonlocal peak
        while not done.is_set():
            peak = max(peak, own_memory())
            time.sleep(0.001)
    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return peak - base

model, ranks, back = map(Path, sys.argv[1:])
print(peak_of(lambda: split(model, ranks, SplitLayout(tp=2, ep=2, pp=2))), peak_of(lambda: merge(ranks, back)))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's accounts of memory")
def test_memory_is_a_few_tensors(tmp_path: Path) -> None:
    import torch

    from rlsys.model_merger.convert import write_model_files
    from rlsys.models.megatron.family import family_of
    from tests.unit.models.megatron_families.tiny import CONFIGS

    config = {
        **CONFIGS["qwen3-moe"],
        "vocab_size": 4096,
        "hidden_size": 512,
        "moe_intermediate_size": 768,
        "num_experts": 16,
        "num_hidden_layers": 4,
        "mlp_only_layers": [],
        "head_dim": 64,
    }
    shapes = family_of(config).hf_shapes(config)
    specs = {name: ("F32", shape) for name, shape in shapes.items()}
    model = tmp_path / "model"
    model.mkdir()
    write_model_files(model, specs, (torch.full(shape, 0.5) for shape in shapes.values()), file_bytes=64 * MIB)
    (model / "config.json").write_text(json.dumps(config))
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert size > 300 * MIB
    command = [sys.executable, "-c", MEASURE, *(str(path) for path in (model, tmp_path / "ranks", tmp_path / "back"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled_s(120), check=False)
    assert done.returncode == 0, done.stderr
    largest = 4096 * 512 * 4
    for peak in map(int, done.stdout.split()):
        assert peak < 3 * largest, f"{peak / MIB:.0f} MiB for a model of {size / MIB:.0f} MiB"
