"""The device's part of a step: `Batch` in, forward pass, sampling, `BatchResult` out.

A runner starts in stages, each of which takes what those before it give: `load` weights, `size`
the memory beside them, `pack` the weights for what runs them, and capture graphs.

What a feature adds to a step is in `step_extensions`, and nothing where no sequence needs it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from penstock.engine.batch import Batch, BatchResult
from penstock.engine.config import FITTING_LEN, EngineConfig
from penstock.engine.layers.attention import Attention
from penstock.engine.lora.adapted_model import attach_lora_slots
from penstock.engine.lora.slots import NO_ADAPTERS, AdapterSlots, NoAdapters
from penstock.engine.models.backends import (
    check_deterministic,
    cpu_kernels,
    fastest,
    running_library,
)
from penstock.engine.models.cpu_model import CpuModel
from penstock.engine.models.language_model import LanguageModel, LoadedModel, StepOutput
from penstock.engine.models.loader import (
    DraftingModel,
    TargetModel,
    load_drafting_model,
    load_model,
)
from penstock.engine.models.registry import read_model_config
from penstock.engine.models.torch_model import TorchModel
from penstock.engine.parallel.ranks import ALONE, Ranks
from penstock.engine.pooling.pooler import Pooler
from penstock.engine.pooling.score_head import load_score_head
from penstock.engine.pooling.settings import ModelPooling
from penstock.engine.request import FinishReason
from penstock.engine.runner.cuda_graphs import with_graphs
from penstock.engine.runner.device import (
    check_kv_dtype,
    resolve_kv_dtype,
    resolve_max_model_len,
    select_device,
    use_kv_dtype,
)
from penstock.engine.runner.input_batch import SteadyDecode, StepInputs
from penstock.engine.runner.kv_cache import KVShape, LastingMemory
from penstock.engine.runner.kv_swap import HostTier, NoBlockBytes, NoHostTier
from penstock.engine.runner.memory import allocate_host_tier, allocate_pool
from penstock.engine.runner.sampled_tokens import Tokens, make_token_path
from penstock.engine.runner.step_extensions import (
    AdapterRows,
    ChangedRows,
    GrammarRows,
    ImageRows,
    PooledRows,
    PromptLogprobRows,
    ResultPart,
    SequenceExtension,
    StepPlanner,
)
from penstock.engine.runner.timing import Stopwatch, stopwatch_of
from penstock.engine.sampling.grammars import StepMasks
from penstock.engine.sampling.sampler import ChosenTokens, Sampled, Sampler
from penstock.engine.sampling.sampling_table import SamplingBatch
from penstock.engine.speculative.device.draft_progress import num_draft_bytes
from penstock.engine.speculative.device.drafters import draft_state_spec, make_drafter
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from penstock.kernels.cpu.library import CpuLibrary


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerInfo:
    """Values determined at start, within which policy plans.

    Attributes:
        max_model_len: maximum number of prompt and output tokens of a sequence.
        num_blocks, block_size: the KV pool.
        num_host_blocks: the host tier; 0 if there is none.
        block_move_s: seconds to move one block between the tiers, measured at start.
        needs_prompt_lens: KV depends on the prompt's length too (dynamic NTK), not only on tokens.
        kv_layout: what the bytes of a block mean: its shape, and whose order they have.
        quantization: of the weights, as in `EngineInfo`.
        weight_bytes: size of the weights in memory.
        async_scheduling: a step can be launched while another runs.
        num_verify_rows: tokens that a step computes in about the time of one: the room for drafts.
        sends_on: a later stage draws the tokens, while this one works on another step.
        drafts_cost_little: a row's result is the same to the bit in any batch, and all rows read
            the same weights: drafts change no token, and wrong ones take little time.
    """

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    num_host_blocks: int
    bytes_per_block: int
    block_move_s: float
    needs_prompt_lens: bool
    dtype: str
    kv_cache_dtype: str
    kv_layout: str
    quantization: str
    weight_bytes: int
    async_scheduling: bool
    device: str
    num_threads: int
    num_verify_rows: int = 1
    sends_on: bool = False
    drafts_cost_little: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What is on the device once weights are read.

    Attributes:
        dtype, sends_on: the model's (`RunnerInfo`).
        drafting: the model that drafts; None: none does.
        adapters: their places in the model.
        shape: of a block.
        max_model_len: within the model's context.
    """

    model: TargetModel
    dtype: torch.dtype
    sends_on: bool
    drafting: DraftingModel | None
    adapters: AdapterSlots | NoAdapters
    pooler: Pooler
    kv_dtype: torch.dtype
    shape: KVShape
    max_model_len: int


