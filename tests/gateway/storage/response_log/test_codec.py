"""Headers and entries as bytes: what goes in comes out, and what is none of ours is refused."""

from __future__ import annotations

import dataclasses

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.chat_formats import OutputFormat, OutputSyntax, Tool
from penstock.engine.request import (
    Adapter,
    BeamSearch,
    FinishReason,
    ImageInput,
    RepetitionDetection,
    Request,
    Retention,
    SamplingParams,
    StructuredOutputs,
    ThoughtLimit,
)
from penstock.gateway.storage.response_log.codec import (
    LATER_FIELDS,
    VERSION,
    UnreadableEntryError,
    decode_appended,
    decode_delta,
    decode_end,
    decode_header,
    decode_log,
    encode_appended,
    encode_delta,
    encode_end,
    encode_header,
    encode_log,
)
from penstock.gateway.storage.response_log.record import (
    Compaction,
    DeltaEntry,
    EndEntry,
    Entry,
    LogHeader,
    Steered,
    SteerEntry,
)

from .records import header

token_ids = st.lists(st.integers(0, (1 << 32) - 1), max_size=20).map(tuple)
numbers = st.integers(0, 1 << 53)
scalars = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text()
json_values = st.recursive(
    scalars | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
json_objects = st.dictionaries(st.text(), json_values, max_size=4)
sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 100),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 200_000), st.floats(-100, 100), max_size=3),
    seed=st.integers(0, (1 << 64) - 1),
    max_tokens=st.integers(10, 1 << 31),
    min_tokens=st.integers(0, 10),
    ignore_eos=st.booleans(),
    stop_token_ids=token_ids,
    allowed_token_ids=st.none() | token_ids.filter(bool),
    bad_words=st.lists(st.text("ab", min_size=1), max_size=2).map(tuple),
    bad_words_token_ids=st.lists(token_ids.filter(bool), max_size=2).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    stop=st.lists(st.text(min_size=1), max_size=4).map(tuple),
    structured_outputs=st.none()
    | st.builds(
        StructuredOutputs,
        kind=st.sampled_from(["json_schema", "regex", "lark"]),
        text=st.text(),
        triggers=st.sampled_from([(), ("<call>",), (7,)]),
    ),
    repetition_detection=st.none()
    | st.builds(
        RepetitionDetection,
        max_pattern_size=st.integers(5, 9),
        min_pattern_size=st.integers(1, 5),
        min_count=st.integers(2, 9),
    ),
    thinking_token_budget=st.sampled_from([-1, 0, 99]),
    thought_limit=st.none()
    | st.builds(
        ThoughtLimit,
        begins=st.just(("<think>",)),
        ends=st.just(("</think>", "<end>")),
        marks=st.sampled_from([(), ((7, "<think>"),)]),
        end_token_ids=st.just((1, 2)),
        is_thinking=st.booleans(),
        never=st.sampled_from([(), ((7, 8),)]),
    ),
    include_stop_str_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
    spaces_between_special_tokens=st.booleans(),
    speculation=st.booleans(),
)
searches = st.builds(
    SamplingParams,
    beam_search=st.builds(
        BeamSearch,
        width=st.integers(1, 8),
        length_penalty=st.floats(-10, 10),
        early_stopping=st.sampled_from([True, False, "never"]),
    ),
)
images = st.builds(
    ImageInput,
    digest=st.text(),
    offset=st.integers(0, 1000),
    num_tokens=st.integers(1, 1000),
    num_features=st.integers(1, 1000),
    data=st.binary(max_size=20),
)
requests = st.builds(
    Request,
    request_id=st.text(),
    prompt_token_ids=token_ids,
    sampling_params=sampling | searches,
    arrival_s=st.floats(0, 4e9),
    output_token_ids=token_ids,
    tenant=st.text(),
    weight=st.floats(0.001, 1000),
    priority=st.integers(-100, 100),
    cache_salt=st.text(),
    adapter=st.none() | st.builds(Adapter, name=st.text(), path=st.text(), digest=st.text()),
    prediction_token_ids=token_ids,
    images=st.lists(images, max_size=2).map(tuple),
    retention=st.none()
    | st.builds(Retention, duration_s=st.floats(0, 1e6), priority=st.integers(-9, 9)),
)
formats = st.builds(
    OutputFormat,
    syntax=st.builds(
        OutputSyntax,
        tools=st.sampled_from(["", "hermes"]),
        reasoning=st.sampled_from(["", "qwen3"]),
        begins_in_reasoning=st.booleans(),
    ),
    tools=st.lists(
        st.builds(Tool, name=st.text(), parameters=st.none() | json_objects), max_size=2
    ).map(tuple),
    custom=st.frozensets(st.text(), max_size=2),
    aliases=st.dictionaries(st.text(), st.text(), max_size=2),
    max_calls=st.none() | st.just(1),
)
compactions = st.builds(
    Compaction,
    request=requests,
    output_format=st.none() | formats,
    around=st.tuples(st.text(), st.text()),
)
headers = st.builds(
    LogHeader,
    response_id=st.text(),
    conversation_id=st.text(),
    tenant=st.text(),
    nonce=st.text(),
    output_format=st.none() | formats,
    created_at=numbers,
    echo=json_objects,
    request=requests,
    parent_id=st.none() | st.text(),
    takes_head=st.booleans(),
    generates=st.booleans(),
    is_background=st.booleans(),
    continues=st.booleans(),
    input_items=st.lists(json_objects, max_size=3).map(tuple),
    rendering=st.none()
    | st.tuples(numbers, st.binary(min_size=32, max_size=32))
    | st.tuples(numbers, st.binary(min_size=32, max_size=32), st.binary(max_size=8)),
    compaction=st.none() | compactions,
)
WITH_THOUGHTS = OutputFormat(syntax=OutputSyntax(reasoning="qwen3"))
deltas = st.builds(
    DeltaEntry,
    number=numbers,
    text=st.text(),
    token_ids=token_ids,
    logprobs=st.lists(json_objects, max_size=2).map(tuple),
    output_index=st.integers(0, 9),
    num_events=st.integers(1, 9),
    name=st.sampled_from(["", "f", "space/f"]),
)
ends = st.builds(
    EndEntry,
    number=numbers,
    num_events=st.integers(1, 5),
    reason=st.none() | st.sampled_from(FinishReason),
    usage=st.tuples(numbers, numbers, numbers) | st.tuples(numbers, numbers, numbers, numbers),
    ended_at=numbers,
    error=st.none() | st.tuples(st.text(), st.text()),
    prefix_id=st.none() | st.binary(),
    steered=st.none() | st.builds(Steered, status=st.sampled_from(["committed", "pending"])),
    cache=st.none() | st.dictionaries(st.text(), numbers),
)


