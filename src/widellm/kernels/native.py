"""Loads the native library and mirrors its structs (csrc/abi.h) for ctypes. Import has no side effects."""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
from ctypes import POINTER, Structure, byref, c_double, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from widellm.errors import BackendError

ABI = 5
LEVELS = {"portable": 0, "avx2": 1, "avx512bf16": 2}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
INT8 = 2
MASKS = {torch.bool: 1, torch.float32: 2, torch.bfloat16: 3}
GRAIN = 32768  # multiply-adds worth a thread: a few microseconds
MAX_SHARED_HEADS = 128  # query heads per KV head that the attention kernels can hold


@dataclass(frozen=True, slots=True, eq=False)
class Int8:
    """A weight [N, K] in int8 with one scale per output: w[n, k] = q[n, k] * scale[n]."""

    q: torch.Tensor
    """int8 [N, K]"""
    scale: torch.Tensor
    """float32 [N], contiguous"""

    @property
    def shape(self) -> torch.Size:
        """[N, K]"""
        return self.q.shape

    @property
    def ndim(self) -> int:
        """2, for a weight that fits."""
        return self.q.ndim

    def __getitem__(self, rows: slice) -> Int8:
        return Int8(self.q[rows], self.scale[rows])

    def dense(self) -> torch.Tensor:
        """float32 [N, K]"""
        return self.q * self.scale.unsqueeze(1)


Weight = torch.Tensor | Int8


def _struct(name: str, fields: str) -> type[Structure]:
    """A struct of `i.` int64, `d.` double and `p.` pointer fields, named after the dot, in the order of abi.h."""
    kinds = {"i": c_int64, "d": c_double, "p": c_void_p}
    parts = [
        (f[2:], kinds[f[0]]) if f[1] == "." else (f.split(":")[0], NESTED[f.split(":")[1]]) for f in fields.split()
    ]
    return type(name, (Structure,), {"_fields_": parts})


NESTED: dict[str, type[Structure]] = {}
NESTED["Router"] = Router = _struct("Router", "p.down p.up p.bias i.rank i.act i.shared d.threshold")
NESTED["Run"] = Run = _struct("Run", "i.level i.threads i.dtype i.weights")
Ffn = _struct(
    "Ffn",
    "run:Run i.act i.rows i.hidden i.inner i.groups p.x i.ldx p.gate i.ldgate p.up i.ldup p.down i.lddown "
    "i.down_input_major p.gate_bias p.up_bias p.down_bias p.gate_scale p.up_scale p.down_scale "
    "p.keep i.ldkeep router:Router p.keep_out p.out i.ldout",
)
In = _struct(
    "In",
    "run:Run i.rows i.inputs i.outputs i.groups p.x i.ldx p.w i.ldw p.bias p.scale p.keep i.ldkeep p.out i.ldout",
)
Out = _struct(
    "Out",
    "run:Run i.rows i.inputs i.outputs i.groups p.x i.ldx p.w i.ldw i.input_major p.bias p.scale p.keep i.ldkeep "
    "p.out i.ldout",
)
Attention = _struct(
    "Attention",
    "run:Run i.batch i.queries i.keys i.heads i.kv_heads i.head_dim i.groups "
    "p.q i.q_batch i.q_token i.q_head p.k i.k_batch i.k_token i.k_head p.v i.v_batch i.v_token i.v_head "
    "p.out i.out_batch i.out_token i.out_head p.keep i.ldkeep p.mask i.mask_kind i.mask_batch i.mask_query "
    "p.start i.causal i.window d.scale",
)
Layer = _struct(
    "Layer",
    "run:Run i.act i.hidden i.inner i.heads i.kv_heads i.head_dim i.rotary_dim i.attn_groups i.ffn_groups "
    "i.reads_stream i.one_decision d.attn_eps d.ffn_eps d.qk_eps d.scale p.attn_norm p.ffn_norm p.q_norm p.k_norm "
    "p.wq i.ldq p.wk i.ldk p.wv i.ldv p.wo i.ldo i.o_input_major p.bq p.bk p.bv p.bo "
    "p.gate i.ldgate p.up i.ldup p.down i.lddown i.down_input_major p.gate_bias p.up_bias p.down_bias "
    "p.q_scale p.k_scale p.v_scale p.o_scale p.gate_scale p.up_scale p.down_scale "
    "attn_router:Router ffn_router:Router",
)
Qkv = _struct("Qkv", "i.batch i.tokens p.x i.ldx p.cosine p.sine i.rope_batch p.q p.k p.v p.keep")
Rest = _struct(
    "Rest",
    "i.batch i.tokens i.keys p.x i.ldx p.q p.keep p.k i.k_batch i.k_token i.k_head p.v i.v_batch i.v_token i.v_head "
    "p.mask i.mask_kind i.mask_batch i.mask_query p.start i.causal i.window p.out p.ffn_keep i.attention_only",
)
Stack = _struct(
    "Stack",
    "i.count i.threads p.layers i.batch i.tokens i.keys p.x p.cosine p.sine i.rope_batch p.k p.v "
    "i.kv_batch i.kv_token i.kv_head p.mask i.mask_kind i.mask_batch i.mask_query i.causal p.out p.keep p.ffn_keep",
)

