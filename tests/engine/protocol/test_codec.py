"""Messages as bytes."""

from __future__ import annotations

import hashlib
import re
from functools import reduce
from operator import or_
from types import GenericAlias, UnionType
from typing import Any, Union, get_origin

import pytest
from msgspec.structs import fields, replace

from penstock.engine.pooling.settings import PoolingParams
from penstock.engine.protocol.frames import decode, encode
from penstock.engine.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    BlocksStored,
    CachedKeys,
    Draining,
    DropPrefix,
    EngineInfo,
    EngineStats,
    Failure,
    FetchBlocks,
    Heartbeat,
    Hello,
    Hold,
    KVBlock,
    KVBlocks,
    Step,
    Submit,
    UnloadAdapter,
    WantKeys,
    step_of,
)
from penstock.engine.request import (
    Adapter,
    BeamSearch,
    FinishReason,
    ImageInput,
    Notice,
    Request,
    RequestOutput,
    Retention,
    SamplingParams,
    Spent,
    StructuredOutputs,
    ThoughtLimit,
    TokenLogprobs,
)
from tests.engine.process.stack import INFO


def test_every_message_survives_the_wire() -> None:
    params = SamplingParams(
        temperature=0.5, logit_bias={3: -1.5}, stop_token_ids=(7, 8), seed=2**64 - 1, logprobs=2
    )
    request = Request(
        request_id="é",
        prompt_token_ids=(1, 2),
        output_token_ids=(3,),
        sampling_params=params,
        arrival_s=1.25,
        tenant="t",
        prediction_token_ids=(5, 6),
        adapter=Adapter(name="a", path="/a", digest="d"),
    )
    logprobs = TokenLogprobs(token_id=3, logprob=-0.5, rank=2, top=((4, -0.25), (3, -0.5)))
    output = RequestOutput(
        request_id="é",
        token_ids=(3,),
        logprobs=(logprobs,),
        finish_reason=FinishReason.STOP,
        stop_token_id=3,
    )
    stats = EngineStats(num_requests_running=3, num_accepted_tokens_per_pos_total=(2, 1))
    for message in (
        Hello(),
        INFO,
        Submit(request=request),
        Submit(request=request, name="r", epoch=(2, 1)),
        Submit(request=replace(request, pooling=PoolingParams(task="score", num_first_tokens=3))),
        Abort(request_ids=("a", "b")),
        Hold(request_id="a", return_s=10.0),
        DropPrefix(token_ids=(1, 2), adapter="d"),
        UnloadAdapter(name="a"),
        WantKeys(),
        CachedKeys(number=3, added=b"abcd", removed=b"efgh"),
        CachedKeys(number=4, added=b"abcd", is_snapshot=True),
        FetchBlocks(number=5, keys=(b"k" * 32,)),
        KVBlocks(
            number=5,
            kv_root=b"r",
            blocks=(KVBlock(parent=b"p", tokens=b"t", key=b"k", data=b"\x00\xff", checksum=9),),
        ),
        BlocksStored(number=5, num_blocks=1),
        Draining(),
        Step(number=7, outputs=(output,), stats=stats),
        Step(number=9, outputs=(RequestOutput(request_id="a", is_superseded=True),)),
        Step(number=8, outputs=(RequestOutput(request_id="a", index=2, token_ids=(4, 5)),)),
        Step(number=8, outputs=(RequestOutput(request_id="a", vector=bytes(range(8))),)),
        Step(number=8, outputs=(), tokens={"é": 4, "b": 5}),
        Heartbeat(stats=stats, since_step_s=0.5),
        Heartbeat(),
        Failure(message="x"),
    ):
        assert decode(encode(message)) == message
    text_level = replace(request, sampling_params=replace(params, stop=("END",), bad_words=("x",)))
    assert decode(encode(Submit(request=text_level))) == Submit(request=request)


def test_only_what_is_one_token_and_nothing_else_is_sent_as_a_token() -> None:
    plain = RequestOutput(request_id="a", token_ids=(4,))
    assert step_of(3, (plain,), None) == Step(number=3, outputs=(), tokens={"a": 4})
    seldom = {"token_ids": (4, 5), "logprobs": (TokenLogprobs(token_id=4, logprob=-1.0, rank=1),)}
    with_an_end = {"stop_token_id", "score", "prefix_id", "vector"}
    with_an_end |= {"error", "is_refused", "param", "is_superseded"}
    with_others = {"request_id", "num_host_cached_tokens"}
    for field in fields(RequestOutput):
        if field.name not in with_an_end | with_others:
            other = replace(plain, **{field.name: seldom.get(field.name, 1)})
            assert step_of(3, (other,), None) == Step(number=3, outputs=(other,))


def test_the_outputs_of_a_request_keep_their_order() -> None:
    """Those of a frame come before its tokens."""
    a, b = (RequestOutput(request_id=name, token_ids=(4,)) for name in "ab")
    told = RequestOutput(request_id="a", notice=Notice.RESUMED)
    assert step_of(1, (told, b, a), None) == Step(
        number=1, outputs=(told,), tokens={"b": 4, "a": 4}
    )
    assert step_of(1, (a, b, told), None) == Step(number=1, outputs=(a, told), tokens={"b": 4})
    assert step_of(1, (a, a), None).outputs == (a, a)
    assert step_of(1, (a, a, a), None) == Step(number=1, outputs=(a, a), tokens={"a": 4})


def _bare(kind: Any) -> Any:
    """A type without what is declared beside it and its parts, which no frame has."""
    if hasattr(kind, "__metadata__"):
        return _bare(kind.__origin__)
    if get_origin(kind) in (Union, UnionType):
        return reduce(or_, map(_bare, kind.__args__))
    if isinstance(kind, GenericAlias):
        return GenericAlias(kind.__origin__, tuple(map(_bare, kind.__args__)))
    return kind


def test_another_layout_is_another_version() -> None:
    """Fails with every field that a frame gains, loses or has elsewhere: raise the version then,
    and set both here anew."""
    kinds = (
        *(Hello, EngineInfo, Submit, Abort, Hold, DropPrefix, UnloadAdapter, WantKeys, CachedKeys),
        *(Step, Heartbeat, Draining, Failure, FetchBlocks, KVBlocks, KVBlock, BlocksStored),
        *(Request, Adapter, SamplingParams, StructuredOutputs, BeamSearch, Retention),
        *(PoolingParams, ImageInput, ThoughtLimit),
        *(RequestOutput, TokenLogprobs, Spent, EngineStats),
    )
    layout = [
        [kind.__name__, *(f"{each.name}: {_bare(each.type)}" for each in fields(kind))]
        for kind in kinds
    ]
    without_modules = re.sub(r"\bpenstock(\.\w+)*\.", "", repr(layout))
    digest = hashlib.sha256(without_modules.encode()).hexdigest()[:16]
    assert (PROTOCOL_VERSION, digest) == (26, "1c0c72cdd629204d")


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x90", b"\x91\xa4what", b"\x01"])
def test_what_is_no_frame_is_a_value_error(frame: bytes) -> None:
    with pytest.raises(ValueError, match="not a penstock frame"):
        decode(frame)