@given(headers)
def test_a_header_survives(written: LogHeader) -> None:
    assert decode_header(encode_header(written)) == written


@given(deltas)
def test_a_delta_survives(written: DeltaEntry) -> None:
    if written.name:  # only the first delta of a call has one
        written = msgspec.structs.replace(written, kind="function_call")
    assert decode_delta(encode_delta(written)) == written


@given(ends)
def test_an_end_survives(written: EndEntry) -> None:
    assert decode_end(encode_end(written)) == written


@given(headers, st.lists(deltas, max_size=4), ends)
def test_an_ended_log_survives(written: LogHeader, said: list[DeltaEntry], end: EndEntry) -> None:
    number, numbered = written.num_opening_events, list[DeltaEntry]()
    for each in said:
        only = {"output_index": 0, "num_events": 1, "name": ""} if written.is_text_only else {}
        numbered.append(msgspec.structs.replace(each, number=number, **only))
        number = numbered[-1].last_number + 1
    assert decode_log(encode_log(written, [*numbered, end])) == (written, [*numbered, end])


def test_every_field_of_a_header_is_written() -> None:
    """The strategy above may not know a field that came later; the codec must."""
    first = Compaction(request=header().request, output_format=None, around=("a", "b"))
    written = dataclasses.replace(header(), output_format=WITH_THOUGHTS, compaction=first)
    _, named = msgpack.unpackb(encode_header(written), strict_map_key=False)
    names = {field.name for field in dataclasses.fields(LogHeader)}
    assert named.keys() == names - {"nonce", "settings", "key_id"} | {"item_id"}
    later = LATER_FIELDS.keys()
    assert named["request"].keys() == set(Request.__struct_fields__) - later
    params = named["request"]["sampling_params"]
    assert params.keys() == set(SamplingParams.__struct_fields__) - later


