"""How answers look that are written in Markdown."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from playwright.async_api import Page, expect

from ..processes import Served
from .conftest import MARKDOWN_TREES, make_conversation
from .page_flow import ask, open_page

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]


async def test_markdown_and_copying(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    code = "print('<b>')\n\nx = 1"
    text = (
        "Some **bold**, *italic* and `code`.\n\n1. one\n2. two\n   - nested\n\n"
        f"```python\n{code}\n```\n\n| a | b |\n|---|--:|\n| <b> | 2 |\n\n> שלום\n\n"
        "[y](https://example.org/y) [x](javascript:alert(1))"
    )
    conversation = await make_conversation(api, [("user", "markdown"), ("assistant", text)])
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await open_page(page, f"{demo_server.base_url}/#{conversation}")
    prose = page.locator(".prose")
    assert await prose.locator("> p > strong").inner_text() == "bold"
    assert await prose.locator("> p > em").inner_text() == "italic"
    assert await prose.locator("> p > code").inner_text() == "code"
    assert await prose.locator("> ol > li").count() == 2
    assert await prose.locator("> ol > li > ul > li").inner_text() == "nested"
    assert await prose.locator(".code-head span").inner_text() == "python"
    assert await prose.locator("> .table td").all_inner_texts() == ["<b>", "2"]
    quoted = prose.locator("> blockquote > p")
    assert await quoted.evaluate("node => getComputedStyle(node).direction") == "rtl"
    last = "y (example.org) [x](javascript:alert(1))"
    assert await prose.locator("> p").last.inner_text() == last
    assert await prose.locator("a").all_inner_texts() == ["y (example.org)"]
    assert await prose.locator("a").get_attribute("rel") == "noopener noreferrer"
    await prose.get_by_role("button", name="Copy code").click()
    assert await page.evaluate("navigator.clipboard.readText()") == code
    answer = await ask(page, "What is penstock?")
    await page.keyboard.press("Alt+c")
    await page.wait_for_function(
        "async (text) => (await navigator.clipboard.readText()) === text", arg=answer
    )


async def test_what_answers_are_written_with(page: Page, demo_server: Served) -> None:
    link, head = ["a", "a (b.example)"], ["thead", ["tr", ["th", "x"], ["th", "y"]]]
    cases: dict[str, Any] = {
        # Code in lists, however far its fences are to the right.
        "- Step:\n    ```js\n    let x;\n      y();\n    ```\n- b": [
            ["ul", ["li", "Step:", ["pre", "let x;\n  y();"]], ["li", "b"]]
        ],
        "- Step:\n   ```js\n   let x;\n\n     y();\n   ```\n- b": [
            ["ul", ["li", "Step:", ["pre", "let x;\n\n  y();"]], ["li", "b"]]
        ],
        "2. Step:\n\n   ```\n   let x;\n   ```\n\n3. b": [
            ["ol2", ["li", ["p", "Step:"], ["pre", "let x;"]], ["li", ["p", "b"]]]
        ],
        "1. a\n   - b\n\n         let x;\n": [
            ["ol", ["li", "a", ["ul", ["li", ["p", "b"], ["pre", "let x;"]]]]]
        ],
        "- a\n\n  | x | y |\n  |---|--:|\n  | 1<br>2 | **3** |\n- b": [
            [
                "ul",
                [
                    "li",
                    ["p", "a"],
                    [
                        "div",
                        ["table", head, ["tr", ["td", "1", ["br"], "2"], ["td", ["strong", "3"]]]],
                    ],
                ],
                ["li", ["p", "b"]],
            ]
        ],
        "- [ ] a\n- [x] **b**\n": [
            ["ul", ["li", ["input"], "a"], ["li", ["input"], ["strong", "b"]]]
        ],
        "- [x] a\n\n- [ ] b\n": [
            ["ul", ["li", ["p", ["input"], "a"]], ["li", ["p", ["input"], "b"]]]
        ],
        "- a\n  - b\n    1. c\n\n  d\n- e": [
            [
                "ul",
                ["li", ["p", "a"], ["ul", ["li", "b", ["ol", ["li", "c"]]]], ["p", "d"]],
                ["li", ["p", "e"]],
            ]
        ],
        "__bold__ ~~struck~~ snake_case_name": [
            ["p", ["strong", "bold"], " ", ["s", "struck"], " snake_case_name"]
        ],
        '[a](https://b.example "title")': [["p", link]],
        "[a][1] [A] [b]\n\n[1]: https://b.example\n[a]: https://b.example 'title'": [
            ["p", link, " ", ["a", "A (b.example)"], " [b]"]
        ],
        "<https://b.example> www.b.example a@b.example": [
            [
                "p",
                ["a", "https://b.example"],
                " ",
                ["a", "www.b.example"],
                " ",
                ["a", "a@b.example"],
            ]
        ],
        "![a](https://b.example) ![a](b.png)": [["p", link, " ![a](b.png)"]],
        "Title\n=====\n\nSmaller\n---\n": [["h4", "Title"], ["h5", "Smaller"]],
        "a &lt;b&gt; &amp;amp; &copy; &#8212; &rarr; &nothing; `&lt;`": [
            ["p", "a <b> &amp; © — → &nothing; ", ["code", "&lt;"]]
        ],
        "a<br>b<br/>\nc <b>d</b>": [["p", "a", ["br"], "b", ["br"], "c <b>d</b>"]],
        "a  \nb\\\nc": [["p", "a", ["br"], "b", ["br"], "c"]],
        "> a\nb\n> - c\n\nd": [["blockquote", ["p", "a b"], ["ul", ["li", "c"]]], ["p", "d"]],
        # Formulas, as they are written.
        r"$a_1 * b_2 * c$ and $x^{*}$, *b*": [["p", "$a_1 * b_2 * c$ and $x^{*}$, ", ["em", "b"]]],
        r"**so \(a_{1}\) is** \[ x\,*y* \]": [
            ["p", ["strong", r"so \(a_{1}\) is"], r" \[ x\,*y* \]"]
        ],
        "Then\n$$\na = b \\\\\n- c_1 * d_2 * e\n= f\n$$\n**so**": [
            ["p", "Then"],
            ["p", "$$ a = b \\\\ - c_1 * d_2 * e = f $$"],
            ["p", ["strong", "so"]],
        ],
        "1. \\[\n   a\n   + b\n   \\]\n": [["ol", ["li", ["p", "\\[ a + b \\]"]]]],
        r"$5 and *$6*, `$a` \* $b_c": [
            ["p", "$5 and ", ["em", "$6"], ", ", ["code", "$a"], " * $b_c"]
        ],
    }
    await open_page(page, demo_server.base_url)
    await page.evaluate(MARKDOWN_TREES)
    for size in (10_000, 1):
        drawn = await page.evaluate("([texts, size]) => drawnOf(texts, size)", [list(cases), size])
        assert dict(zip(cases, drawn, strict=True)) == cases
    boxes = """async (text) => {
      const { MarkdownStream } = await import("./markdown.js");
      const root = document.createElement("div");
      new MarkdownStream(root).append(text);
      return [...root.querySelectorAll("input")].map((box) => [box.checked, box.disabled]);
    }"""
    assert await page.evaluate(boxes, "- [ ] a\n- [x] b") == [[False, True], [True, True]]


async def test_code_in_lists_is_copied_as_it_is(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    code = "def f():\n    return [\n\t1,\n\n    ]"
    texts = [
        "- Step:\n" + "\n".join(indent + line for line in ["```python", *code.split("\n"), "```"])
        for indent in ("    ", "   ", "  ")
    ]
    texts.append("- ```\n  " + code.replace("\n", "\n  ") + "\n  ```\n\t- tabs\n\t\tare spaces\n")
    conversation = await make_conversation(api, [("assistant", text) for text in texts])
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await open_page(page, f"{demo_server.base_url}/#{conversation}")
    buttons = page.locator(".prose li .code").get_by_role("button", name="Copy code")
    await expect(buttons).to_have_count(len(texts))
    for button in await buttons.all():
        await page.evaluate("navigator.clipboard.writeText('')")
        await button.click()
        assert await page.evaluate("navigator.clipboard.readText()") == code


@pytest.mark.exhaustive
async def test_what_is_drawn_stays_while_more_comes(page: Page, demo_server: Served) -> None:
    """Nodes are the same ones to the end, and so a selection is."""
    text = (
        "# Title\n\nSome **bold** words\nand `code` [a](https://b.example) here.\n\n"
        "- one *a*\n- two\n  - nested **b**\n    ```js\n    let x;\n\n    let y;\n    ```\n"
        "- three\n\n"
        "```py\na = 1\n\nb = 2\n```\n\n| a | b |\n|---|---|\n| *1* | 2 |\n| 3 | 4 |\n\n"
        "> quoted **c**\n>\n> more\n\nThe end.\n"
    )
    await open_page(page, demo_server.base_url)
    lost = await page.evaluate(
        """async (text) => {
          const { MarkdownStream } = await import("./markdown.js");
          const root = document.querySelector("#transcript");
          const stream = new MarkdownStream(root);
          const isHead = (line) => line === "| a | b |";
          const seen = new Set();
          const lines = text.split("\\n");
          lines.forEach((line, index) => {
            for (const character of line) stream.append(character);
            if (index < lines.length - 1) stream.append("\\n");
            if (index === 2) getSelection().selectAllChildren(root.querySelector("strong"));
            if (isHead(line)) return; // a paragraph, until the next line makes it names of columns
            const walker = document.createTreeWalker(root);
            while (walker.nextNode()) seen.add(walker.currentNode);
          });
          const lost = [...seen].filter((node) => !root.contains(node));
          return [...lost.map((node) => node.outerHTML ?? node.data), String(getSelection())];
        }""",
        text,
    )
    assert lost == ["bold"]


async def test_a_reference_becomes_a_link_once_it_is_defined(
    page: Page, demo_server: Served
) -> None:
    await open_page(page, demo_server.base_url)
    shown = await page.evaluate(
        """async () => {
          const { MarkdownStream } = await import("./markdown.js");
          const root = document.createElement("div");
          const stream = new MarkdownStream(root);
          const pieces = ["See [a] and [b].\\n\\n- [a]\\n\\nSo.\\n\\n", "[a]: https://c",
            ".example", "\\n\\n[a]: https://other.example\\n"];
          return pieces.map((piece) => {
            stream.append(piece);
            return [...root.querySelectorAll("a")].map((link) => link.href);
          });
        }"""
    )
    final = ["https://c.example/"] * 2
    assert shown == [[], ["https://c/"] * 2, final, final]


@pytest.mark.exhaustive
async def test_tables_read_from_the_right_where_their_letters_do(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    texts = (
        "| 1 שם ארוך מאוד | another long name |\n|---|---|\n| abc | ג |",
        "| 1 a | another long name |\n|---|---|\n| 1 | ד |",
    )
    conversation = await make_conversation(api, [("assistant", text) for text in texts])
    await open_page(page, f"{demo_server.base_url}/#{conversation}")
    hebrew, english = page.locator("table").first, page.locator("table").last
    await expect(page.locator("td")).to_have_count(4)  # nothing below waits for them
    lefts = "nodes => nodes.map(node => node.getBoundingClientRect().left)"
    for table, is_reversed in ((hebrew, True), (english, False)):
        for row in await table.locator("tr").all():
            found = await row.locator("th, td").evaluate_all(lefts)
            assert found == sorted(found, reverse=is_reversed)
    # Within a cell, its own letters decide on which side the text stands.
    gaps = """nodes => nodes.map(node => {
      const range = document.createRange();
      range.selectNodeContents(node);
      const [text, cell] = [range.getBoundingClientRect(), node.getBoundingClientRect()];
      return text.left - cell.left < cell.right - text.right ? "left" : "right";
    })"""
    assert await hebrew.locator("td").evaluate_all(gaps) == ["left", "right"]
    assert await english.locator("td").evaluate_all(gaps) == ["left", "right"]


@pytest.mark.exhaustive
async def test_markdown_piece_by_piece_equals_markdown_at_once(
    page: Page, demo_server: Served
) -> None:
    await open_page(page, demo_server.base_url)
    different = await page.evaluate(
        r"""async () => {
      const { MarkdownStream } = await import("./markdown.js");
      const texts = [
        "a **b *c* d** `e`\n\n\n# head\ntext\n- x\n  - y\n    z\n- w\n\n3. q\n4. r\n\nend",
        "```js\nlet a;\n\n- no list\n```\nafter\n~~~\nopen\n\n# no head", "****",
        "1. a\n\n2. b\n\n\n", "- a\n\n2", "* star *\n*a*b*c* _d_ e_f_g __ `` ` ``` x",
        "text\n| a | b |\n|:-|-:|\n| 1 \\| 2 | **x** |\n\n---\n***\n> q\n> > r\n> - s\n\nend",
        "a\n---x\n| a |\n|-|x\n|-|\n\\*no\\* ~~s~~ ***b*** [l](https://a.b/c_d) https://e.f/g).",
        "\n\n<i>&amp;</i>\n\n- \n- b\n", "Zoë 👋🏽 *日本*\n",
        "> a\n> | a | b |\n> |---|---|\n> | 1 |\n> c\n", "x | y\n-|-\n1 | 2\nz\n",
        "# C#\n# \n#\n### t ##\n", "```\na\n``\n```` x\n````\nb", "a\r\nb\r\n\r\n# c\rd",
        "- a\n- \u05e9\n\n`a`b`c` **\u05e9** [https://a.b](https://c.d)",
      ];
      const atoms = [
        "*", "**", "***", "_", "`", "``", "```", "~~", "[", "]", "(", ")", "](", "|", "---", "\\",
        "[a](https://b.c/d)", "https://x.y/z", "h", "http", ".", " ", "\n", "\n\n", "\n- ",
        "\n  - ", "\n1. ", "\n> ", "\n> > ", "\n# ", "#", "| a | b |", "\n|---|--:|\n", "a", "bc ",
        "\u05e9", "\u{1f44b}\u{1f3fd}", "\u202e", "\u0915\u094d\u200d", "\0", "\r\n", "\n```js\n",
        "x".repeat(450), "y".repeat(1100), " ".repeat(2100),
      ];
      let seed = 1;
      const random = (below) => {
        seed = (seed * 1103515245 + 12345) % 2147483648;
        return (seed >> 8) % below;
      };
      for (let count = 0; count < 600; count += 1) {
        const usable = count % 3 ? atoms.length - 3 : atoms.length;
        texts.push(Array.from({ length: 1 + random(24) }, () => atoms[random(usable)]).join(""));
      }
      const render = (pieces) => {
        const root = document.createElement("div");
        const stream = new MarkdownStream(root);
        pieces.forEach((piece) => stream.append(piece));
        stream.flush();
        return root.innerHTML;
      };
      return texts.flatMap((text) => (text.length < 300 ? [1, 2, 3, 7] : [7, 97]).map((size) => {
        const pieces = text.match(new RegExp(`[^]{1,${size}}`, "g"));
        const [whole, split] = [render([text]), render(pieces)];
        return whole === split ? null : [size, text, whole, split];
      })).filter(Boolean);
        }"""
    )
    assert different == []


@pytest.mark.exhaustive
async def test_markdown_costs_as_much_as_it_is_long(page: Page, demo_server: Served) -> None:
    """Four times the text, whole or in pieces, takes about four times the work: characters that
    patterns look at, and changes of the page. (Six: the first 4,096 characters of a paragraph may
    cost less than the others; sixteen would be quadratic.)"""
    await open_page(page, demo_server.base_url)
    wrong = await page.evaluate(
        r"""async () => {
      const { MarkdownStream } = await import("./markdown.js");
      const repeated = (start, unit) => (n) => start + unit.repeat(n / unit.length);
      const texts = {
        "a heading of #": repeated("# ", "#"), "#": repeated("", "#"), "# #": repeated("# ", "# "),
        columns: (n) => `${"|a".repeat(n / 4)}|\n${"|-".repeat(n / 4)}|\n`,
        rows: repeated("|a|b|\n|-|-|\n", "| 1 | **x** |\n"),
        "short rows": repeated(`${"|a".repeat(90)}|\n${"|-".repeat(90)}|\n`, "|\n"),
        "a long row": repeated("|a|b|\n|-|-|\n|", "x *y "),
        "deep quotes": repeated("", ">"), quotes: repeated("", "> > > a\n"),
        "deep lists": (n) => [...Array(Math.ceil(Math.sqrt(n))).keys()]
          .map((depth) => `${" ".repeat(2 * depth)}- a\n`).join(""),
        items: repeated("", "- a *b*\n"), "huge numbers": repeated("", "999999999. a\n"),
        digits: repeated("", "9"), "*": repeated("", "*"), "*a": repeated("", "*a "),
        "**a": repeated("", "**a "), "**a lines": repeated("", "**a\n"), "_a": repeated("", "_a "),
        "~~a": repeated("", "~~a "), "`": repeated("", "`"), "`a``b": repeated("", "`a``b```c "),
        "[": repeated("", "["), "[ lines": repeated("", "[\n"), "[a](": repeated("", "[a]("),
        "[a]": repeated("", "[a]"), "a long URL": repeated("https://", "a."),
        URLs: repeated("", "https://a.b "), references: repeated("", "[a]: https://a.b\n"),
        entities: repeated("", "&amp;"), comments: repeated("", "<!-- "), NUL: repeated("", "\0"),
        prose: repeated("", "Some **bold** words and a [link](https://a.b/c). "),
        CR: repeated("", "\r"), CRLF: repeated("", "a\r\n"),
        "open code": repeated("```\n", "a = 1;\n"),
        "a line of code": repeated("```\n", "a = 1; "), "a fence's name": repeated("```", "a"),
        hidden: repeated("```\n", "\u202e"), rules: repeated("", "- "), dashes: repeated("", "-"),
        spaces: (n) => `${" ".repeat(n)}a`,
        "blank lines": repeated("", "\n"), "\\": repeated("", "\\"),
      };
      let work = 0;
      const exec = RegExp.prototype.exec;
      RegExp.prototype.exec = function (text) {
        const from = this.global || this.sticky ? this.lastIndex : 0;
        const found = exec.call(this, text);
        const isBound = this.sticky || (this.source.startsWith("^") && !this.multiline);
        const end = found ? found.index + found[0].length : isBound ? from : text.length;
        work += 1 + end - from;
        return found;
      };
      const counted = [
        [Element.prototype, ["append", "remove"]],
        [CharacterData.prototype, ["appendData", "deleteData", "remove"]],
      ];
      for (const [prototype, names] of counted) {
        for (const name of names) {
          const original = prototype[name];
          prototype[name] = function (...given) { work += 1; return original.apply(this, given); };
        }
      }
      const measure = (text, size) => {
        const root = document.createElement("div");
        const stream = new MarkdownStream(root);
        work = 0;
        for (let at = 0; at < text.length; at += size) stream.append(text.slice(at, at + size));
        stream.flush();
        return [work, root.getElementsByTagName("*").length];
      };
      return Object.entries(texts).flatMap(([name, make]) => [1e9, 16].map((size) => {
        const [[few, some], [many, elements]] = [6_000, 24_000].map((n) => measure(make(n), size));
        const isLinear = many < 6 * few && elements < Math.max(6 * some, 24_000);
        return isLinear ? null : [name, size, few, many, elements];
      })).filter(Boolean);
        }"""
    )
    assert wrong == []


@pytest.mark.exhaustive
async def test_a_link_says_where_it_leads(page: Page, demo_server: Served) -> None:
    cases = {
        "[a](https://evil.example/x)": "a (evil.example)",
        "[bank.example](https://evil.example)": "bank.example (evil.example)",
        "[https://bank.example](https://evil.example)": "https://bank.example (evil.example)",
        "[evil.example/a](https://evil.example/a)": "evil.example/a",
        "[evil.example.org](https://evil.example)": "evil.example.org (evil.example)",
        "https://evil.example/x": "https://evil.example/x",
        "https://bank.example@evil.example/": "https://bank.example@evil.example/ (evil.example)",
        "https://b\u0430nk.example/": "https://b\u0430nk.example/ (xn--bnk-6cd.example)",
        "[a](http://evil.example:8080/)": "a (evil.example:8080)",
        "[write](mailto:a@evil.example)": "write (a@evil.example)",
        "[a@evil.example](mailto:a@evil.example)": "a@evil.example",
        "[bank\u202e](https://evil.example)": "bank<U+202E> (evil.example)",
        "[ban\u200bk](https://evil.example)": "ban<U+200B>k (evil.example)",
        "[**a** `b\u2066`](https://evil.example)": "a b<U+2066> (evil.example)",
        "[x](javascript:alert(1))": None,
        "[x](data:text/html,a)": None,
        "[x](https://[)": None,
        "[x](ftp://evil.example)": None,
    }
    await open_page(page, demo_server.base_url)
    drawn = await page.evaluate(
        """async (texts) => {
          const { MarkdownStream } = await import("./markdown.js");
          return texts.map((text) => {
            const root = document.createElement("div");
            new MarkdownStream(root).append(text);
            const links = root.querySelectorAll("a");
            if (links.length === 0) return null;
            for (const node of root.querySelectorAll(".hidden-character")) {
              node.textContent = `<${node.dataset.code}>`;
            }
            return [...links].map((link) => link.textContent).join(" | ");
          });
        }""",
        list(cases),
    )
    assert dict(zip(cases, drawn, strict=True)) == cases


@pytest.mark.exhaustive
async def test_hidden_characters_in_code_are_shown_and_copied(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    needed = "\u0645\u06cc\u200c\u062e \u0915\u094d\u200d\u0937 👨\u200d👩 ❤\ufe0f e\u0301"
    code = f"if a\u202e b\u200b: {needed}"
    text = f"`{code}`\n\n```\n{code}\n```\n"
    conversation = await make_conversation(api, [("user", "code"), ("assistant", text)])
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await open_page(page, f"{demo_server.base_url}/#{conversation}")
    for place in (page.locator(".prose p > code"), page.locator(".prose pre > code")):
        marks = place.locator(".hidden-character")
        await expect(marks).to_have_count(2)
        shown = "nodes => nodes.map(node => getComputedStyle(node, '::before').content)"
        assert await marks.evaluate_all(shown) == ['"U+202E"', '"U+200B"']
        assert await place.text_content() == code
    await page.get_by_role("button", name="Copy code").click()
    assert await page.evaluate("navigator.clipboard.readText()") == code
