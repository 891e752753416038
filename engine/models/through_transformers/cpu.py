"""The layers of a `transformers` model as C operations on a CPU.

All operations are one `Program`, of which each layer runs its part, from Python. Calls cost as much
as the arithmetic of a small model, so several layers become one part where the code of a module is
one that we know (`_MLPS`, `_ATTENTIONS`, `_LAYERS`, `_MODELS`), and so what it computes: modules of
attention, MLPs, and, where few rows are computed, runs of whole decoder layers. Others run as the
library has them, with our products, and norms and attention that we know.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Sequence
from ctypes import Structure
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import SiLUActivation
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.seed_oss import modeling_seed_oss as seed_oss
from transformers.models.smollm3.modeling_smollm3 import SmolLM3Attention
from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2Attention

from penstock.engine.layers.attention import ForwardContext
from penstock.engine.models.through_transformers.modules import (
    ModuleEmbedding,
    ModuleLinear,
    PagedAttention,
)
from penstock.engine.parallel.ranks import ALONE, Ranks, SharedRanks
from penstock.engine.program.cpu_backend import RankSums, pack_matrix
from penstock.engine.program.cpu_matrices import (
    CpuMatrix,
    PackedLinear,
    QuantizedLinear,
    StackedLinear,
)
from penstock.engine.program.operands import write_sum
from penstock.kernels.cpu.library import LANES, MAX_HEAD_DIM, CpuLibrary, Product
from penstock.kernels.cpu.program import CpuProgram
from penstock.kernels.program import Buffer, Place

# As in `cpu_model`. Threads are woken for less work, since they still spin after the last part.
_READ_BYTES_PER_S, _PRODUCTS_PER_S = 20e9, 100e9
_MIN_SHARED_S = 15e-6
_MAX_CHAINED_ROWS = 64  # with more, waking the threads is little of a step's time


_NEVER_CALLED = "eager_attention_forward"  # attention is ours


@cache
def _meaning(function: Callable[..., Any], depth: int = 3) -> tuple[object, ...]:
    """What a function computes, to be compared: its code, with that of functions of the same file
    that it calls, and which objects of other files it names."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType) or depth == 0:
        return (id(function),)
    code, known = function.__code__, function.__globals__
    named = [known[name] for name in code.co_names if name in known and name != _NEVER_CALLED]
    others = [
        _meaning(each, depth - 1)
        if isinstance(each, FunctionType) and each.__module__ == function.__module__
        else id(each)
        for each in named
    ]
    numbers = repr([each for each in code.co_consts if each != function.__doc__])
    return code.co_code, code.co_names, code.co_varnames, numbers, function.__defaults__, *others


def _meanings(*kinds: type[nn.Module]) -> list[tuple[object, ...]]:
    return [_meaning(kind.forward) for kind in kinds]


# What the library writes anew for each architecture, mostly with the same code.
_NORMS = _meanings(llama.LlamaRMSNorm, Olmo2RMSNorm, HeliumRMSNorm)
_MLPS = _meanings(llama.LlamaMLP, seed_oss.SeedOssMLP)
_ATTENTIONS = _meanings(
    llama.LlamaAttention, mistral.MistralAttention, qwen2.Qwen2Attention,
    seed_oss.SeedOssAttention, SmolLM3Attention, Starcoder2Attention,
)  # fmt: skip
_NORMED_ATTENTIONS = _meanings(Qwen3Attention)  # queries and keys have norms
_LAYERS = _meanings(llama.LlamaDecoderLayer)
_MODELS = _meanings(llama.LlamaModel, mistral.MistralModel, qwen2.Qwen2Model)


def _is_one_of(module: nn.Module, meanings: Sequence[tuple[object, ...]]) -> bool:
    return "forward" not in vars(module) and _meaning(type(module).forward) in meanings


