"""Wrong usage: status 2, one line on standard error that says what is allowed, and nothing is written."""

import os
import shlex
import sys
from pathlib import Path

import pytest
import torch
from lookup_run import complaint

# What each command needs so that only the mistake is wrong.
NEEDED = {
    "encode": ["1"], "decode": ["0x1"], "why": ["1", "fp16"], "compare": ["fp16", "bf16"], "ladder": ["--out", "x.png"],
    "plan": ["--params", "7e9"], "inspect": ["x.pt"], "convert": ["x", "y"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["plan", "why", "inspect", "convert", "bench run"])
def test_an_unknown_option_gets_the_closest_as_a_suggestion(name: str, folder: Path) -> None:
    for typed in ("--jsno", "--helpp=3"):
        found = complaint(*name.split(), *NEEDED.get(name, []), typed)
        assert found.startswith(f"halfstep {name}: error: unknown option {typed}; ")
        assert f"see halfstep {name} --help for the others" in found
    assert "did you mean --help?" in found
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        # an argument where none is taken
        ("plan 7e9", "unexpected argument '7e9'; halfstep plan takes options only"),
        ("ladder fp16", "the following arguments are required: --out; see halfstep ladder --help"),
        # a value that is missing, or too many
        ("plan --params", "argument --params: expected one argument; see halfstep plan --help"),
        ("inspect", "the following arguments are required: PATH; see halfstep inspect --help"),
        ("bench run --quick=3", "argument --quick: takes no value, and was given '3'"),
        # an unknown choice
        ("bench run sofmax", "argument GROUP: unknown group 'sofmax'; did you mean 'softmax'? Choose from softmax"),
        ("plan --model gtp2", "but got 'gtp2': did you mean 'gpt2'?"),
        # numbers: negative, NaN, huge, none
        ("plan --params -3", "argument --params: expected an integer of at least 1, such as 7e9"),
        ("plan --params 7e9 --batch 0", "argument --batch: expected an integer of at least 1, but got '0'"),
        ("inspect x --scale nan", "argument --scale: expected a number from 2^-126 to 2^126"),
        # files and folders
        ("inspect x --out no/x.png", "argument --out: 'no/x.png' cannot be written: No such file or directory"),
        ("ladder --out x.bmp", "argument --out: expected a file name ending in .png, .svg, .pdf"),
        ("inspect nowhere.pt", "nowhere.pt cannot be read: No such file or directory; pass a checkpoint"),
        ("inspect empty.pt", "empty.pt is empty; pass a checkpoint, a file of torch.save or a safetensors file"),
        ("inspect f.pt", "f.pt is not a file of torch.save, or is damaged: "),
        ("inspect ''", "argument PATH: expected a path, but got ''"),
        ("bench audit --bounds nowhere", "expected nowhere to be written by `halfstep bench audit --record`: FileN"),
        # commands
        ("bench rum", "unknown command 'bench rum'; did you mean 'bench run'? Choose from bench audit"),
        # the lookup
        ("encode 2.5 fp16", "; fp16 is a format, and formats come after -f"),
        ("encode 1 -f fp16 2.5", "argument -f/--format: unknown format '2.5'; choose from fp64, fp32"),
        ("encode -f fp16 -2.5", "; numbers come before -f"),
        ("why fp16 2.5", "; fp16 is a format, and the number comes first"),
        ("why 1 2 mxfp8 fp16", "expected a format of blocks, such as mxfp8, which several numbers or another"),
        (f"why {'1 ' * 17} nvfp4", "expected up to 16 numbers, a block of nvfp4, but got 17"),
        ("why 1 e2m1 mxpf4", "unknown format 'mxpf4'; did you mean 'mxfp4'?"),
        ("encode 1 -f mxfp4", "Expected a format of single numbers, but got 'mxfp4', one of blocks: choose that"),
        ("compare mxfp8 nvfp4", "mxfp8_e4m3, a format of blocks, is compared by its errors: pass --numbers 0.1 -100"),
        ("compare mxfp8 --numbers 1 --file x.npy", "--numbers and --file are both the numbers to compare by; leave"),
        ("compare mxfp8 --file none.npy", "expected a .npy file of numbers, but none.npy is none"),
        ("encode 1 --rounding nearst", "argument --rounding: unknown rounding 'nearst'; did you mean 'nearest'? Choos"),
        ("encode 1 --seed 1", "--seed 1 draws nothing with --rounding nearest; leave it out, or pass"),
        ("decode 0x1ffff -f fp16", "argument CODE: expected a code of fp16 from 0x0 to 0xffff, but got 0x1ffff"),
        ("decode 0x12345678123456789", "expected up to 64 bits, but got 0x12345678123456789, which has 68"),
        ("decode -1", "without a sign, but got '-1': formats go after -f, and numbers to halfstep encode"),
        ("decode 0x41 -w 8 -f fp16", "--width 8 is not the 16 bits of --format fp16; leave one out"),
        ("ladder --out x.png --codes fp16", "expected a format of up to 8 bits, but got fp16, which"),
        # plans
        ("plan", "expected a model, but got none: pass --params 7e9 or --model llama-3-8b"),
        ("plan --params 1 --compare strategies", "gpus is 1; strategies differ only on 2 or more GPUs"),
        ("plan --params 1 --strategy fsdb", "Expected strategy to be one of single, ddp"),
        ("plan --params 1e9 --card h10", "Expected card to be the name of a GPU or a size such as 24GiB, but got"),
        ("plan --params 1 --card 0GiB", "but got '0GiB': choose from a100-40"),
        ("plan --params 1e9 --model gpt2", "--params 1000000000 with --model; leave one of"),
        ("plan --params 1 --port 5", "--port without a server; leave it out, or give --page without a file"),
        ("plan --params 1 --seq 5", "--seq with --params; give both --batch and --seq, or neither"),
        ("plan --params 1 --optimizer torch --compare layouts", "--optimizer with --compare layouts, which plans all"),
        ("plan --model gpt2 --seq 2048", "Expected seq to be from 1 to 1024, the positions of the model, but got 2048"),
        ("plan --params 1 --gpus 8 --strategy hsdp --shard 3", "Expected shard to divide"),
        # checkpoints
        ("inspect integers.pt", "integers.pt: expected floating-point tensors, but got none, only 1 of int64"),
        ("inspect zeros.pt --advise", "gradients hold no finite number but 0"),
        ("inspect zeros.pt zeros.pt", "zeros.pt has a tensor 'a', which a file before it also has; inspect them one b"),
        ("inspect zeros.pt --format int8", "argument -f/--format: Expected format to be a floating-point form"),
        ("inspect zeros.pt --scale 2^200", "argument --scale: expected a number from 2^-126 to 2^126"),
        ("inspect zeros.pt --scale 1000 --advise", "--advise: expected --scale to be a power of two, such as 2^16"),
        ("convert nowhere x", "cannot be converted: "),
    ],
)  # fmt: skip
def test_errors_are_one_line_and_status_2(words: str, said: str, folder: Path) -> None:
    for name, content in (("f", "kept"), ("f.pt", "x"), ("empty.pt", ""), ("README", "# Text, and no tensors in it\n")):
        Path(name).write_text(content)
    torch.save({"a": torch.tensor(3)}, "integers.pt")
    torch.save({"a": torch.zeros(3)}, "zeros.pt")
    Path("d.png").mkdir()
    before = sorted(os.listdir())
    found = complaint(*shlex.split(words))
    assert said in found and found.isprintable() and "usage" not in found
    assert sorted(os.listdir()) == before and Path("f").read_text() == "kept"


@pytest.mark.parametrize("words", ["ladder --out x.png", "inspect x.pt --out x.png"])
def test_a_picture_without_matplotlib(words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = complaint(*words.split())
    assert "argument --out: pictures need matplotlib, which is not installed: pip install 'matplotlib>=3.8'" in found
    assert list(folder.iterdir()) == []