def load(
    config: EngineConfig,
    model_path: Path,
    pooling: ModelPooling,
    device: torch.device,
    ranks: Ranks,
) -> Loaded:
    """The first stage of a start: read all weights."""
    check_kv_dtype(config.cache, device)
    model = load_model(config.model, model_path, device, defers_experts=True, ranks=ranks)
    adapters = _adapter_slots(config, model, model_path)
    max_model_len = resolve_max_model_len(config.model, model.context_len)
    kv_dtype = resolve_kv_dtype(config.cache, model.dtype)
    use_kv_dtype(model, kv_dtype)
    drafting = load_drafting_model(config, model)
    shape = KVShape.of(model.state_spec, config.cache.block_size)
    num_bytes = num_draft_bytes(draft_state_spec(drafting, kv_dtype), shape.block_size)
    is_dummy = config.model.load_format == "dummy"
    score_head = load_score_head(model, pooling, model_path, is_dummy=is_dummy)
    return Loaded(
        model=model,
        dtype=model.dtype,
        sends_on=model.sends_on,
        drafting=drafting,
        adapters=adapters,
        pooler=Pooler(pooling, score_head),
        kv_dtype=kv_dtype,
        shape=replace(shape, num_draft_bytes=num_bytes),
        max_model_len=max_model_len,
    )