class CpuParts:
    """The program that the layers of a model share, and the inputs of a step.

    Args:
        block_size: of the KV cache.
    """

    def __init__(self, library: CpuLibrary, block_size: int) -> None:
        self.library, self.block_size = library, block_size
        self.program = CpuProgram(library)
        self.products: set[Product] = set()  # with what was packed
        self.weight_bytes = 0
        self._attentions: list[tuple[int, Structure]] = []  # by layer, what names its cache
        self._capacity, self._pool = 0, 0
        self._given: tuple[object, ...] = ()
        self._rotary: Tensor | None = None
        self._tables: tuple[Tensor, ...] = ()

    def reserve(self, num_rows: int) -> None:
        """Make room for so many rows in the program as it is by now."""
        if num_rows > self._capacity:
            self.library.settle()
            self._capacity = 0  # in case memory is too short
            capacity = max(16, 1 << (num_rows - 1).bit_length())
            self.program.record(capacity)
            self._capacity = capacity

    def forget_room(self) -> None:
        """Operations were added."""
        self._capacity = 0

    def begin(self, input_ids: Tensor, context: ForwardContext) -> None:
        """Point the program at the inputs of a step."""
        self.library.settle()  # a late thread may still read those of the last one
        layout, step = context.layout, self.program.step
        if context.kv_pool.data_ptr() != self._pool:
            self._pool = context.kv_pool.data_ptr()
            for layer, args in self._attentions:
                keys, values = context.cache(layer)
                args.key_cache, args.value_cache = keys.data_ptr(), values.data_ptr()
        step.num_tokens, step.num_seqs = len(input_ids), layout.num_seqs
        step.table_stride = layout.block_tables.stride(0)
        step.token_ids = input_ids.data_ptr()
        step.slot_mapping = layout.slot_mapping.data_ptr()
        step.query_start_loc = layout.query_start_loc.data_ptr()
        step.seq_lens = layout.seq_lens.data_ptr()
        step.block_tables = layout.block_tables.data_ptr()
        self._given = (input_ids, context)  # keeps the memory alive
        self._rotary, self._tables = None, ()

    def rotate_by(self, cosines: Tensor | None, sines: Tensor | None, head_dim: int) -> None:
        """What attention rotates by, [1, num_tokens, head_dim] with equal halves; None: it does
        not."""
        step = self.program.step
        if self._tables and cosines is self._rotary:
            return
        if cosines is None or sines is None:
            tables = (torch.ones(1, head_dim // 2), torch.zeros(1, head_dim // 2))
            rows = torch.zeros(step.num_tokens, dtype=torch.int64)
        else:
            half = slice(0, head_dim // 2)
            tables = (cosines[0, :, half].float(), sines[0, :, half].float())
            rows = torch.arange(step.num_tokens)
        cosine_table, sine_table = (each.contiguous() for each in tables)
        step.cosines, step.sines = cosine_table.data_ptr(), sine_table.data_ptr()
        step.rotary_rows = rows.data_ptr()
        self._rotary, self._tables = cosines, (cosine_table, sine_table, rows)

    def add_attention(
        self,
        program: CpuProgram,
        qkv: Buffer,
        module: PagedAttention,
        *,
        norms: dict[str, Any] | None = None,
        out: Buffer | None = None,
    ) -> Structure:
        """Store keys and values, then attend; the arguments, whose `out` is to be set if None."""
        size = module.head_dim
        heads: dict[str, Any] = {
            "query": program.buffer(f"query {module.num_heads * size}", module.num_heads * size),
            "block_size": self.block_size, "num_heads": module.num_heads,
            "num_kv_heads": module.num_kv_heads, "head_dim": size, "is_int8": module.is_int8,
            "key_scales": module.key_scale, "value_scales": module.value_scale,
        }  # fmt: skip
        store = program.add("rope_store", qkv=qkv, **(norms or {}), **heads)
        attend = program.add(
            "attention", out=out, window=module.window or 0, scale=module.scale,
            soft_cap=module.soft_cap or 0.0, **heads,
        )  # fmt: skip
        self._attentions += [(module.layer, store), (module.layer, attend)]
        self._pool = 0  # to be pointed at
        return attend


class Part:
    """A part of the program: rows in, rows out.

    Args:
        x: the buffer of its inputs.
        write: adds the operations for a number of rows; returns the arguments and the name of
            the address of the result, or the buffer of the result.
        linears: its matrices.
        ranks: over which the result is summed.
    """

    def __init__(
        self,
        parts: CpuParts,
        x: Buffer,
        out_size: int,
        write: Callable[[ctypes.c_int64], tuple[Structure, str] | Buffer],
        linears: Sequence[CpuMatrix] = (),
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        self._parts, self._x, self._out_size, self._linears = parts, x, out_size, linears
        self._num_rows = ctypes.c_int64(0)
        self._first = len(parts.program)
        self._result = write(self._num_rows)
        self._end = len(parts.program)
        parts.forget_room()

    def rows(self, num_rows: int) -> Tensor:
        """Where the inputs belong: [num_rows, in_size]. They stay in place, since a descheduled
        thread may read them late."""
        self._parts.reserve(num_rows)
        return self._x.rows[:num_rows]

    def run(self, num_rows: int) -> Tensor:
        """The result for the inputs in `rows`: [num_rows, out_size]"""
        self._num_rows.value = num_rows
        is_shared, result = _is_worth_sharing(self._linears, num_rows), self._result
        if isinstance(result, Buffer):
            self._parts.program.run_part(self._first, self._end, is_shared=is_shared)
            return self._ranks.sum(result.rows[:num_rows].clone())
        y = self._x.rows.new_empty(num_rows, self._out_size)
        args, name = result
        setattr(args, name, y.data_ptr())
        self._parts.program.run_part(self._first, self._end, is_shared=is_shared)
        return self._ranks.sum(y)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in_size] → [..., out_size]"""
        flat = x.reshape(-1, x.shape[-1])
        self.rows(len(flat)).copy_(flat)
        return self.run(len(flat)).view(*x.shape[:-1], self._out_size)


def _is_worth_sharing(linears: Sequence[CpuMatrix], num_rows: int) -> bool:
    """Whether these products take one thread long enough to share them with the others."""
    seconds = 0.0
    for each in linears:
        products = each.in_features * each.out_features * num_rows
        seconds += max(each.num_bytes / _READ_BYTES_PER_S, products / _PRODUCTS_PER_S)
        if seconds > _MIN_SHARED_S:
            return True
    return not linears


# Beside operations on each number, and views. Reductions are here whose one dimension is the last.
_ROWWISE = {
    "arange", "cat", "copy_", "detach_", "dropout", "embedding", "empty_like", "layer_norm", "mean",
    "new_empty", "ones", "repeat_interleave", "stack", "type_as", "zeros",
}  # fmt: skip


class OthersThanRowwise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the operations of torch whose result for a row may depend on the other rows, above
    all products of matrices, which sum in another order for another number of rows.

    Attributes:
        names: such as "linear".
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        is_rowwise = torch.Tag.pointwise in func.tags or func.is_view or name in _ROWWISE
        if name == "mean" and list(args[1]) not in ([-1], [args[0].dim() - 1]):
            is_rowwise = False
        # Frequencies times positions: nothing is summed.
        if name in ("matmul", "bmm", "mm") and args[0].shape[-1] == 1:
            is_rowwise = True
        if not is_rowwise:
            self.names.add(name)
        return func(*args, **(kwargs or {}))


def use_kernels(
    model: nn.Module,
    library: CpuLibrary,
    block_size: int,
    *,
    has_chain: bool = True,
) -> CpuParts:
    """Compute the linear layers, norms and attention of a model by the CPU's kernels, which take
    over the weights.

    Args:
        has_chain: let whole layers run together where few rows are computed.
    """
    parts = CpuParts(library, block_size)
    modules = list(model.modules())
    packed = _pack(modules, parts)
    norms: dict[nn.Module, dict[str, Any]] = {}
    for module in modules:
        if isinstance(module, PagedAttention) and can_attend(module, block_size):
            module.kernel = _attention(parts, module)
        elif _is_one_of(module, _NORMS) and (found := _norm(module, library)) is not None:
            module.forward, norms[module] = found
    fused = {}
    for module in modules:
        whole = _fuse_mlp(parts, module, packed) or _fuse_attention(parts, module, packed, norms)
        if whole is not None:
            fused[module] = whole
    if has_chain:
        for module in modules:
            if _is_one_of(module, _MODELS):
                _chain_layers(parts, list(module.layers), fused, norms)  # type: ignore[arg-type]
    return parts


def can_attend(module: PagedAttention, block_size: int) -> bool:
    """Whether the kernels support its shapes."""
    is_right = module.head_dim % LANES == 0 and module.head_dim <= MAX_HEAD_DIM
    return is_right and block_size % 2 == 0 and not module.has_sinks


def _pack(modules: Sequence[nn.Module], parts: CpuParts) -> dict[nn.Module, CpuMatrix]:
    """The matrices of linear layers; an embedding that is one of them is looked up there."""
    tables = {id(each.weight): each for each in modules if isinstance(each, ModuleEmbedding)}
    packed: dict[nn.Module, CpuMatrix] = {}
    for module in modules:
        if not isinstance(module, ModuleLinear) or module.in_features % 2:
            continue
        table = tables.get(id(module.weight))
        linear = pack_matrix(parts.library, module)
        parts.products |= linear.products
        packed[module] = linear
        parts.weight_bytes += linear.num_bytes
        module.compute = _product(parts, linear)
        if table is not None and isinstance(linear, PackedLinear | QuantizedLinear):
            table.drop()
            table.compute = _lookup(parts, linear, table)
    return packed


def _product(parts: CpuParts, linear: CpuMatrix) -> Part:
    x = parts.program.buffer(f"inputs {linear.in_features}", linear.in_features)

    def write(num_rows: ctypes.c_int64) -> tuple[Structure, str] | Buffer:
        if isinstance(linear, StackedLinear):
            y = parts.program.buffer(f"outputs {linear.out_features}", linear.out_features)
            linear.write(parts.program, y, x, num_rows=num_rows)
            return y
        return linear.write(parts.program, None, x, num_rows=num_rows), "y"

    return Part(parts, x, linear.out_features, write, [linear])


def _lookup(
    parts: CpuParts, table: PackedLinear | QuantizedLinear, module: ModuleEmbedding
) -> Callable[[Tensor], Tensor]:
    """Rows of a table for the tokens of a step; zeros for those that other ranks have."""
    ids = {"first_id": module.first_id, "num_ids": module.num_ids}
    y = parts.program.buffer(f"inputs {table.in_features}", table.in_features)
    first = len(parts.program)
    table.write_lookup(parts.program, y, **ids)
    end = len(parts.program)

    def compute(token_ids: Tensor) -> Tensor:
        num_tokens = token_ids.numel()
        parts.reserve(num_tokens)
        parts.program.run_part(first, end, is_shared=False)
        return y.rows[:num_tokens].clone().view(*token_ids.shape, -1)

    return compute


def _attention(parts: CpuParts, module: PagedAttention) -> Callable[..., Tensor]:
    """Of queries, keys and values that the library has rotated."""
    size = (module.num_heads + 2 * module.num_kv_heads) * module.head_dim
    qkv = parts.program.buffer(f"qkv {size}", size)
    part = Part(
        parts,
        qkv,
        module.num_heads * module.head_dim,
        lambda _: (parts.add_attention(parts.program, qkv, module), "out"),
    )

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        num_tokens = len(query)
        rows = part.rows(num_tokens).view(num_tokens, -1, module.head_dim)
        torch.cat((query, key, value), dim=1, out=rows)
        parts.rotate_by(None, None, module.head_dim)
        return part.run(num_tokens).view(num_tokens, -1, module.head_dim)

    return attend


def _norm(
    module: nn.Module, library: CpuLibrary
) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]] | None:
    """A norm of the library by our kernel, and the kernel's arguments; None: in another dtype."""
    weight = module.get_parameter("weight")
    if weight.dtype != library.dtype:
        return None
    given: dict[str, Any] = {"weight": weight, "size": len(weight), "eps": module.variance_epsilon}
    args = library.structure("rms_norm_args", **given)
    count = ctypes.c_int64(0)
    args.num_rows = ctypes.addressof(count)
    call = library.call("rms_norm", args)

    def compute(x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        args.x, args.y, count.value = x.data_ptr(), y.data_ptr(), x.numel() // x.shape[-1]
        library.run_calls(ctypes.byref(call), 1, False)
        return y

    compute.keeps = (args, count, weight)  # type: ignore[attr-defined]
    return compute, given


@dataclass(frozen=True, slots=True)
class _Fused:
    """What a module computes, as operations.

    Attributes:
        write: adds them to a program, from rows to rows (None: to be set in the result); returns
            the arguments of the last one.
        linears: its matrices.
        ranks: over which its result is summed.
        head_dim: that its input is rotated by; 0: it is not attention.
    """

    write: Callable[..., Structure]
    linears: Sequence[CpuMatrix]
    ranks: Ranks
    head_dim: int = 0


def _operands(
    module: nn.Module, names: Sequence[str], packed: dict[nn.Module, CpuMatrix]
) -> list[CpuMatrix]:
    """The matrices of a module's layers; none if one of them stays with torch, or if all ranks'
    results are put side by side."""
    layers = [getattr(module, name) for name in names]
    if layers[-1] not in packed or layers[-1].gathered_size:
        return []
    return [packed[each] for each in layers] if all(each in packed for each in layers) else []


def _fuse_mlp(parts: CpuParts, module: Any, packed: dict[nn.Module, CpuMatrix]) -> _Fused | None:
    """Make a gated MLP one part."""
    if not _is_one_of(module, _MLPS) or not isinstance(module.act_fn, nn.SiLU | SiLUActivation):
        return None
    linears = _operands(module, ("gate_proj", "up_proj", "down_proj"), packed)
    if not linears or {each.out_features for each in linears[:2]} != {linears[2].in_features}:
        return None
    first, last, ranks = linears[:2], linears[2], module.down_proj.ranks

    def write(program: CpuProgram, y: Place | None, x: Buffer, **rows: Any) -> Structure:
        gate_up = program.buffer(f"gate_up {2 * last.in_features}", 2 * last.in_features)
        gated = program.buffer(f"gated {last.in_features}", last.in_features)
        StackedLinear(first).write(program, gate_up, x, **rows)
        program.add("silu_mul", y=gated, x=gate_up, size=gated.size, **rows)
        product: Structure = last.write(program, y, gated, **rows)
        return product

    def write_part(num_rows: ctypes.c_int64) -> tuple[Structure, str] | Buffer:
        if isinstance(last, StackedLinear):
            y = parts.program.buffer(f"outputs {last.out_features}", last.out_features)
            write(parts.program, y, x, num_rows=num_rows)
            return y
        return write(parts.program, None, x, num_rows=num_rows), "y"

    x = parts.program.buffer(f"inputs {last.out_features}", first[0].in_features)
    part = Part(parts, x, last.out_features, write_part, [*first, last], ranks)
    module.forward = part
    return _Fused(write, (*first, last), ranks)


def _fuse_attention(
    parts: CpuParts,
    parent: Any,
    packed: dict[nn.Module, CpuMatrix],
    norms: dict[nn.Module, dict[str, Any]],
) -> _Fused | None:
    """Make a module of attention one part."""
    is_normed = _is_one_of(parent, _NORMED_ATTENTIONS)
    if not is_normed and not _is_one_of(parent, _ATTENTIONS):
        return None
    if not getattr(parent, "use_rope", True):  # SmolLM3: of each layer
        return None
    linears = _operands(parent, ("q_proj", "k_proj", "v_proj", "o_proj"), packed)
    module = getattr(parent, "paged_attention", None)
    # Images' tokens that see each other are what only `PagedAttention` offers.
    if not linears or module is None or module.kernel is None or module.has_bidirectional_images:
        return None
    first, last, ranks, size = linears[:3], linears[3], parent.o_proj.ranks, module.head_dim
    sizes = [count * size for count in (module.num_heads, *(2 * [module.num_kv_heads]))]
    is_right = [each.out_features for each in first] == sizes and last.in_features == sizes[0]
    if not is_right or isinstance(last, StackedLinear):
        return None
    given: dict[str, Any] = {}
    if is_normed:
        query, key = norms.get(parent.q_norm), norms.get(parent.k_norm)
        if query is None or key is None:
            return None
        given = {"query_norm": query["weight"], "key_norm": key["weight"], "eps": query["eps"]}

    def write(program: CpuProgram, y: Place | None, x: Buffer, **rows: Any) -> Structure:
        qkv, mixed = (
            program.buffer(f"{name} {width}", width)
            for name, width in (("qkv", sum(sizes)), ("mixed", sizes[0]))
        )
        StackedLinear(first).write(program, qkv, x, **rows)
        parts.add_attention(program, qkv, module, norms=given, out=mixed)
        product: Structure = last.write(program, y, mixed, **rows)
        return product

    theirs = parent.forward

    def forward(
        hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **others: Any
    ) -> tuple[Tensor, Any]:
        if position_embeddings[0].shape[-1] != size:  # only a part of a head is rotated
            found: tuple[Tensor, Any] = theirs(
                hidden_states=hidden_states, position_embeddings=position_embeddings, **others
            )
            return found
        parts.rotate_by(*position_embeddings, head_dim=size)
        return part(hidden_states), None

    def write_part(num_rows: ctypes.c_int64) -> tuple[Structure, str]:
        return write(parts.program, None, x, num_rows=num_rows), "y"

    x = parts.program.buffer(f"inputs {last.out_features}", first[0].in_features)
    part = Part(parts, x, last.out_features, write_part, [*first, last], ranks)
    parent.forward = forward
    return _Fused(write, (*first, last), ranks, head_dim=size)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A decoder layer as operations `first` to before `end` of a chain's program."""

    place: int
    module: nn.Module
    theirs: Callable[..., Any]
    linears: Sequence[CpuMatrix]
    head_dim: int
    first: int
    end: int


class _Chain:
    """Decoder layers that follow each other, in a model whose code hands on each one's result: the
    first one of a run computes all, and the others hand on what they are given.

    Args:
        ranks: over which the results of attention and of the MLPs are summed.
    """

    def __init__(self, parts: CpuParts, size: int, ranks: Ranks) -> None:
        self._parts, self._size = parts, size
        # Two sums a layer, so the two places of `RankSums` take turns wherever a run begins.
        self._sums = RankSums(parts.library, ranks) if isinstance(ranks, SharedRanks) else None
        if self._sums is not None:
            self._sums.begin(_MAX_CHAINED_ROWS, size)
        self._program = CpuProgram(parts.library, parts.program.step)
        self._streams = [self._program.buffer(f"stream {turn}", size) for turn in range(2)]
        self._layers: list[_Layer] = []
        self._handed_on = range(0)  # numbers of layers that are computed already

    def add(
        self,
        place: int,
        layer: nn.Module,
        attention: _Fused,
        mlp: _Fused,
        norms: Sequence[dict[str, Any]],
    ) -> None:
        """Append the operations of y = x + attention(norm(x)), y + mlp(norm(y)). Sums are rounded
        where torch rounds them.

        Args:
            place: the layer's number in the model.
        """
        program, size, number = self._program, self._size, len(self._layers)
        first, x, y = len(program), self._streams[number % 2], self._streams[1 - number % 2]
        normed, product, attended = (
            program.buffer(name, size) for name in ("normed", "product", "attended")
        )
        for norm, module, before, after in (
            (norms[0], attention, x, attended),
            (norms[1], mlp, attended, y),
        ):
            program.add("rms_norm", y=normed, x=before, **norm)
            if self._sums is None:
                module.write(program, product, normed)
            else:
                module.write(program, self._sums.part(program, size), normed)
                write_sum(self._sums, program, product, size)
            program.add("scale_add", y=after, x=product, residual=before, factor=1.0, size=size)
        linears = (*attention.linears, *mlp.linears)
        found = _Layer(
            place, layer, layer.forward, linears, attention.head_dim, first, len(program)
        )
        self._layers.append(found)
        layer.forward = partial(self, number=number)

    def record(self) -> None:
        """No layers will be added."""
        self._program.record(_MAX_CHAINED_ROWS)

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        number: int,
        position_embeddings: tuple[Tensor, Tensor],
        **others: Any,
    ) -> Tensor:
        """Layer `number`: [1, num_rows, size] → the same shape"""
        if number in self._handed_on:
            return hidden_states
        self._handed_on = range(0)
        layer, num_rows = self._layers[number], hidden_states.shape[1]
        is_whole = position_embeddings[0].shape[-1] == layer.head_dim
        if num_rows > _MAX_CHAINED_ROWS or not is_whole:
            result: Tensor = layer.theirs(
                hidden_states, position_embeddings=position_embeddings, **others
            )
            return result
        stop = number + 1
        while stop < len(self._layers) and not self._is_between(stop):
            stop += 1
        self._handed_on = range(number + 1, stop)
        layers = self._layers[number:stop]
        self._streams[number % 2].rows[:num_rows].copy_(hidden_states[0])
        self._parts.rotate_by(*position_embeddings, head_dim=layer.head_dim)
        linears = [linear for each in layers for linear in each.linears]
        is_shared = _is_worth_sharing(linears, num_rows)
        self._program.run_part(layers[0].first, layers[-1].end, is_shared=is_shared)
        return self._streams[stop % 2].rows[:num_rows].view(hidden_states.shape)

    def _is_between(self, number: int) -> bool:
        """Whether there is a layer of another kind before layer `number`, or a hook, by which ranks
        meet, for one."""
        before, after = self._layers[number - 1 : number + 1]
        has_hook = before.module._forward_hooks or after.module._forward_pre_hooks
        return after.place > before.place + 1 or bool(has_hook)


def _chain_layers(
    parts: CpuParts,
    layers: Sequence[nn.Module],
    fused: dict[nn.Module, _Fused],
    norms: dict[nn.Module, dict[str, Any]],
) -> None:
    """Let the layers of a model that hands on hidden states alone run together."""
    found = [(place, _parts_of(layer, fused, norms)) for place, layer in enumerate(layers)]
    chain: _Chain | None = None
    for place, own in found:
        if own is not None:
            attention, mlp, around = own
            chain = chain or _Chain(parts, around[0]["size"], attention.ranks)
            chain.add(place, layers[place], attention, mlp, around)
    if chain is not None:
        chain.record()


def _parts_of(
    layer: Any, fused: dict[nn.Module, _Fused], norms: dict[nn.Module, dict[str, Any]]
) -> tuple[_Fused, _Fused, list[dict[str, Any]]] | None:
    """Attention, MLP and the norms before them, of a layer in which they are all there is."""
    if not _is_one_of(layer, _LAYERS):
        return None
    attention, mlp = fused.get(layer.self_attn), fused.get(layer.mlp)
    around = [norms.get(each) for each in (layer.input_layernorm, layer.post_attention_layernorm)]
    if attention is None or mlp is None or attention.ranks != mlp.ranks or None in around:
        return None
    return attention, mlp, [each for each in around if each is not None]
