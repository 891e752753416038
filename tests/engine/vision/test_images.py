"""Images in prompts: the tokens of `transformers.generate`, whatever happens to a sequence."""

from __future__ import annotations

import base64
import hashlib
import io
import threading
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
)

from penstock.engine import LLM, SamplingParams
from penstock.engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import ConfigError, InvalidRequestError, ModelLoadError
from penstock.engine.lora.files import find_adapter
from penstock.engine.models import backends
from penstock.engine.models.cpu_model import CpuModel
from penstock.engine.models.torch_model import TorchModel
from penstock.engine.pooling.settings import PoolingParams
from penstock.engine.request import ImageInput, Request, RequestOutput
from penstock.engine.startup import build_core
from penstock.engine.text import Tokenizer
from penstock.engine.vision.image_tokens import ImageTokens, read_image_tokens
from tests.support.peft_models import read_adapted, write_adapter
from tests.support.tiers import tiered

from .vision_models import IMAGE_TEXT, KINDS, picture, save_model

NUM_NEW = 48
NATIVE = ("llava", "llava_next", "idefics3", "smolvlm")  # whose language model is
Part = str | bytes  # text, or an image's file
# With a beginning in common; of one image, of several, and of none.
PROMPTS: list[list[Part]] = [
    ["user: what is in this picture? ", picture(0), "assistant: "],
    ["user: compare ", picture(1, 30, 60), " and ", picture(2, 100, 20), " please. assistant: "],
    ["user: what is in this picture? ", picture(3), "assistant: "],
    ["user: no picture at all. assistant: "],
    ["user: ", picture(0), picture(0), "twice, assistant: "],
]


