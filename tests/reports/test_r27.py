"""R27: the first request waited for a compiler, and that compiler had to be installed.

Import touches no GPU, compiler or optional package and starts no process; attention runs with
nothing on the path; once each kind of step has run, no batch compiles anything. (The wheel's size
and the time of an import: tests/test_imports.py.)
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core import event

import pageant
from pageant import Layer

ROOT = Path(__file__).parents[2]
HEAVY = (
    "triton",
    "transformers",
    "flashinfer",
    "vllm",
    "numba",
    "typer",
    "rich",
    "torch._inductor",
    "torch._dynamo",
    "torch.utils.cpp_extension",
)

# Any process started from here on ends the program.
GUARD = """
import sys
import torch
seen = set(sys.modules)

def refuse(event, args):
    if event in ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork"):
        raise SystemExit(f"{event} {args}")

sys.addaudithook(refuse)
import pageant
"""
LOADED = """
print([name for name in HEAVY if name in sys.modules and name not in seen])
print(torch.cuda.is_initialized())
"""
ATTENTION = """
attn = pageant.Attention(
    pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32),
    pageant.CacheSpec(page_size=4, format="fp8"),
)
kv = attn.new_cache(num_layers=1, num_pages=1)
for m, n in ((3, 3), (1, 4)):
    plan = attn.plan(pageant.Batch.from_lengths([m], [n], [[0]], page_size=4))
    rows = torch.full((m, 1, 16), float(n))
    attn.write(plan, kv[0], rows, rows)
    print(attn.run(plan, torch.zeros(m, 2, 16), kv[0])[-1, 0, 0].item())
print({row.name for row in attn.explain().rows.values()}, torch.cuda.is_initialized())
"""


def alone(code, path):
    """What a new interpreter prints that finds no program and no GPU."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PATH": str(path), "CUDA_VISIBLE_DEVICES": "", "CC": "", "CXX": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_import_loads_nothing_heavy(tmp_path):
    assert alone(f"{GUARD}\nHEAVY = {HEAVY}\n{LOADED}", tmp_path) == ["[]", "False"]


def test_the_guard_sees_processes(tmp_path):
    code = GUARD + "import subprocess\nsubprocess.run(['true'])"
    with pytest.raises(AssertionError, match=r"subprocess\.Popen"):
        alone(code, tmp_path)


def test_attention_needs_no_compiler(tmp_path):
    """Not even in a fresh place, where no compiled code of an earlier run lies."""
    code = f"import os\nos.environ['NUMBA_CACHE_DIR'] = {str(tmp_path / 'code')!r}\n"
    *means, kernels = alone(code + GUARD + ATTENTION, tmp_path)
    assert means == ["3.0", "3.25"]
    assert "cpu.decode" in kernels
    assert kernels.endswith("False")


def test_what_an_install_brings():
    listed = re.search(
        r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.S | re.M
    )
    names = set(re.findall(r'"([\w-]+)', listed[1]))
    assert names == {"torch", "numpy", "numba"}


LAYERS = (Layer(), Layer(window=5, sinks=torch.zeros(4)), Layer(soft_cap=2.0))
lengths = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), max_size=4)


@pytest.mark.parametrize("format", ["auto", "fp8_e4m3", "nvfp4"])
def test_random_batches_compile_nothing(format):
    """After one step of decodes and one of prefills: 1,000 batches of any lengths and pages."""
    attn = pageant.Attention(
        pageant.Shape(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32),
        pageant.CacheSpec(page_size=4, format=format),
        pageant.Limits(max_requests=4, max_tokens=36, max_seq_len=64),
        pageant.Features.of(LAYERS, lse=True),
        pageant.Options(speculative_tokens=3),
    )
    kv = attn.new_cache(num_layers=1, num_pages=64)[0]
    q, rows = torch.zeros(36, 4, 16), torch.ones(36, 2, 16)

    def step(pairs, first_page=0):
        table = [[(first_page + 15 * r + i) % 64 for i in range(15)] for r in range(len(pairs))]
        query_lens, lens = [m for m, _ in pairs], [n for _, n in pairs]
        plan = attn.plan(pageant.Batch.from_lengths(query_lens, lens, table, 4))
        attn.write(plan, kv, rows, rows)
        for layer in LAYERS:
            attn.run(plan, q[: sum(query_lens)], kv, layer, return_lse=True)

    with event.install_recorder("numba:compile") as warm:
        step([(1, 9), (2, 60)])
        step([(9, 9)])
    compiled = len(warm.buffer)

    @settings(max_examples=1000)
    @given(lengths, st.integers(0, 63))
    def compiles_nothing(pairs, first_page):
        step(pairs, first_page)

    with event.install_recorder("numba:compile") as recorder:
        compiles_nothing()
    assert not recorder.buffer, f"{len(recorder.buffer)} events after {compiled} in the warm-up"


def test_the_recorder_sees_compilation():
    import numba

    with event.install_recorder("numba:compile") as recorder:
        numba.njit(lambda x: x + 1)(1)
    assert recorder.buffer
