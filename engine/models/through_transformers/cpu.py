"""The layers of a `transformers` model as C operations on a CPU.

All operations are one `Program`, of which each layer runs its part, from Python. Calls cost as much
as the arithmetic of a small model, so several layers become one part where that is safe: layers
that multiply the same input, as the inspection has seen; whole modules of attention or an MLP that
compute what ours do, which random numbers tell, and not a name; and, where few rows are computed,
runs of whole decoder layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import Structure
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.engine.layers.attention import ForwardContext
from penstock.engine.models.through_transformers.modules import (
    CONTEXT,
    ModuleEmbedding,
    ModuleLinear,
    PagedAttention,
    trial_step,
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
_SMALL = 0.1  # standard deviation of inputs beside which what a layer adds to them shows
_MAX_CHAINED_ROWS = 64  # with more, waking the threads is little of a step's time
_UNUSED = {CONTEXT, "cache_position", "position_ids"}  # arguments of layers, as the trial shows
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


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


class _Siblings:
    """Products of the same input: the first layer that is called computes them all."""

    def __init__(self, product: Part, sizes: Sequence[int]) -> None:
        self._product, self._sizes = product, list(sizes)
        self._x: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor, *, number: int) -> Tensor:
        """The product of layer `number`."""
        if number == 0 or x is not self._x:
            self._parts = torch.split(self._product(x), self._sizes, dim=-1)
            self._x = x
        y = self._parts[number].contiguous()
        if number == len(self._sizes) - 1:
            self._x, self._parts = None, ()
        return y


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
    siblings: Sequence[Sequence[str]],
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
    modules = dict(model.named_modules())
    packed = _pack(modules, parts)
    trial = _Trial(model, library.dtype, block_size)
    for names in siblings:
        if all(name in packed for name in names):
            stacked = StackedLinear([packed[name] for name in names])
            sizes = [packed[name].out_features for name in names]
            group = _Siblings(_product(parts, stacked), sizes)
            for number, name in enumerate(names):
                modules[name].compute = partial(group, number=number)
    norms: dict[nn.Module, dict[str, Any]] = {}
    for module in modules.values():
        if isinstance(module, PagedAttention) and can_attend(module, block_size):
            module.kernel = _attention(parts, module)
        elif (norm := _norm(module, library)) is not None:
            module.forward, norms[module] = norm
    fused: dict[nn.Module, _Fused] = {}
    for names in siblings:
        parent, name = modules[names[0].rpartition(".")[0]], names[0].rpartition(".")[0]
        first = [packed[each] for each in names if each in packed]
        others = [each for each in packed if each.rpartition(".")[0] == name and each not in names]
        if len(first) == len(names) and len(others) == 1:
            last, found, module = packed[others[0]], None, modules[others[0]]
            assert isinstance(module, ModuleLinear)
            if module.gathered_size:
                continue
            if len(names) == 2:
                found = _fuse_mlp(parts, parent, first, last, module.ranks)
            elif len(names) == 3 and getattr(parent, "paged_attention", None) is not None:
                found = _fuse_attention(parts, parent, first, last, module.ranks, trial)
            if found is not None:
                fused[parent] = found
    if has_chain:
        _chain_layers(parts, modules, fused, norms, trial)
    return parts


def can_attend(module: PagedAttention, block_size: int) -> bool:
    """Whether the kernels support its shapes."""
    is_right = module.head_dim % LANES == 0 and module.head_dim <= MAX_HEAD_DIM
    return is_right and block_size % 2 == 0 and not module.has_sinks


def _pack(modules: dict[str, nn.Module], parts: CpuParts) -> dict[str, CpuMatrix]:
    """The matrices of linear layers; an embedding that is one of them is looked up there."""
    tables = {
        id(each.weight): each for each in modules.values() if isinstance(each, ModuleEmbedding)
    }
    packed: dict[str, CpuMatrix] = {}
    for name, module in modules.items():
        if not isinstance(module, ModuleLinear) or module.in_features % 2:
            continue
        table = tables.get(id(module.weight))
        linear = pack_matrix(parts.library, module)
        parts.products |= linear.products
        packed[name] = linear
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
    """A norm of the library by our kernel, if it computes the same, and the kernel's arguments."""
    parameters = list(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    is_norm = len(parameters) == 1 and parameters[0][0] == "weight" and isinstance(eps, float)
    weight = parameters[0][1] if is_norm else None
    if weight is None or weight.dim() != 1 or weight.dtype != library.dtype:
        return None
    given = {"weight": weight, "size": len(weight), "eps": eps}
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

    x = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    compute.keeps = (args, count, weight)  # type: ignore[attr-defined]
    return (compute, given) if _is_close(compute(x), module(x)) else None


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


def _fuse_mlp(
    parts: CpuParts,
    parent: nn.Module,
    first: Sequence[CpuMatrix],
    last: CpuMatrix,
    ranks: Ranks,
) -> _Fused | None:
    """Make a gated MLP one part, if the module is one."""
    sizes = {each.out_features for each in first}
    if sizes != {last.in_features}:
        return None

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
    inputs = torch.randn(3, first[0].in_features, generator=torch.Generator().manual_seed(1))
    # Inputs of the activation around 2, where activations differ.
    spread = _product(parts, first[0])(inputs.to(parts.library.dtype)).float().std()
    inputs = (2.0 * inputs / spread).to(parts.library.dtype)[None]
    try:
        if not _is_close(part(inputs), parent(inputs)):
            return None
    except (RuntimeError, TypeError, ValueError):  # a module of another kind
        return None
    parent.forward = part
    return _Fused(write, (*first, last), ranks)


def _fuse_attention(
    parts: CpuParts,
    parent: nn.Module,
    first: Sequence[CpuMatrix],
    last: CpuMatrix,
    ranks: Ranks,
    trial: _Trial,
) -> _Fused | None:
    """Make a module of attention one part, if it computes what ours do."""
    module: PagedAttention = parent.paged_attention  # type: ignore[assignment]
    size = module.head_dim
    sizes = [count * size for count in (module.num_heads, *(2 * [module.num_kv_heads]))]
    is_right = [each.out_features for each in first] == sizes and last.in_features == sizes[0]
    if module.kernel is None or not is_right or isinstance(last, StackedLinear):
        return None
    if module.has_bidirectional_images:  # which only `PagedAttention` offers
        return None
    norms = [
        each
        for each in parent.children()
        if [tuple(one.shape) for one in each.parameters()] == [(size,)]
    ]
    given: dict[str, Any] = {}
    if len(norms) == 2:
        query, key = norms
        eps = getattr(query, "variance_epsilon", getattr(query, "eps", None))
        given = {"query_norm": query.weight, "key_norm": key.weight, "eps": eps}

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
    spread = 1.5 / trial.spread(_product(parts, first[0]), first[0].in_features)
    results = trial.run(parts, (parent, forward), first[0].in_features, spread)
    match results:
        case [(theirs_mixed, None), (ours_mixed, None)] if _is_close(ours_mixed, theirs_mixed):
            pass
        case _:
            return None
    parent.forward = forward
    return _Fused(write, (*first, last), ranks, head_dim=size)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A decoder layer as operations `first` to before `end` of a chain's program."""

    theirs: Callable[..., Any]
    linears: Sequence[CpuMatrix]
    head_dim: int
    first: int
    end: int


class _Chain:
    """Decoder layers that follow each other: the first one that is called computes all.

    That they will be called with each other's results is a guess. Each layer looks whether its
    input is what was guessed; if not, it computes that, and from then on no guess goes beyond the
    layer before. What a wrong guess has stored of keys and values is stored again.

    Args:
        ranks: over which the results of attention and of the MLPs are summed.

    Attributes:
        starts: numbers of the layers with which a run of layers begins, and of those that end it.
    """

    def __init__(self, parts: CpuParts, size: int, ranks: Ranks) -> None:
        self._parts, self._size = parts, size
        # Two sums a layer, so the two places of `RankSums` take turns wherever a run begins.
        self._sums = RankSums(parts.library, ranks) if isinstance(ranks, SharedRanks) else None
        if self._sums is not None:
            self._sums.begin(_MAX_CHAINED_ROWS, size)
        self._program = CpuProgram(parts.library, parts.program.step)
        self._streams = [self._program.buffer("stream 0", size)]
        self.layers: list[_Layer] = []
        self.starts: set[int] = set()
        self._results: dict[int, list[Tensor]] = {}  # by the number of rows
        self._next: int | None = None  # the layer of which the result is known already
        self._stop, self._version = 0, 0
        self._rotary: object = None

    def add(
        self,
        theirs: Callable[..., Any],
        attention: _Fused,
        mlp: _Fused,
        norms: Sequence[dict[str, Any]],
    ) -> None:
        """Append the operations of y = x + attention(norm(x)), y + mlp(norm(y)). Sums are rounded
        where torch rounds them."""
        program, size = self._program, self._size
        number, first, x = len(self.layers), len(self._program), self._streams[-1]
        y = program.buffer(f"stream {number + 1}", size)
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
        self._streams.append(y)
        linears = (*attention.linears, *mlp.linears)
        self.layers.append(_Layer(theirs, linears, attention.head_dim, first, len(program)))
        self.starts |= {number, number + 1}

    def record(self) -> None:
        """No layers will be added."""
        self._program.record(_MAX_CHAINED_ROWS)

    def __call__(
        self,
        hidden_states: Tensor,
        *args: Any,
        number: int,
        position_embeddings: Any = None,
        **others: Any,
    ) -> Any:
        """Layer `number`: [1, num_rows, size] → the same shape, or whatever the library's gives."""
        is_plain = not args and all(
            value is None or value is False or name in _UNUSED for name, value in others.items()
        )
        was_guessed, self._next = number == self._next, None
        if was_guessed:
            if (
                is_plain
                and hidden_states is self._results[hidden_states.shape[1]][number]
                and hidden_states._version == self._version
                and position_embeddings is self._rotary
            ):
                return self._result(hidden_states, number)
            self.starts.add(number)
        layer = self.layers[number]
        if not (
            is_plain
            and hidden_states.shape[:-1].numel() <= _MAX_CHAINED_ROWS
            and isinstance(position_embeddings, tuple)
            and position_embeddings[0].shape[-1] == layer.head_dim
        ):
            return layer.theirs(
                hidden_states, *args, position_embeddings=position_embeddings, **others
            )
        self._run(hidden_states, number, position_embeddings)
        return self._result(hidden_states, number)

    def _run(self, x: Tensor, number: int, rotary: tuple[Tensor, Tensor]) -> None:
        """Compute this layer and those that are expected to follow."""
        num_rows = x.shape[1]
        if num_rows not in self._results:
            views = [each.rows[:num_rows].view(x.shape) for each in self._streams]
            self._results[num_rows] = views
        self._results[num_rows][number].copy_(x)
        self._stop = min(each for each in self.starts if each > number)
        layers = self.layers[number : self._stop]
        self._rotary = rotary
        self._parts.rotate_by(*rotary, head_dim=layers[0].head_dim)
        linears = [linear for each in layers for linear in each.linears]
        is_shared = _is_worth_sharing(linears, num_rows)
        self._program.run_part(layers[0].first, layers[-1].end, is_shared=is_shared)

    def _result(self, x: Tensor, number: int) -> Tensor:
        result = self._results[x.shape[1]][number + 1]
        if number + 1 < self._stop:
            self._next, self._version = number + 1, result._version
        return result


def _chain_layers(
    parts: CpuParts,
    modules: dict[str, nn.Module],
    fused: dict[nn.Module, _Fused],
    norms: dict[nn.Module, dict[str, Any]],
    trial: _Trial,
) -> None:
    """Let decoder layers run by our operations where these give the same bits."""
    found: list[tuple[nn.Module, _Fused, _Fused, list[dict[str, Any]]]] = []
    for name, module in modules.items():
        if module not in fused or not fused[module].head_dim:
            continue
        layer = modules[name.rpartition(".")[0]]
        others = [each for each in layer.children() if each in fused and each is not module]
        around = [norms[each] for each in layer.children() if each in norms]
        if len(others) == 1 and len(around) == 2:
            found.append((layer, fused[module], fused[others[0]], around))
    sizes = {norm["size"] for _, _, _, around in found for norm in around}
    ranks = {module.ranks for _, attention, mlp, _ in found for module in (attention, mlp)}
    if len(sizes) != 1 or len(ranks) != 1:
        return
    (size,), (summing,) = sizes, ranks
    chain = _Chain(parts, size, summing)
    for layer, attention, mlp, around in found:
        chain.add(layer.forward, attention, mlp, around)
    chain.record()
    same = set()
    for number, (layer, *_) in enumerate(found):
        ours = partial(chain, number=number)
        # Not by hooks, with which a layer tells other ranks its result.
        results = trial.run(parts, (layer.forward, ours), size, _SMALL)
        if results and isinstance(results[0], Tensor) and torch.equal(*results):
            same.add(number)
    for number in same:
        found[number][0].forward = partial(chain, number=number)
        if number - 1 in same:
            chain.starts.remove(number)


class _Trial:
    """Random inputs of a step, for what attends: two sequences, of two tokens and of one."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, block_size: int) -> None:
        attentions = [each for each in model.modules() if isinstance(each, PagedAttention)]
        self._generator = torch.Generator().manual_seed(2)
        self._dtype, self._head_dim = dtype, attentions[0].head_dim
        self._context = trial_step(attentions, dtype, block_size, (2, 1), torch.device("cpu"))

    def spread(self, product: Part, size: int) -> float:
        """The standard deviation of a product of `size` numbers, whose own is 1."""
        return float(product(self._random(3, size).to(self._dtype)).float().std())

    def run(
        self, parts: CpuParts, modules: Sequence[Callable[..., Any]], size: int, spread: float
    ) -> list[Any]:
        """What each gives for the same inputs, of this size and standard deviation; nothing if one
        of them cannot take them."""
        num_tokens = len(self._context.positions)
        angles = (6.0 * self._random(num_tokens, self._head_dim // 2)).repeat(1, 2)[None]
        options = {
            "hidden_states": (spread * self._random(num_tokens, size)).to(self._dtype)[None],
            "position_embeddings": (angles.cos().to(self._dtype), angles.sin().to(self._dtype)),
            "attention_mask": None,
            # Far from each other, in case that they matter.
            "position_ids": torch.arange(num_tokens)[None] * 1_000_003,
            CONTEXT: self._context,
        }
        results = []
        for each in modules:
            parts.begin(torch.zeros(num_tokens, dtype=torch.int64), self._context)
            try:
                results.append(each(**options))
            except Exception:  # whatever a module of another kind does with them
                return []
        return results

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)


def _is_close(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    error = (ours.float() - theirs.float()).abs().max()
    return bool(error <= _TOLERANCES[ours.dtype] * theirs.float().abs().max())