class Model:
    """A checkpoint, and what `transformers` says about it."""

    def __init__(self, kind: str, path: Path, **text_fields: Any) -> None:
        self.reference: Any = save_model(kind, path, **text_fields)
        self.kind, self.path = kind, path
        self.tokenizer = Tokenizer.from_directory(path)
        found = read_image_tokens(path)
        assert found is not None
        self.tokens: ImageTokens = found
        self.processor: Any = AutoImageProcessor.from_pretrained(path, backend="pil")

    def request(self, parts: Sequence[Part], name: str, **options: Any) -> Request:
        ids: list[int] = []
        images: list[ImageInput] = []
        for part in parts:
            if isinstance(part, str):
                ids += self.tokenizer.encode(part, add_special_tokens=False, param="")
                continue
            text = self.tokens.expand(*Image.open(io.BytesIO(part)).size)
            before, after = IMAGE_TEXT[self.kind].split(self.tokens.placeholder)
            if self.kind == "gemma3":
                before, after = text.split(self.tokens.token * 16)
                text = self.tokens.token * 16
            ids += self.tokenizer.encode(before, add_special_tokens=False, param="")
            new = self.tokenizer.encode(text, add_special_tokens=False, param="")
            images.append(
                ImageInput(
                    digest=hashlib.sha256(part).hexdigest(),
                    offset=len(ids),
                    num_tokens=len(new),
                    num_features=new.count(self.tokens.token_id),
                    data=part,
                )
            )
            ids += new
            ids += self.tokenizer.encode(after, add_special_tokens=False, param="")
        params = {"temperature": 0.0, "max_tokens": NUM_NEW, "ignore_eos": True}
        return Request(
            request_id=name,
            prompt_token_ids=tuple(ids),
            sampling_params=SamplingParams(**(params | options.pop("params", {}))),
            images=tuple(images),
            **options,
        )

    def given(self, parts: Sequence[Part]) -> dict[str, Any]:
        """What `transformers` takes of a prompt."""
        ids = torch.tensor([self.request(parts, "").prompt_token_ids])
        files = [Image.open(io.BytesIO(part)) for part in parts if isinstance(part, bytes)]
        given: dict[str, Any] = {}
        if files:
            given = dict(self.processor(images=[files], return_tensors="pt"))
            given.pop("rows", None), given.pop("cols", None)
        if self.kind == "gemma3":
            given.pop("num_crops", None)
            given["token_type_ids"] = (ids == self.tokens.token_id).int()
        if self.kind.startswith("qwen2"):
            given["mm_token_type_ids"] = (ids == self.tokens.token_id).int()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **given}

    @torch.no_grad()
    def expected(self, parts: Sequence[Part]) -> list[int]:
        given = self.given(parts)
        options = GenerationConfig(
            max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=-1, pad_token_id=0, bos_token_id=0
        )
        model: PreTrainedModel = self.reference
        found = model.generate(generation_config=options, **given)  # type: ignore[operator]
        return found[0, given["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]

    def hidden(self, parts: Sequence[Part]) -> Tensor:
        """The last layer's, as the head gets them."""
        found = self.reference(**self.given(parts), output_hidden_states=True)
        return found.hidden_states[-1]  # type: ignore[no-any-return]

    def core(
        self,
        *,
        num_blocks: int,
        preemption: Any = "swap",
        max_num_seqs: int = 8,
        lora: LoraConfig | None = None,
        **cache: Any,
    ) -> EngineCore:
        core, _ = build_core(
            EngineConfig(
                model=ModelConfig(
                    model=str(self.path), dtype="float32", max_model_len=min(8 * num_blocks, 1024)
                ),
                cache=CacheConfig(
                    block_size=8, num_blocks=num_blocks, num_host_blocks=200, **cache
                ),
                scheduler=SchedulerConfig(
                    max_num_batched_tokens=24,
                    max_num_seqs=max_num_seqs,
                    preemption=preemption,
                    speculative_config={"method": "none"},  # sequences would end too soon to meet
                ),
                device=DeviceConfig(device="cpu", num_threads=1),
                lora=lora or LoraConfig(),
            )
        )
        return core


def run(core: EngineCore, *requests: Request) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        core.add(request)
    while any(core.has_request(name) for name in outputs):
        core.wait()
        for output in core.step():
            outputs[output.request_id].append(output)
        core.scheduler.blocks.check_integrity()
    return outputs


def tokens_of(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("llava", tmp_path_factory.mktemp("llava"))


@pytest.mark.parametrize("kind", tiered(KINDS, ["llava", "qwen2_5_vl"]))
def test_tokens_equal_generate(kind: str, tmp_path: Path) -> None:
    """In chunks that cut images, preempted and swapped; then again with a warm cache."""
    model = Model(kind, tmp_path)
    expected = [model.expected(parts) for parts in PROMPTS]
    assert len({tuple(each) for each in expected}) == len(PROMPTS)
    longest = max(len(model.request(parts, "").prompt_token_ids) for parts in PROMPTS)
    core = model.core(num_blocks=-(-(longest + NUM_NEW) // 8) + 2)
    assert isinstance(core._executor._runner._model, CpuModel) == (kind in NATIVE)  # type: ignore[attr-defined]
    for _ in range(2):
        requests = [
            model.request(parts, str(number), arrival_s=float(number))
            for number, parts in enumerate(PROMPTS)
        ]
        found = run(core, *requests)
        assert [tokens_of(found[str(number)]) for number in range(len(PROMPTS))] == expected
    assert core.scheduler.counters.num_preemptions > 0
    assert core.images.num_encoded == 4  # of which one is in two prompts


TEXTS: dict[str, dict[str, Any]] = {
    "mistral": {"model_type": "mistral", "sliding_window": 9},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "tied": {"tie_word_embeddings": True},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("text", TEXTS)
def test_other_language_models_within(text: str, tmp_path: Path) -> None:
    model = Model("llava", tmp_path, **TEXTS[text])
    core = model.core(num_blocks=100)
    assert isinstance(core._executor._runner._model, CpuModel)  # type: ignore[attr-defined]
    for parts in PROMPTS[1:3]:  # the first has two likeliest tokens 7e-6 apart in Qwen2
        found = run(core, model.request(parts, "a"))
        assert tokens_of(found["a"]) == model.expected(parts)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "in_torch"), [*product(("llava", "idefics3"), (False, True))])
def test_adapters_of_the_language_model(
    kind: str, in_torch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside each other and the base model; one of the tower is refused by its tensor."""
    if in_torch:
        monkeypatch.setattr(backends, "load_library", lambda _: None)
    model, auto = Model(kind, tmp_path / "model"), AutoModelForImageTextToText
    text = r".*(language|text)_model\..*(q_proj|o_proj|up_proj|embed_tokens)"
    write_adapter(model.path, tmp_path / "a", 1, auto=auto, target_modules=text)
    write_adapter(model.path, tmp_path / "b", 2, auto=auto, target_modules=rf"{text}|lm_head")
    core = model.core(num_blocks=100, lora=LoraConfig(enable_lora=True))
    assert isinstance(core._executor._runner._model, TorchModel if in_torch else CpuModel)  # type: ignore[attr-defined]
    expected, requests = {}, []
    for name in ("base", "a", "b"):
        adapter = None if name == "base" else find_adapter(name, str(tmp_path / name))
        if adapter is not None:
            core.preparation.load(core.adapters.need(adapter))
            model.reference = read_adapted(model.path, tmp_path / name, auto)
        for number, parts in enumerate(PROMPTS[:2]):
            requests.append(model.request(parts, f"{name} {number}", adapter=adapter))
            expected[f"{name} {number}"] = model.expected(parts)
    found = run(core, *requests)
    assert {name: tokens_of(each) for name, each in found.items()} == expected
    assert len(set(map(tuple, expected.values()))) == len(expected)
    write_adapter(model.path, tmp_path / "tower", 3, auto=auto, target_modules=["out_proj"])
    tower = find_adapter("tower", str(tmp_path / "tower"))
    with pytest.raises(InvalidRequestError, match=r"vision.*where this model takes no adapter"):
        core.preparation.load(core.adapters.need(tower))


def test_ranks_cannot_share_a_native_one(llava: Model) -> None:
    device = DeviceConfig(device="cpu", num_threads=1, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="a model with images has to be whole"):
        build_core(EngineConfig(model=ModelConfig(model=str(llava.path)), device=device))


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_preempted_prompt_keeps_its_images(preemption: str, llava: Model) -> None:
    """In the middle of its images too, and by either way."""
    core = llava.core(num_blocks=60, preemption=preemption)
    request = llava.request(PROMPTS[1], "a")
    core.add(request)
    found: list[int] = []
    steps = 0
    while core.has_request("a"):
        core.wait()
        outputs = core.step()
        steps += bool(outputs) or core.scheduler.num_running
        found += tokens_of(outputs)
        if steps % 3 == 2 and core.scheduler.num_running:
            core.scheduler._preempt(core.scheduler._running_set.choose_victim())
        core.scheduler.blocks.check_integrity()
    assert found == llava.expected(PROMPTS[1])
    assert core.scheduler.counters.num_preemptions > 5


@pytest.mark.parametrize("parts", [PROMPTS[1], PROMPTS[4]], ids=["two", "one twice"])
def test_an_output_goes_on_with_its_images(parts: list[Part], llava: Model) -> None:
    """As after the death of an engine: in one that has not seen them, and again with them in its
    cache."""
    core, whole = llava.core(num_blocks=120), llava.expected(parts)
    for cut in (1, 7, 40, 41, NUM_NEW - 1):
        rest = llava.request(parts, f"from {cut}", output_token_ids=tuple(whole[:cut]))
        assert tokens_of(run(core, rest)[rest.request_id]) == whole[cut:]


def test_the_same_image_is_a_prefix_hit(llava: Model) -> None:
    """Another one is not, although its tokens are the same; nor is it that of another tenant."""
    core = llava.core(num_blocks=120)
    parts: list[Part] = ["user: look ", picture(0), "and tell me. "]
    before = len("user: look ")

    answer: list[int] = []

    def num_cached(name: str, *parts: Part, salt: str = "a") -> int:
        request = llava.request(parts, name, cache_salt=salt, params={"max_tokens": 2})
        outputs = run(core, request)[name]
        answer[:] = tokens_of(outputs)
        return sum(output.num_cached_tokens for output in outputs)

    whole = len(llava.request(parts, "").prompt_token_ids)
    assert num_cached("first", *parts) == 0
    assert num_cached("again", *parts) == whole - 1
    request = llava.request(parts, "dropped")
    bare = tuple(msgspec.structs.replace(image, data=b"") for image in request.images)
    ids = (*request.prompt_token_ids, *answer)
    assert core.drop_prefix(ids, cache_salt="a", images=bare) > 0
    assert num_cached("forgotten", *parts) < whole - 1
    assert num_cached("longer", *parts, "Now.") >= whole - 1
    assert num_cached("other image", parts[0], picture(1), *parts[2:]) <= before
    assert num_cached("other tenant", *parts, salt="b") == 0


def test_a_place_in_a_block_tells_images_apart(llava: Model) -> None:
    """The same tokens with the same image, which begins one token later."""
    image = llava.tokens.placeholder
    core = llava.core(num_blocks=120)
    first = llava.request([f"a{image}", picture(0), "b"], "first")
    second = llava.request(["a", picture(0), f"{image}b"], "second")
    assert first.prompt_token_ids == second.prompt_token_ids
    run(core, first)
    outputs = run(core, second)["second"]
    assert sum(output.num_cached_tokens for output in outputs) <= 1
    fresh = run(llava.core(num_blocks=120), second)["second"]
    assert tokens_of(outputs) == tokens_of(fresh)


def test_streams_go_on_while_an_image_is_encoded(
    llava: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = llava.core(num_blocks=120)
    encoder: Any = core.images._images
    may_go_on, encode = threading.Event(), encoder.encode

    def slow(*args: Any) -> Any:
        assert may_go_on.wait(60)
        return encode(*args)

    monkeypatch.setattr(encoder, "encode", slow)
    core.add(llava.request(PROMPTS[0], "image"))
    found = run(core, llava.request(PROMPTS[3], "text"))["text"]
    assert tokens_of(found) == llava.expected(PROMPTS[3])
    assert core.has_request("image")
    may_go_on.set()
    left: list[int] = []
    while core.has_request("image"):
        core.wait()
        left += tokens_of(core.step())
    assert left == llava.expected(PROMPTS[0])


def test_features_are_bounded_and_kept_while_they_are_needed(llava: Model) -> None:
    core = llava.core(num_blocks=120, mm_encoder_cache_bytes=5000)  # an image has 4096
    requests = [
        llava.request(["user: ", picture(seed), "?"], str(seed), params={"max_tokens": 4})
        for seed in range(5)
    ]
    unbounded = llava.core(num_blocks=120)
    expected = [run(unbounded, each)[each.request_id] for each in requests]
    found = run(core, *requests)
    for request, outputs in zip(requests, expected, strict=True):
        assert tokens_of(found[request.request_id]) == tokens_of(outputs)
    core.step()
    assert core.preparation.loader(core.images).num_bytes <= 5000
    encoder: Any = core.images._images
    assert len(encoder.encoded) == 1
    assert core.images.num_encoded == 5


def test_what_cannot_be_encoded_fails_alone(llava: Model) -> None:
    core = llava.core(num_blocks=120)
    broken = llava.request(["user: ", picture(0), "?"], "broken")
    (image,) = broken.images
    cut = msgspec.structs.replace(image, digest="cut", data=image.data[:-300])
    other = llava.request(["user: ", picture(1, 60, 20), "?"], "wrong", params={"max_tokens": 3})
    fewer = msgspec.structs.replace(other.images[0], num_features=3)
    outputs = run(
        core,
        msgspec.structs.replace(broken, images=(cut,)),
        msgspec.structs.replace(other, request_id="fewer", images=(fewer,)),
        other,
    )
    assert outputs["broken"][-1].error == "the image is damaged"
    assert "16 features, but 3 tokens" in (outputs["fewer"][-1].error or "")
    assert all(outputs[name][-1].is_refused for name in ("broken", "fewer"))
    assert len(tokens_of(outputs["wrong"])) == 3
    late = msgspec.structs.replace(image, offset=1 << 20)
    with pytest.raises(InvalidRequestError, match="not in the prompt"):
        core.add(msgspec.structs.replace(broken, request_id="late", images=(late,)))


def test_what_sees_whole_images_says_what_it_cannot_do(tmp_path: Path) -> None:
    model = Model("gemma3", tmp_path)
    with pytest.raises(ConfigError, match="--kv-cache-dtype must be auto"):
        model.core(num_blocks=60, kv_cache_dtype="fp8")
    core = model.core(num_blocks=60, max_num_seqs=10)  # 24 tokens are those of an image and 8 more
    with pytest.raises(InvalidRequestError, match="more than 15 tokens"):
        core.add(model.request(PROMPTS[0], "a"))
    expected = model.expected(PROMPTS[3])
    assert tokens_of(run(core, model.request(PROMPTS[3], "b"))["b"]) == expected
    (tmp_path / "processor_config.json").write_text('{"do_pan_and_scan": true}')
    with pytest.raises(ModelLoadError, match="do_pan_and_scan"):
        read_image_tokens(tmp_path)


def test_a_request_that_waits_can_be_aborted(llava: Model) -> None:
    core = llava.core(num_blocks=120)
    core.add(llava.request(PROMPTS[0], "a"))
    core.abort("a")
    assert not core.has_request("a")
    run(core, llava.request(PROMPTS[0], "b", params={"max_tokens": 1}))
    assert len(core.preparation) == 0


def test_llm_chat_takes_data_urls_and_pillow_images(llava: Model) -> None:
    def user(*parts: Part, form: str) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            elif form == "image_url":
                url = f"data:image/png;base64,{base64.b64encode(part).decode()}"
                content.append({"type": form, form: {"url": url}})
            else:
                content.append({"type": form, form: Image.open(io.BytesIO(part))})
        return [{"role": "user", "content": content}]

    several: list[list[Part]] = [
        ["what is this? ", picture(0)], [picture(1, 30, 60), " or ", picture(2, 100, 20), "?"],
        ["nothing?"],
    ]  # fmt: skip
    expected = [llava.expected(["user: ", *parts, "assistant: "]) for parts in several]
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    with LLM(
        str(llava.path), dtype="float32", num_blocks=60, max_model_len=256, num_threads=1
    ) as llm:
        for form in ("image_url", "image_pil"):
            talks = [user(*parts, form=form) for parts in several]
            found = llm.chat(talks, greedy, use_tqdm=False)
            assert [list(each.outputs[0].token_ids) for each in found] == expected
        refused: dict[str, Any] = {
            "nothing is fetched": {"type": "image_url", "image_url": "https://example.org/a.png"},
            "not an image": {"type": "image_url", "image_url": "data:;base64,AAAA"},
            "Pillow": {"type": "image_pil", "image_pil": b"no"},
            "text, image_url or image_pil": {"type": "image"},
        }
        for why, part in refused.items():
            with pytest.raises(InvalidRequestError, match=why) as caught:
                llm.chat([{"role": "user", "content": [part]}], greedy, use_tqdm=False)
            assert caught.value.param == "messages[0].content[0]"
        assistant = [{**user(picture(0), form="image_pil")[0], "role": "assistant"}]
        with pytest.raises(InvalidRequestError, match="only a user's"):
            llm.chat(assistant, greedy, use_tqdm=False)
        spoken = user("<image>", picture(0), form="image_pil")
        with pytest.raises(InvalidRequestError, match="2 times '<image>'"):
            llm.chat(spoken, greedy, use_tqdm=False)


def test_a_model_without_a_tower_refuses_images(llava: Model, tiny_checkpoint: Any) -> None:
    core, _ = build_core(
        EngineConfig(
            model=ModelConfig(model=str(tiny_checkpoint())),
            cache=CacheConfig(num_blocks=64),
            device=DeviceConfig(device="cpu"),
        )
    )
    request = llava.request(["a", picture(0)], "a")
    ids = tuple(token_id % 96 for token_id in request.prompt_token_ids)
    with pytest.raises(InvalidRequestError, match="takes no images"):
        core.add(msgspec.structs.replace(request, prompt_token_ids=ids))


@pytest.mark.parametrize("kind", KINDS)
def test_features_and_tokens_agree_for_every_shape(kind: str, tmp_path: Path) -> None:
    """As the processors of `transformers` count them."""
    model = Model(kind, tmp_path)
    sizes = [(28, 28), (7, 7), (57, 56), (56, 57), (300, 200), (20, 130), (1990, 10), (10, 1990)]
    for width, height in sizes:
        data = picture(0, width, height)
        given = model.processor(images=[Image.open(io.BytesIO(data))], return_tensors="pt")
        with torch.no_grad():
            found = model.reference.model.get_image_features(**given).pooler_output
        num_features = sum(each.shape[:-1].numel() for each in found)
        assert model.request([data], "").images[0].num_features == num_features, (width, height)


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
@torch.no_grad()
def test_a_prompt_with_images_is_embedded(kind: str, tmp_path: Path) -> None:
    """As the hidden state of its last token, with the images beside each other and alone."""
    model = Model(kind, tmp_path)
    no_output = {"params": {"max_tokens": 0, "ignore_eos": False, "speculation": False}}
    requests = [
        model.request(parts, str(number), pooling=PoolingParams(task="embed"), **no_output)
        for number, parts in enumerate(PROMPTS)
    ]
    core = model.core(num_blocks=100)
    found = run(core, *requests)
    for request, parts in zip(requests, PROMPTS, strict=True):
        [output] = [each for each in found[request.request_id] if each.vector is not None]
        vector = torch.frombuffer(bytearray(output.vector or b""), dtype=torch.float32)
        wanted = model.hidden(parts)[0, -1]
        wanted = torch.nn.functional.normalize(wanted.double(), dim=0).float()
        torch.testing.assert_close(vector, wanted, atol=2e-5, rtol=2e-5)
