"""A turn runs while its response does: in every kind of storage the logs say so."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.api.responses.running_turn import turn_of
from penstock.gateway.config import GatewayConfig
from penstock.gateway.shared_state import shared_state
from penstock.gateway.storage.conversations.ids import new_response_id
from penstock.gateway.storage.conversations.store import ConversationLockedError

from ..conftest import patient_log_settings
from .conversations.making import a_conversation
from .response_log.records import TENANT, add_end, header, read_to_end, run_of, until_found

KINDS = ["memory", "disk", pytest.param("redis", marks=pytest.mark.redis)]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_response_holds_the_head_for_as_long_as_it_runs(
    kind: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place: dict[str, Any] = {"data_dir": "none" if kind == "memory" else str(tmp_path / "data")}
    if kind == "redis":
        place = {"redis_url": request.getfixturevalue("redis_server").url}
    config = GatewayConfig(engine_address="unused", **place)
    state = shared_state(config, log_settings=patient_log_settings())
    monkeypatch.setattr(state.conversations, "_starts_ms", 0)  # as if all had begun long ago
    await state.start()
    try:
        await state.logs.start()
        made = header()
        conversation = a_conversation(conversation_id=made.conversation_id, tenant=TENANT)
        await state.conversations.create(conversation)
        key = (TENANT, made.conversation_id)
        log = await state.logs.create(made)
        await state.conversations.begin_turn(turn_of(made), takes_head=True)
        assert (await state.conversations.get(*key)).running == made.response_id
        rival = dataclasses.replace(turn_of(made), turn_id=new_response_id(made.conversation_id))
        with pytest.raises(ConversationLockedError):
            await state.conversations.begin_turn(rival, takes_head=True)
        run_of(log).append_delta("x", (1,))
        add_end(log)  # the turn could not be stored
        await read_to_end(log)
        monkeypatch.setattr("penstock.gateway.storage.conversations.tree._KNOWN_MS", 0)

        async def has_failed() -> bool:
            turn = await state.conversations.turn(TENANT, made.response_id)
            return turn.status == "failed"

        await until_found(has_failed)
        await state.conversations.begin_turn(rival, takes_head=True)
    finally:
        await state.close()
