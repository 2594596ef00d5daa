"""Weights on GPUs: the copy kernel, memory exported to another process, and a push between two processes of one GPU."""

import random
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest
import torch

from rlsys.planning.memory import LEARNED_COPIES
from rlsys.weights.batched_copy import BatchedCopy, TensorPair, bits_of
from rlsys.weights.checksum import PreparedCudaChecksums, box_checksum, box_checksums, prepared_checksums
from rlsys.weights.executors.cuda_ipc import ImportedTensors, IpcHandle, export_tensors
from rlsys.weights.layout import BITS
from rlsys.weights.learn import learn_layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def random_pairs(rng: random.Random, device: str) -> tuple[list[TensorPair], torch.Tensor]:
    """Parts of tensors of every dtype, strided and not, into one buffer of parameters each; and all that they write."""
    pairs, targets = list[TensorPair](), []
    for _ in range(60):
        dtype = rng.choice([torch.bfloat16, torch.float32, torch.uint8])
        shape = [rng.randint(1, 60) for _ in range(rng.randint(1, 3))]
        whole = [n + rng.randint(0, 9) for n in shape]
        at = [rng.randint(0, a - n) for a, n in zip(whole, shape, strict=True)]
        part = tuple(slice(a, a + n) for a, n in zip(at, shape, strict=True))
        bits = BITS[dtype.itemsize]
        source = torch.randint(torch.iinfo(bits).min, torch.iinfo(bits).max, whole, dtype=bits, device=device)
        source = source.view(dtype)
        target = torch.zeros(whole, dtype=dtype, device=device)
        pairs.append((target[part], source[part]))
        targets.append(target)
    big = torch.randn(3_000_001, device=device)
    pairs.append((torch.zeros_like(big), big))
    cast = torch.randn(100, 100, device=device)
    pairs.append((torch.zeros(100, 100, dtype=torch.bfloat16, device=device), cast))
    return pairs, targets


@pytest.mark.parametrize("use_kernel", [True, False])
def test_the_kernel_and_foreach_copy_the_same(use_kernel: bool) -> None:
    pairs, _ = random_pairs(random.Random(1), "cuda")
    replay = BatchedCopy(pairs, use_kernel=use_kernel)
    assert replay.uses_kernel is use_kernel
    replay.run()
    torch.cuda.synchronize()
    assert all(torch.equal(bits_of(target), bits_of(source.to(target.dtype))) for target, source in pairs)


def _engine(pipe: Connection) -> None:
    handle = pipe.recv()
    for device in range(torch.cuda.device_count()):
        imported = ImportedTensors(handle, ["w"], device=torch.device("cuda", device))
        target = torch.zeros(imported.tensors["w"].shape, device=f"cuda:{device}")
        with torch.cuda.device(device):
            BatchedCopy([(target, imported.tensors["w"])]).run()
            torch.cuda.synchronize()
        pipe.send(target.cpu())
        imported.close()
    pipe.recv()


def read_by_others(handle: IpcHandle, num_readers: int) -> list[torch.Tensor]:
    """The tensor `w` of a handle as each process read it on each GPU; all of them have closed it."""
    context, read = get_context("spawn"), list[torch.Tensor]()
    for _ in range(num_readers):
        ours, theirs = context.Pipe()
        process = context.Process(target=_engine, args=(theirs,), daemon=True)
        process.start()
        ours.send(handle)
        try:
            for _ in range(torch.cuda.device_count()):
                assert ours.poll(120)
                read.append(ours.recv())
            ours.send("done")
            process.join(30)
            assert process.exitcode == 0
        finally:
            process.kill()
    return read


def test_memory_of_another_process_is_read_from_every_gpu() -> None:
    part = torch.randn(5000, 300, device="cuda:0")[7:4000, 20:280]
    read = read_by_others(export_tensors({"w": part}), 1)
    assert len(read) == torch.cuda.device_count()
    assert all(torch.equal(values, part.cpu()) for values in read)


@pytest.mark.parametrize("num_readers", [0, 1, 2])
def test_exported_memory_is_freed_with_its_tensor_however_many_read_it(num_readers: int) -> None:
    before = torch.cuda.memory_allocated()
    tensor = torch.ones(1 << 20, device="cuda:0")
    for _ in range(2):  # of another push too
        assert all(values.all() for values in read_by_others(export_tensors({"w": tensor}), num_readers))
    del tensor
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("seed", range(20))
def test_checksums_on_a_gpu_are_those_on_a_cpu(seed: int) -> None:
    rng = random.Random(seed)
    boxes = list(boxes_of(rng))
    on_cpu = [box_checksum(values, start, full) for values, start, full in boxes]
    moved = [(to_cuda_with_strides(values), start, full) for values, start, full in boxes]
    assert box_checksums(iter(moved)) == on_cpu
    plain = [
        (values if values.ndim == 0 or values.stride(-1) == 1 else values.contiguous(), *at) for values, *at in moved
    ]
    again = prepared_checksums(plain, [values.dtype for values, _, _ in plain])
    assert again() == again() == on_cpu
    plain[0][0].add_(1)
    assert again()[0] != on_cpu[0]
    assert again()[1:] == on_cpu[1:]
    own = torch.contiguous_format
    floats = [(v.clone(memory_format=own), *at) for v, *at in plain if v.dtype == torch.float32 and v.numel()]
    floats[0][0][(0,) * floats[0][0].ndim] = torch.nan
    for dtype in (torch.bfloat16, torch.float16):
        cast = prepared_checksums(floats, [dtype] * len(floats))
        assert isinstance(cast, PreparedCudaChecksums)
        assert cast() == box_checksums((values.to(dtype), start, full) for values, start, full in floats)


def boxes_of(rng: random.Random) -> Iterator[tuple[torch.Tensor, list[int], list[int]]]:
    """Parts of tensors of any dtype and shape, transposed ones, scalars and empty ones among them."""
    for number in range(60):
        full = [rng.randint(1, 12) for _ in range(rng.randint(0, 4))]
        full = [70, 1 << 14] if number == 0 else [530, 1100] if number < 6 else full
        bits = torch.randint(0, 256, (*full, 8), dtype=torch.uint8)
        whole = bits.view(torch.int64).view(full).to(torch.int16).view(torch.bfloat16)
        if dtype := rng.choice([None, torch.float32, torch.uint8, torch.float64]):
            whole = torch.randn(full).abs().mul(50).to(dtype)
        whole = whole.transpose(0, 1) if len(full) > 1 and rng.random() < 0.3 else whole
        full, start = list(whole.shape), [rng.randint(0, n - 1) if rng.random() < 0.6 else 0 for n in whole.shape]
        size = [rng.randint(0 if number > 50 else 1, n - s) for n, s in zip(full, start, strict=True)]
        yield whole[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))], start, full


def to_cuda_with_strides(values: torch.Tensor) -> torch.Tensor:
    storage = torch.empty(0, dtype=values.dtype).set_(values.untyped_storage()).cuda()
    return storage.as_strided(values.shape, values.stride(), values.storage_offset())


def test_learning_takes_the_memory_that_is_planned() -> None:
    """Beside the engine: a load of its largest tensor, and the planned copies of it."""
    shape = (20000, 4096)
    held = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")

    def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in tensors:
            held.copy_(tensor)

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert not learn_layout(load, lambda: {"w": held}, {"w": shape}, {"w": "bfloat16"}).loader_only
    taken = (torch.cuda.max_memory_allocated() - before) / held.nbytes
    assert 0.7 * (1 + LEARNED_COPIES) < taken <= 1 + LEARNED_COPIES + 0.6, "chunks come on top"