def _adapter_slots(
    config: EngineConfig, model: LoadedModel, model_path: Path
) -> AdapterSlots | NoAdapters:
    """Room for adapters in a model whose weights are not packed yet, if the config wants it."""
    lora = config.lora
    if not lora.enable_lora:
        return NO_ADAPTERS
    architecture, _ = read_model_config(model_path)
    room = attach_lora_slots(
        model,
        architecture.names,
        num_slots=lora.num_at_once,
        max_rank=lora.max_lora_rank,
        library=running_library(model, config.cache.block_size),
    )
    return AdapterSlots(room, max_loras=lora.num_at_once, max_rank=lora.max_lora_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The KV pool and its host tier.

    Attributes:
        max_model_len: that fits into the pool, if the config leaves it open.
        max_blocks: of a sequence.
    """

    kv_pool: Tensor
    host_tier: HostTier | NoHostTier
    max_model_len: int
    max_blocks: int


def size(
    config: EngineConfig, loaded: Loaded, ranks: Ranks, lasting_pool: LastingMemory | None
) -> Memory:
    """The second stage: allocate what the weights leave room for."""
    shape, max_model_len = loaded.shape, loaded.max_model_len
    # Only the prefix cache finds what an engine left; a draft model would miss keys and values.
    is_found = config.cache.enable_prefix_caching and loaded.drafting is None
    if not is_found or loaded.model.device.type != "cpu":
        lasting_pool = None
    num_used_bytes = 0 if lasting_pool is None else lasting_pool.num_used_bytes
    kv_pool = allocate_pool(config, loaded.model, shape, max_model_len, ranks, lasting_pool)
    num_blocks = kv_pool.shape[2]
    if config.model.max_model_len == FITTING_LEN:
        max_model_len = min(max_model_len, num_blocks * shape.block_size)
    return Memory(
        kv_pool=kv_pool,
        host_tier=allocate_host_tier(config, shape, kv_pool, ranks, num_used_bytes=num_used_bytes),
        max_model_len=max_model_len,
        max_blocks=min(num_blocks, shape.num_blocks_for(max_model_len)),
    )


def pack(
    config: EngineConfig, loaded: Loaded, ranks: Ranks
) -> tuple[LanguageModel, CpuLibrary | None]:
    """The third stage: whatever runs the model takes the weights out of it; that, and the CPU
    kernels, if they run it."""
    model, block_size, settings = loaded.model, loaded.shape.block_size, config.device
    library = cpu_kernels(
        model, block_size, num_threads=settings.num_threads, num_ranks=ranks.num_on_cores
    )
    if settings.deterministic and model.device.type == "cpu":
        check_deterministic(model, block_size, library)
    elif settings.deterministic:
        model.use_invariant_kernels()
    return fastest(model, block_size, library, deterministic=settings.deterministic), library


class ModelRunner:
    """A model with its KV pool and the sequences on its device.

    Args:
        model_path: the directory of the model's files.
        eos_token_ids: masked while a sequence has fewer than `min_tokens`.
        pooling: how the model makes vectors and scores.
        ranks: that share the model, of which this process has a part.
        lasting_pool: where the KV pool lies and outlives the process, if it can.

    Raises:
        ModelLoadError: the model's files are invalid.
        ConfigError: the settings do not fit the model, the device or its memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        *,
        eos_token_ids: tuple[int, ...] = (),
        pooling: ModelPooling | None = None,
        ranks: Ranks = ALONE,
        lasting_pool: LastingMemory | None = None,
    ) -> None:
        # One for all steps: making one takes longer than entering it.
        self._inference_mode = torch.inference_mode()
        device = select_device(config.device, ranks)
        self._start_stopwatch = stopwatch_of(device)
        loaded = load(config, model_path, pooling or ModelPooling(), device, ranks)
        memory = size(config, loaded, ranks, lasting_pool)
        packed, library = pack(config, loaded, ranks)
        self._kv_pool, self._host_tier = memory.kv_pool, memory.host_tier
        self._sends_on = sends_on = loaded.sends_on
        self._model: LanguageModel = with_graphs(
            packed, config, memory.kv_pool, max_blocks=memory.max_blocks
        )
        self._sampler = Sampler(eos_token_ids, library=library)
        vocab_size = loaded.model.vocab_size
        self.progress = Progress(self._model, device, library)
        self.grammars = GrammarCompiler(
            model_path, vocab_size=vocab_size, eos_token_ids=eos_token_ids
        )
        self.adapters, self.images = loaded.adapters, loaded.model.images
        self._batch, self._tokens = make_token_path(
            config.scheduler,
            max_blocks=memory.max_blocks,
            block_size=loaded.shape.block_size,
            device=device,
            draws_tokens=not sends_on,
        )
        drafter = make_drafter(
            loaded.drafting,
            memory.kv_pool,
            memory.host_tier.num_blocks,
            self._batch,
            self._sampler,
            library,
            max_num_tokens=config.scheduler.max_num_batched_tokens,
            vocab_size=vocab_size,
        )
        self._planners: list[StepPlanner] = [] if drafter is None else [drafter]
        in_c = isinstance(self._model, CpuModel) and not self._model.needs_prompt_lens
        self._can_repeat = in_c and not sends_on and drafter is None
        extensions: list[SequenceExtension | None] = [
            PooledRows(None if sends_on else loaded.pooler),
            GrammarRows(self.grammars, config.scheduler.max_num_seqs, device),
            ChangedRows(),
            drafter,
            AdapterRows(self.adapters) if isinstance(self.adapters, AdapterSlots) else None,
            None if self.images is None else ImageRows(self.images),
            None if sends_on else PromptLogprobRows(self._model),
        ]
        self._batch.extensions = [each for each in extensions if each is not None]
        # A draft model has keys and values of its own, which would be missing.
        self.block_bytes: HostTier | NoBlockBytes = (
            memory.host_tier if drafter is None else NoBlockBytes()
        )
        # Who decides where a number lies in a block: torch, or C for these instructions.
        order = "torch" if library is None else f"{type(self._model).__name__} {library.isa}"
        self.info = RunnerInfo(
            max_model_len=memory.max_model_len,
            vocab_size=vocab_size,
            num_blocks=memory.kv_pool.shape[2],
            block_size=loaded.shape.block_size,
            num_host_blocks=memory.host_tier.num_blocks,
            bytes_per_block=loaded.shape.bytes_per_block,
            block_move_s=memory.host_tier.block_move_s,
            needs_prompt_lens=self._model.needs_prompt_lens,
            dtype=str(loaded.dtype).removeprefix("torch."),
            kv_cache_dtype=str(loaded.kv_dtype).removeprefix("torch."),
            kv_layout=f"{loaded.shape} {order}",
            quantization=loaded.model.quantization,
            weight_bytes=self._model.weight_bytes
            + (0 if drafter is None else drafter.weight_bytes),
            async_scheduling=self._tokens.async_scheduling,
            device=str(device),
            num_threads=self._model.num_threads,
            num_verify_rows=self._model.num_verify_rows,
            sends_on=sends_on,
            drafts_cost_little=isinstance(packed, CpuModel)
            and packed.config.experts is None
            and not sends_on,
        )

    def execute(self, batch: Batch) -> BatchResult:
        """Run one step. Sequences whose last known token it computes get a new token."""
        run = self._batch.run
        if run is not None and self._can_repeat and run.is_repeated(batch):
            return self._repeat(batch, run)
        return self.launch(batch).result()

    def _repeat(self, batch: Batch, run: SteadyDecode) -> BatchResult:
        """As `launch` and `result`, of a step that makes no tensors: nearly all of a small model's,
        where what is left out here takes as long as some of its layers."""
        started_s = time.perf_counter()
        inputs = run.advance(batch.scheduled)
        seq_ids, sampling = inputs.sampled_seq_ids, inputs.sampling
        output = self._model.step(
            inputs.input_ids, inputs.context, None, sampling.parameters, sampling.draws
        )
        assert output.drawn is not None
        token_ids, is_valid = output.drawn.read()
        run.store(token_ids)
        compute_s = time.perf_counter() - started_s
        tokens = zip(seq_ids, token_ids, is_valid, strict=True)
        found = {seq_id: (token_id,) for seq_id, token_id, is_good in tokens if is_good}
        if len(found) == len(seq_ids):
            return BatchResult(step=batch.step, token_ids=found, compute_s=compute_s)
        sampled = Sampled(token_ids=token_ids, is_valid=is_valid, logprobs={})
        return BatchResult(
            step=batch.step,
            token_ids=found,
            ended_seq_ids=_ended(seq_ids, sampled, None),
            compute_s=compute_s,
        )

    def launch(self, batch: Batch) -> StepInFlight:
        """Begin a step without waiting for a GPU, so that the next one may be launched at once."""
        with self._inference_mode:
            self._batch.update(batch)
            if batch.moves:
                self._host_tier.execute(batch.moves)
            stopwatch = self._start_stopwatch()
            for planner in self._planners:
                planner.plan(batch)
            if not batch.scheduled:
                return StepInFlight(batch.step, stopwatch, self._host_tier)
            inputs = self._batch.prepare(
                batch, self._kv_pool, needs_prompt_lens=self.info.needs_prompt_lens
            )
            self._model.spares_core = batch.spares_core
            output = self._forward(inputs)
            chosen = None if self._sends_on else self._choose(output, inputs.sampling)
            parts: list[ResultPart] = []
            for read in inputs.readers:
                part = read(inputs, output)
                parts += () if part is None else (part,)
            tokens = None if chosen is None else self._tokens.append(inputs, chosen)
            return StepInFlight(
                batch.step,
                stopwatch,
                self._host_tier,
                inputs,
                tokens,
                parts,
                wants_forced=batch.wants_forced,
            )

    def _forward(self, inputs: StepInputs) -> StepOutput:
        """Compute a step; the last stage draws tokens where C can."""
        input_ids, sampling = self._tokens.input_ids(inputs), inputs.sampling
        if self._sends_on:
            return self._model.step(input_ids, inputs.context)
        masks = sampling.masks
        if masks is not None and not self._tokens.async_scheduling:
            masks.fill()
        return self._model.step(
            input_ids,
            inputs.context,
            inputs.sampled_tokens,
            sampling.parameters if sampling.has_plain_rows else None,
            sampling.draws,
            None if masks is None else masks.masks,
        )

    def receive(self, tokens: Mapping[int, tuple[int, Sequence[int]]]) -> None:
        """Append tokens that the last stage drew, if that is another one.

        Args:
            tokens: seq_id → in place of how many drafts, and the tokens.
        """
        if not self._sends_on:
            return
        for seq_id, (num_drafts, token_ids) in tokens.items():
            self._batch.receive(seq_id, token_ids, num_drafts=num_drafts)

    def _choose(self, output: StepOutput, sampling: SamplingBatch) -> ChosenTokens | Sampled:
        """The token of each sampled row, which a GPU may not have computed yet."""
        drawn = output.drawn
        if drawn is not None and not (sampling.changed or sampling.num_tops):
            token_ids, is_valid = drawn.read()
            return Sampled(token_ids=token_ids, is_valid=is_valid, logprobs={})
        if sampling.changed or sampling.masks is not None:
            # Penalties and grammars need the tokens so far; the forward pass runs meanwhile.
            self._tokens.wait_for_tokens()
        if sampling.masks is not None and self._tokens.async_scheduling:
            sampling.masks.fill()
        pair = None if drawn is None else (drawn.token_ids, drawn.is_valid)
        return self._sampler.choose(output.logits, sampling, drawn=pair)


