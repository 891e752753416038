"""The chat page against the real server: what a reader sees and does."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, Route, WebSocketRoute, expect

from ..processes import NUM_CONTEXT_TOKENS, Served
from .conftest import NewPage, make_conversation
from .page_flow import (
    ENDLESS,
    STORY,
    ask,
    choose,
    connected,
    conversation_of,
    finished,
    growing,
    open_page,
    say,
    stopped,
    stories,
)

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

HTML = (
    "<script>document.title = 'owned'</script> <img src=x onerror=\"document.title='owned'\"> &amp;"
)
UNICODE = "Zoë 👩‍🚀 日本語 שלום a\u0301\u200b ﷽ \u202eabc\u202c 𝔘"


async def test_several_turns_stop_continue_and_a_new_chat(page: Page, demo_server: Served) -> None:
    await stories(page)
    await open_page(page, demo_server.base_url, temperature=0)
    # By its attribute: conversations of other tests have buttons of that name, too.
    await page.locator("#suggestions button", has_text="My name is Ada").click()
    first = page.locator(".turn").first
    assert "Ada" in await finished(first)
    await expect(first.locator(".stats")).to_contain_text(re.compile(r"first token after [\d.]+ s"))
    assert "Ada" in await ask(page, "What is my name?")

    story = await say(page, STORY)
    await growing(story)
    await expect(page.locator("#live")).to_be_visible()
    await page.get_by_role("button", name="Stop").click()
    cut = await finished(story)
    await expect(story).to_contain_text("Stopped.")
    await story.get_by_role("button", name="Continue").click()
    await growing(story, len(cut) + 1)
    assert (await finished(story)).startswith(cut)
    await expect(story).not_to_contain_text("Stopped.")

    assert "Ada" in await ask(page, "What is my name?")
    texts = await page.locator(".transcript").inner_text()
    await page.reload()
    await connected(page)
    await expect(page.locator(".turn")).to_have_count(4)  # both halves are one answer
    assert await page.locator(".turn .prose").all_inner_texts() != []
    for line in texts.splitlines():
        if len(line) > 40:
            await expect(page.locator(".transcript")).to_contain_text(line)

    await page.get_by_role("button", name="New chat").click()
    await expect(page.locator(".turn")).to_have_count(0)
    await expect(page.locator("#welcome")).to_be_visible()
    assert "Ada" not in await ask(page, "What is my name?")


async def test_regenerate_edit_and_branches(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    await open_page(page, demo_server.base_url, temperature=0)
    await ask(page, "My name is Ada.")
    first = await ask(page, "What is my name?")
    last = page.locator(".turn").last
    await last.get_by_role("button", name="Regenerate").click()
    await expect(last.locator(".place")).to_have_text("2/2")
    assert await finished(last) == first  # at temperature 0
    # To edit an earlier message is to begin a branch there.
    await page.locator(".turn").first.hover()
    await page.locator(".turn").first.get_by_role("button", name="Edit", exact=True).click()
    await page.get_by_role("textbox", name="Edit your message").fill("My name is Grace.")
    await page.keyboard.press("Enter")
    await expect(page.locator(".turn")).to_have_count(1)
    assert "Grace" in await finished(page.locator(".turn"))
    assert "Grace" in await ask(page, "What is my name?")

    root = page.locator(".turn").first
    await expect(root.locator(".place")).to_have_text("2/2")
    await root.get_by_role("button", name="Previous version").click()
    await expect(page.locator(".bubble").first).to_have_text("My name is Ada.")
    await expect(page.locator(".turn").nth(1).locator(".place")).to_have_text("2/2")
    assert "Ada" in await ask(page, "What is my name?")
    await page.reload()  # the server has all of it
    await connected(page)
    await expect(page.locator(".turn")).to_have_count(3)
    await expect(page.locator(".turn").first.locator(".place")).to_have_text("1/2")
    await page.locator(".turn").first.get_by_role("button", name="Next version").click()
    await expect(page.locator(".bubble").first).to_have_text("My name is Grace.")
    tree = (await api.get(f"conversations/{conversation_of(page)}/tree")).json()
    assert len(tree["data"]) == 6


@pytest.mark.exhaustive
async def test_versions_are_switched_where_they_differ(page: Page, demo_server: Served) -> None:
    """Under an answer that was made again, beside one that was edited; after a reload, too."""
    await open_page(page, demo_server.base_url, max_output_tokens=5)
    await ask(page, "Hello!")
    await ask(page, "Who are you?")
    first, second = page.locator(".turn").first, page.locator(".turn").nth(1)
    await second.get_by_role("button", name="Regenerate").click()
    again = second.locator(".assistant .place")
    await expect(again).to_have_text("2/2")
    await page.reload()
    await connected(page)
    await expect(again).to_have_text("2/2")
    await first.hover()
    await first.get_by_role("button", name="Edit", exact=True).click()
    await page.get_by_role("textbox", name="Edit your message").fill("Good morning!")
    await page.keyboard.press("Enter")
    edited = first.locator(".user .place")
    await expect(edited).to_have_text("2/2")
    await page.reload()
    await connected(page)
    await expect(edited).to_have_text("2/2")
    await expect(first.locator(".place")).to_have_count(1)
    await first.get_by_role("button", name="Previous version").click()
    await expect(page.locator(".bubble").first).to_have_text("Hello!")
    await expect(edited).to_have_text("1/2")
    await expect(again).to_have_text("2/2")


async def test_the_list_of_conversations(page: Page, demo_server: Served) -> None:
    await stories(page)
    await open_page(page, demo_server.base_url)
    await ask(page, "My name is Ada.")
    await page.get_by_role("button", name="New chat").click()
    story = await say(page, STORY)
    await growing(story)
    link = page.get_by_role("link", name="My name is Ada.").first
    await link.click()  # while the other is being answered, on the same connection
    await expect(page.locator(".bubble")).to_have_text("My name is Ada.")
    assert await ask(page, "What is my name?")
    await page.go_back()
    await expect(page.locator(".bubble")).to_have_text(STORY)
    assert len(await stopped(page, page.locator(".turn"))) >= 40

    current = page.locator("#conversations li:has([aria-current])")
    await expect(current).to_have_text(STORY)
    await choose(current, "Rename")
    await page.get_by_label("Title").fill("A fox")
    await page.keyboard.press("Enter")
    await expect(current).to_have_text("A fox")
    await choose(current, "Delete")
    await expect(page.locator("#conversations")).not_to_contain_text("A fox")
    await expect(page.locator("#composer-text")).to_be_focused()
    await expect(page.locator("#welcome")).to_be_visible()
    await page.reload()  # to leave the page is to be sure
    await connected(page)
    await expect(page.get_by_role("link", name="My name is Ada.").first).to_be_visible()
    await expect(page.locator("#conversations")).not_to_contain_text("A fox")


async def test_markup_and_unicode_are_text(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    said = f"{HTML}\n\n{UNICODE}"
    conversation = await make_conversation(api, [("user", said), ("assistant", said)], title=HTML)
    await open_page(page, f"{demo_server.base_url}/#{conversation}")
    assert await page.locator(".bubble").inner_text() == said
    assert await page.locator(".prose").inner_text() == said
    await ask(page, said)
    assert await page.locator(".bubble").last.inner_text() == said
    await expect(page.get_by_role("link", name=HTML)).to_be_visible()
    assert await page.title() == f"{HTML} – penstock"
    assert await page.locator("body :is(.transcript, .sidebar nav) :is(script, img)").count() == 0
    refused = await page.evaluate(
        "try { document.body.innerHTML = '<b>'; false } catch (error) { true }"
    )
    assert refused  # the policy lets nobody write HTML, by mistake neither


@pytest.mark.exhaustive
async def test_an_answer_of_several_items(page: Page, demo_server: Served) -> None:
    """They are shown in order: text, a call, text; and copied as paragraphs."""

    async def add_items(route: Route) -> None:
        tree = await (await route.fetch()).json()
        said = tree["data"][0]["output"]
        more = {**said, "content": [{"type": "output_text", "text": " And **more**."}]}
        call = {"type": "function_call", "id": "fc_1", "name": "f", "arguments": "hidden"}
        tree["data"][0]["output"] = [said, call, more]
        await route.fulfill(json=tree)

    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await page.route("**/tree?items=true", add_items)
    await open_page(page, demo_server.base_url, temperature=0)
    answer = await ask(page, "What is penstock?")
    await page.reload()
    parts = page.locator(".turn .assistant").locator(".prose, .block summary")
    await expect(parts).to_have_text([answer, "Called f", "And more."])
    await expect(page.locator(".prose strong")).to_have_text("more")
    await page.get_by_role("button", name="Copy answer").click()
    copied = f"{answer}\n\n And **more**."
    await page.wait_for_function(
        "async (text) => (await navigator.clipboard.readText()) === text", arg=copied
    )


async def test_settings_and_figures(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    await open_page(page, demo_server.base_url)
    await page.get_by_role("button", name="Settings").click()
    await page.get_by_label("System prompt").fill("My name is Ada.")
    await page.get_by_label("Temperature").fill("0")
    await page.get_by_label("Max tokens").fill("12")
    await page.get_by_label("Dark").check()
    await page.get_by_role("button", name="Done").click()
    background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", background))) < 60
    turn = await say(page, STORY)
    await finished(turn)
    await expect(turn).to_contain_text("reached its length limit")
    tree = (await api.get(f"conversations/{conversation_of(page)}/tree")).json()
    response = (await api.get(f"responses/{tree['head']}")).json()
    assert response["instructions"] == "My name is Ada."
    assert (response["temperature"], response["max_output_tokens"]) == (0, 12)

    await page.reload()
    await connected(page)
    await turn.get_by_role("button", name="Figures").click()
    usage = response["usage"]
    await expect(turn.locator(".stats")).to_have_text(
        re.compile(
            rf"12 tokens\s*prompt {usage['input_tokens']} tokens\s*\d+ of them cached[\s\S]*by demo"
        )
    )
    await page.get_by_role("button", name="Settings").click()
    await expect(page.get_by_label("Temperature")).to_have_value("0")
    await page.get_by_role("button", name="Reset to defaults").click()
    await expect(page.get_by_label("Temperature")).to_have_value("")
    await expect(page.get_by_label("Dark")).to_be_checked()


@pytest.mark.exhaustive
async def test_sampling_is_shown_and_changed(page: Page, demo_server: Served) -> None:
    """What the server says of the model, and what the user says instead."""
    sent: list[str] = []
    page.on("websocket", lambda socket: socket.on("framesent", lambda text: sent.append(text)))
    advice = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05}

    async def advise(route: Route) -> None:
        models = await (await route.fetch()).json()
        models["data"][0]["chat_sampling"] = advice
        await route.fulfill(json=models)

    def asked() -> dict[str, Any]:
        body = next(body for each in sent[::-1] if "input" in (body := json.loads(each)))
        return {name: body.get(name) for name in advice}

    fields = [page.get_by_label(name, exact=True) for name in ("Temperature", "Top p", "Min p")]
    await open_page(page, demo_server.base_url, max_output_tokens=8)
    await page.get_by_role("button", name="Settings").click()
    for field, shown in zip(fields, ("0.2", "0.9", "default"), strict=True):
        await expect(field).to_have_attribute("placeholder", shown)
    await page.get_by_role("button", name="Done").click()
    await finished(await say(page, "Hello!"))
    assert asked() == {"temperature": 0.2, "top_p": 0.9, "min_p": None}
    await page.route("**/v1/models", advise)
    await page.reload()
    await connected(page)
    await finished(await say(page, "Hello!"))
    assert asked() == advice
    await page.get_by_role("button", name="Settings").click()
    for field, value in zip(fields, advice.values(), strict=True):
        await expect(field).to_have_attribute("placeholder", str(value))
    more = page.get_by_text("More sampling")
    await more.click()
    await page.get_by_label("Min p").fill("0.2")
    further = page.get_by_label("Further parameters")
    for wrong in ("[1]", '{"model": "other"}', "{"):
        await further.fill(wrong)
        await more.click()
        await expect(further).to_be_hidden()
        await page.get_by_role("button", name="Done").click()
        await expect(further).to_be_visible()
    await further.fill('{"top_n_sigma": 1.5, "top_p": 0.7}')
    await page.get_by_role("button", name="Done").click()
    await finished(await say(page, "Hello!"))
    assert asked() == {**advice, "min_p": 0.2, "top_p": 0.7}
    assert '"top_n_sigma":1.5' in sent[-1]


@pytest.mark.exhaustive
async def test_figures_of_an_answer_with_drafts(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    """They say how many were right; those of the same answer without drafts say nothing of it."""
    body: dict[str, Any] = {"input": "My name is Ada.", "temperature": 0, "max_output_tokens": 40}
    for has_drafts in (False, True):
        body["conversation"] = await make_conversation(api, [])
        response = (await api.post("responses", json=body)).json()
        expected = "cached(?!.*drafted)"
        if has_drafts:
            counts = response["usage"]["penstock"]
            num_right, num_drafts = counts["accepted_draft_tokens"], counts["draft_tokens"]
            assert num_right > 0
            expected = rf"cached\s*{num_right} of {num_drafts} drafted tokens right"
        await page.goto(f"{demo_server.base_url}/#{body['conversation']}")
        await connected(page)
        turn = page.locator(".turn")
        await turn.get_by_role("button", name="Figures").click()
        await expect(turn.locator(".stats")).to_have_text(re.compile(rf"{expected}[^$]*by demo$"))
        text = response["output"][0]["content"][0]["text"]
        body["prediction"] = {"type": "content", "content": text}


@pytest.mark.exhaustive
async def test_keyboard(page: Page, demo_server: Served) -> None:
    await stories(page)
    await open_page(page, demo_server.base_url)
    await page.keyboard.type("Tell me a")  # the message box has the focus from the start
    await page.keyboard.press("Shift+Enter")
    await page.keyboard.type("long story.")
    await page.keyboard.press("Enter")
    turn = page.locator(".turn")
    await expect(turn.locator(".bubble")).to_have_text("Tell me a\nlong story.")
    await growing(turn)
    await expect(page.locator("#live")).to_contain_text("Esc stops")
    await page.keyboard.type("Hello!")
    await stopped(page, turn)
    await expect(page.get_by_role("textbox")).to_have_value("Hello!")
    await page.keyboard.press("Enter")
    await finished(page.locator(".turn").nth(1))
    await expect(page.locator("#announcer")).not_to_have_text("")
    await page.keyboard.press("ArrowUp")
    await expect(page.get_by_role("textbox", name="Edit your message")).to_have_value("Hello!")
    await page.keyboard.press("Escape")
    await page.locator("#composer-text").focus()
    await page.keyboard.press("Alt+r")
    await expect(page.locator(".place").last).to_have_text("2/2")
    await page.keyboard.press("Alt+l")
    await expect(page.locator("#sidebar")).to_be_hidden()
    await page.keyboard.press("Alt+n")
    await expect(turn).to_have_count(0)
    await expect(page.locator("#composer-text")).to_be_focused()
    # Focus goes through the page in the order in which it is seen.
    await page.keyboard.press("Shift+Tab")
    await expect(page.get_by_role("button", name="Watch a long stream")).to_be_focused()


@pytest.mark.exhaustive
async def test_drafts_stay_with_their_conversations(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    box = page.locator("#composer-text")
    first, second = [
        await make_conversation(api, [("user", "Hello!")], title=f"Drafts of {name}")
        for name in ("one", "another")
    ]
    await open_page(page, demo_server.base_url, max_output_tokens=5)
    drafts = {"": "of one to come", first: "of the first\n", second: "of the second"}
    for conversation, draft in drafts.items():
        await page.evaluate(f"location.hash = '#{conversation}'")
        await expect(box).to_have_value("")
        await box.fill(draft)
    for is_reloaded in (False, True):
        for conversation, draft in drafts.items():
            await page.evaluate(f"location.hash = '#{conversation}'")
            if is_reloaded:
                await page.reload()
                await connected(page)
            await expect(box).to_have_value(draft)
    await page.keyboard.press("Alt+n")
    await box.press("Enter")
    await finished(page.locator(".turn"))  # with it, the new chat's draft is gone, and no other
    await expect(box).to_have_value("")
    drafts[""] = ""
    for conversation, draft in drafts.items():
        await page.evaluate(f"location.hash = '#{conversation}'")
        await expect(box).to_have_value(draft)


@pytest.mark.exhaustive
async def test_shortcuts_leave_the_characters_of_a_mac_alone(
    page: Page, demo_server: Served
) -> None:
    """There, Option types: "@" is Option+L on a German keyboard. Control+Option is the shortcut."""
    await page.add_init_script(
        "Object.defineProperty(navigator, 'platform', { value: 'MacIntel' })"
    )
    await open_page(page, demo_server.base_url)
    press = """([key, code, ctrlKey]) => {
      const event = { key, code, ctrlKey, altKey: true, bubbles: true, cancelable: true };
      return document.activeElement.dispatchEvent(new KeyboardEvent("keydown", event));
    }"""
    for key, code in (("@", "KeyL"), ("Dead", "KeyN"), ("®", "KeyR"), ("ç", "KeyC"), ("ß", "KeyS")):
        assert await page.evaluate(press, [key, code, False])  # typed as on any other page
    await expect(page.locator("#sidebar")).to_be_visible()
    await expect(page.locator("#settings-dialog")).to_be_hidden()
    assert not await page.evaluate(press, ["l", "KeyL", True])
    await expect(page.locator("#sidebar")).to_be_hidden()
    await page.get_by_role("button", name="Settings").click()
    await expect(page.locator(".keys")).to_contain_text("Control+Option+N")
    await expect(page.get_by_title("Settings (Control+Option+S)")).to_be_attached()


@pytest.mark.exhaustive
async def test_two_tabs_on_one_conversation(
    new_page: NewPage, demo_server: Served, api: httpx.AsyncClient
) -> None:
    def note(payload: str | bytes) -> None:
        if "conversation_locked" in str(payload):
            is_refused.set()

    is_refused = asyncio.Event()
    first, second = await new_page(), await new_page()
    first.on("websocket", lambda socket: socket.on("framereceived", note))
    await open_page(first, demo_server.base_url, temperature=0)
    await ask(first, "My name is Ada.")
    await open_page(second, first.url, temperature=0)
    await expect(second.locator(".bubble")).to_have_text("My name is Ada.")
    story = await say(first, STORY)
    other = second.locator(".turn").nth(1)
    await growing(other)  # it comes in both
    assert await finished(other) == await finished(story)
    assert "Ada" in await ask(second, "What is my name?")
    await expect(first.locator(".turn")).to_have_count(3)
    await finished(first.locator(".turn").nth(2))

    # Somebody of whom no tab is told: the message comes back to who wrote it.
    known = (await api.get(f"conversations/{conversation_of(first)}/tree?items=true")).json()

    async def tell_nothing_new(route: Route) -> None:
        if is_refused.is_set():
            await route.continue_()
        else:
            await route.fulfill(json=known)

    await first.route("**/tree*", tell_nothing_new)  # it may still be looking after its last turn
    body: dict[str, Any] = {"model": "demo", "input": STORY, "conversation": conversation_of(first)}
    body |= {"ignore_eos": True, "max_output_tokens": ENDLESS, "background": True}
    running = (await api.post("responses", json=body)).raise_for_status().json()["id"]
    await first.get_by_role("textbox", name="Your message").fill("And I?")
    await first.keyboard.press("Enter")
    await asyncio.wait_for(is_refused.wait(), 120)
    await expect(first.get_by_role("textbox", name="Your message")).to_have_value("And I?")
    await expect(first.locator(".turn")).to_have_count(4)
    (await api.post(f"responses/{running}/cancel")).raise_for_status()
    await finished(first.locator(".turn").nth(3))
    await expect(first.locator(".bubble").last).to_have_text(STORY)


async def test_what_the_server_refuses(page: Page, demo_server: Served) -> None:
    is_refusing = True

    async def meddle(route: WebSocketRoute) -> None:
        server = route.connect_to_server()

        def pass_on(message: Any) -> None:
            nonlocal is_refusing
            if is_refusing and '"response.create"' in message:
                is_refusing = False
                lane = re.search(r'"stream_id":"[\w-]+"', message)
                assert lane is not None
                error = '{"message":"Too full. <b>Come back</b>.","code":"server_overloaded"}'
                route.send(f'{{"type":"error","status":503,{lane.group()},"error":{error}}}')
            else:
                server.send(message)

        route.on_message(pass_on)

    await page.route_web_socket(re.compile("/v1/responses"), meddle)
    await open_page(page, demo_server.base_url)
    await say(page, "My name is Ada.")
    await expect(page.locator(".note.is-error")).to_contain_text("<b>Come back</b>")
    await page.get_by_role("button", name="Try again").click()
    await expect(page.locator(".is-error")).to_have_count(0)
    assert "Ada" in await finished(page.locator(".turn"))

    await say(page, "much " * (NUM_CONTEXT_TOKENS + 1))
    note = page.locator(".is-error")
    await expect(note).to_contain_text("This message is too long")
    await expect(note.get_by_role("button")).to_have_text(["Edit message"])
    await page.get_by_role("button", name="New chat").click()
    await page.goto(f"{demo_server.base_url}/#conv_none")
    await expect(page.locator("#announcer")).to_contain_text("not on the server any more")
    assert await ask(page, "Hello!")