def test_settings_and_key_do_not_keep_older_gateways_from_reading_a_header() -> None:
    written = dataclasses.replace(header(), settings={"instructions": "x"}, key_id="laptop")
    data = encode_header(written)
    _, named = msgpack.unpackb(data, strict_map_key=False)
    _, plain = msgpack.unpackb(encode_header(header()), strict_map_key=False)
    assert named.keys() == plain.keys()
    assert decode_header(data) == written


@pytest.mark.parametrize("is_text_only", [True, False])
def test_steers(is_text_only: bool) -> None:
    known = dataclasses.replace(header(), output_format=None if is_text_only else WITH_THOUGHTS)
    number = known.num_opening_events
    steer = SteerEntry(number + 1, '"two"', name="steer_1")
    steered = Steered(status="failed", is_cut=True, drops_call=True, error=("code", "why"))
    end = EndEntry(
        number=number + 2, num_events=5, reason=FinishReason.ABORT, usage=(1, 0, 1), ended_at=1,
        steered=steered,
    )  # fmt: skip
    assert decode_delta(encode_delta(steer)) == steer
    assert decode_end(encode_end(end)) == end
    entries: list[Entry] = [DeltaEntry(number, "a", (1,)), steer]
    appended = [(7, entries)]
    assert decode_appended(encode_appended(appended)) == appended
    assert decode_log(encode_log(known, [*entries, end])) == (known, [*entries, end])


def test_a_later_field_is_written_only_with_a_value() -> None:
    """Older gateways cannot read a header with a field that they do not know."""
    assert LATER_FIELDS["prediction_token_ids"] == ()
    assert LATER_FIELDS["speculation"] is True
    plain = header()
    assert decode_header(encode_header(plain)) == plain
    for field in (b"prediction_token_ids", b"speculation"):
        assert field not in encode_header(plain)
    request = msgspec.structs.replace(
        plain.request,
        prediction_token_ids=(1, 2),
        sampling_params=SamplingParams(speculation=False),
    )
    asked = dataclasses.replace(plain, request=request)
    for field in (b"prediction_token_ids", b"speculation"):
        assert field in encode_header(asked)
    assert decode_header(encode_header(asked)) == asked


def test_a_header_of_an_older_gateway_with_a_deadline_is_read() -> None:
    written = header()
    version, named = msgpack.unpackb(encode_header(written), strict_map_key=False)
    named["request"]["deadline_s"] = 1.7e9
    assert decode_header(msgpack.packb((version, named))) == written


def test_a_delta_costs_little_more_than_its_text() -> None:
    delta = DeltaEntry(1000, "some text of a token or two", (31_000, 128_255))
    assert len(encode_delta(delta)) <= len(delta.text) + 16


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"penstock",
        msgpack.packb([VERSION]),
        msgpack.packb([VERSION, {}]),
        msgpack.packb([VERSION, None, None, None, None, None, None, None]),
        msgpack.packb([VERSION + 1, 1, "text", []]),
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    for decode in (decode_header, decode_delta, decode_end, decode_log):
        with pytest.raises(UnreadableEntryError):
            decode(data)