class StepInFlight:
    """A launched step; `result` waits for it.

    Args:
        stopwatch: started with the step.
        swaps: measures those of steps.
        inputs: None if nothing was computed.
        tokens: None if nothing was, or a later stage draws them.
        parts: what extensions add to the result.
        wants_forced: as in `Batch`.
    """

    __slots__ = ("_inputs", "_parts", "_step", "_stopwatch", "_swaps", "_tokens", "_wants_forced")

    def __init__(
        self,
        step: int,
        stopwatch: Stopwatch,
        swaps: HostTier | NoHostTier,
        inputs: StepInputs | None = None,
        tokens: Tokens | None = None,
        parts: Sequence[ResultPart] = (),
        *,
        wants_forced: bool = False,
    ) -> None:
        stopwatch.mark_end()
        self._step, self._stopwatch, self._swaps = step, stopwatch, swaps
        self._inputs, self._tokens, self._parts = inputs, tokens, parts
        self._wants_forced = wants_forced

    def result(self) -> BatchResult:
        """Wait for the end of this step, not for steps launched after it."""
        inputs, sampled = self._inputs, None if self._tokens is None else self._tokens.read()
        swap_out_s, swap_in_s = self._swaps.take_seconds() if self._swaps.timings else (0.0, 0.0)
        compute_s = 0.0 if inputs is None else self._stopwatch.seconds()
        if inputs is None or sampled is None:
            return BatchResult(
                step=self._step,
                token_ids={},
                compute_s=compute_s,
                swap_out_s=swap_out_s,
                swap_in_s=swap_in_s,
            )
        seq_ids, masks, is_valid = inputs.sampled_seq_ids, inputs.sampling.masks, sampled.is_valid
        token_ids: dict[int, tuple[int, ...]]
        if sampled.rows is None:
            tokens = zip(seq_ids, sampled.token_ids, is_valid, strict=True)
            token_ids = {seq_id: (token_id,) for seq_id, token_id, is_good in tokens if is_good}
        else:  # several tokens of a sequence
            seq_ids = tuple(seq_ids[row] for row in sampled.rows)
            token_ids = _by_sequence(seq_ids, dict(enumerate(sampled.token_ids)), is_valid)
        result = BatchResult(
            step=self._step,
            token_ids=token_ids,
            logprobs=_by_sequence(seq_ids, sampled.logprobs, is_valid) if sampled.logprobs else {},
            ended_seq_ids={} if all(is_valid) else _ended(seq_ids, sampled, masks),
            forced_token_ids=_forced(inputs.sampled_seq_ids, masks)
            if self._wants_forced and masks is not None
            else {},
            compute_s=compute_s,
            masks_s=0.0 if masks is None else masks.seconds,
            num_masks=0 if masks is None else len(masks),
            swap_out_s=swap_out_s,
            swap_in_s=swap_in_s,
        )
        for part in self._parts:
            result = part.add_to(result)
        return result