_FUNCTIONS = {
    "widellm_abi": [],
    "widellm_few_rows": [],
    "widellm_level": [c_int64],
    "widellm_team": [c_int64],
    "widellm_large_pages": [c_void_p, c_int64],
    "widellm_release_scratch": [],
    "widellm_fill_scratch": [c_int64],
    "widellm_routed_ffn": [POINTER(Ffn)],
    "widellm_routed_in": [POINTER(In)],
    "widellm_routed_out": [POINTER(Out)],
    "widellm_routed_attention": [POINTER(Attention)],
    "widellm_layer_qkv": [POINTER(Layer), POINTER(Qkv)],
    "widellm_layer_rest": [POINTER(Layer), POINTER(Rest)],
    "widellm_layer_step": [POINTER(Layer), POINTER(Qkv), POINTER(Rest)],
    "widellm_stack_step": [POINTER(Stack)],
}


@functools.cache
def _open() -> tuple[ctypes.CDLL | None, str]:
    """The library, or why there is none. Opened after torch, so that both use the OpenMP library torch brought."""
    here = Path(__file__).parent
    files = [p for s in importlib.machinery.EXTENSION_SUFFIXES if (p := here / f"_native{s}").is_file()]
    if not files:
        return None, "the native library was not built: no C++17 compiler was found when widellm was installed"
    try:
        lib = ctypes.CDLL(str(files[0]))
        for name, arguments in _FUNCTIONS.items():
            function = getattr(lib, name)
            function.argtypes = arguments
            function.restype = c_int64
    except (OSError, AttributeError) as error:
        return None, f"the native library {files[0].name} cannot be loaded: {error}"
    if lib.widellm_abi() != ABI:
        return None, f"the native library {files[0].name} is from another version of widellm: install widellm again"
    return lib, ""


@functools.cache
def _level(isa: str | None) -> int:
    lib = library()
    if isa is None:
        return int(lib.widellm_level(max(LEVELS.values())))
    if isa not in LEVELS:
        raise BackendError(f"instruction set {isa!r} is not known; known: {', '.join(LEVELS)}")
    if lib.widellm_level(LEVELS[isa]) != LEVELS[isa]:
        raise BackendError(f"instruction set {isa!r} is not available on this CPU; available: {', '.join(levels())}")
    return LEVELS[isa]


@functools.cache
def availability() -> tuple[bool, str]:
    """(can the native backend run here, the instruction set it uses or why it is missing)."""
    lib, why = _open()
    return (False, why) if lib is None else (True, f"native C++ kernels, {levels()[-1]}")


def library() -> ctypes.CDLL:
    """The loaded library. Raises BackendError with the reason when there is none."""
    lib, why = _open()
    if lib is None:
        raise BackendError(f"backend 'cpu' cannot run here: {why}")
    return lib


def levels() -> list[str]:
    """Instruction sets that the library has kernels for and this CPU can run, slowest first."""
    lib = library()
    return [name for name, level in LEVELS.items() if lib.widellm_level(level) == level]


@functools.cache
def few_rows() -> int:
    """Up to this many rows (inclusive) the kernels of few rows run, and `FusedLayer` can be used."""
    return int(library().widellm_few_rows())


def large_pages(t: torch.Tensor) -> int:
    """Ask the system to hold a dense CPU tensor's memory (and what shares a page with it) in large pages, in place.

    Returns how many pages it did so: 0 where it cannot (only Linux can, and not for a mapped file).
    """
    return int(library().widellm_large_pages(t.data_ptr(), t.numel() * t.element_size()))


def run_fields(dtype: torch.dtype, isa: str | None, work: int, *weights: Weight | None) -> Structure:
    """The `Run` struct: instruction set, number of threads, dtypes. Raises BackendError by name.

    weights: all of the call's, for they are int8 together or not at all. Threads: torch's current number, fewer when
    `work` (multiply-adds) would not give each its GRAIN.
    """
    if dtype not in DTYPES:
        raise BackendError(f"backend 'cpu' computes in float32 or bfloat16, got {dtype}")
    int8 = isinstance(weights[-1], Int8) if weights else False
    if any(w is not None and isinstance(w, Int8) != int8 for w in weights):
        raise BackendError("backend 'cpu' multiplies weights that are all int8, or none of them")
    threads = min(torch.get_num_threads(), 1 + work // GRAIN)
    return Run(_level(isa), threads, DTYPES[dtype], INT8 if int8 else DTYPES[dtype])


def call(name: str, *structs: Structure) -> None:
    """Call an exported function. Raises MemoryError when scratch memory cannot be had."""
    code = getattr(library(), name)(*map(byref, structs))
    if code == 1:
        raise MemoryError(f"{name}: out of memory")
    if code:
        raise BackendError(f"{name}: this instruction set is not available")