def _forced(seq_ids: Sequence[int], masks: StepMasks) -> dict[int, tuple[int, ...]]:
    return {seq_ids[row]: token_ids for row, token_ids in masks.forced().items()}


def _ended(
    seq_ids: Sequence[int], sampled: Sampled, masks: StepMasks | None
) -> dict[int, FinishReason]:
    """Why each sequence without a valid token has none.

    Args:
        seq_ids: of the sampled tokens.
    """
    ends = {} if masks is None else masks.ends
    rows = range(len(seq_ids)) if sampled.rows is None else sampled.rows
    return {
        seq_id: ends.get(row, FinishReason.ERROR)
        for seq_id, row, is_good in zip(seq_ids, rows, sampled.is_valid, strict=True)
        if not is_good
    }


_Value = TypeVar("_Value")


def _by_sequence(
    seq_ids: Sequence[int], values: Mapping[int, _Value], is_valid: Sequence[bool]
) -> dict[int, tuple[_Value, ...]]:
    """The values of each sequence's valid rows, in their order."""
    found: dict[int, tuple[_Value, ...]] = {}
    for row, seq_id in enumerate(seq_ids):
        if is_valid[row] and row in values:
            found[seq_id] = (*found.get(seq_id, ()), values[row])
    return found


class Progress:
    """Counts the finished parts of running steps, for the watchdog.

    A step on a CPU may take minutes. Its parts show that it makes progress: the calls of the
    kernels' pool or, where torch computes, the records of a program or the layers of a module.

    Args:
        model: as it runs.
        library: the CPU kernels; None if there are none.
        layers: the modules that count as parts.
    """

    def __init__(
        self,
        model: LanguageModel | torch.nn.Module,
        device: torch.device,
        library: CpuLibrary | None,
        *,
        layers: type[torch.nn.Module] = Attention,
    ) -> None:
        self._library = library
        self._num_layers = 0
        self._model = model if isinstance(model, TorchModel) else None
        # On a GPU layers are only launched, and a step never takes minutes.
        if isinstance(model, torch.nn.Module) and device.type == "cpu":
            for module in model.modules():
                if isinstance(module, layers):
                    module.register_forward_hook(self._count_layer)

    def num_parts_done(self) -> int:
        """Parts of all steps so far; grows while a step makes progress."""
        num_done = self._num_layers
        if self._model is not None:
            num_done += self._model.num_parts_done
        return num_done + (0 if self._library is None else self._library.num_calls)

    def describe(self) -> str:
        """What the threads of the CPU's pool are doing, in words."""
        return "none" if self._library is None else self._library.describe_pool()

    def _count_layer(self, *_: object) -> None:
        self._num_layers += 1
