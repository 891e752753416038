"""GBNF becomes Lark that matches the same, and texts are quoted for its lexer."""

from __future__ import annotations

import pytest

from penstock.engine.errors import InvalidRequestError
from penstock.engine.request import StructuredOutputs
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from penstock.engine.structured_outputs.forms import structured_outputs
from penstock.engine.structured_outputs.lark import as_lark
from penstock.engine.text import Tokenizer

from .conftest import check_texts

# From the documentation of vLLM, and of llama.cpp.
_SQL = """
    root ::= select_statement
    select_statement ::= "SELECT " column " from " table " where " condition
    column ::= "col_1 " | "col_2 "
    table ::= "table_1 " | "table_2 "
    condition ::= column "= " number
    number ::= "1 " | "2 "
"""
_JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
_ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
_JAPANESE = """root        ::= jp-char+ ([ \\t\\n] jp-char+)*
jp-char     ::= hiragana | katakana
hiragana    ::= [ぁ-ゟ]
katakana    ::= [ァ-ヿ]"""
_LIST = 'root ::= item+\n\nitem ::= "- " [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ "\\n"'


@pytest.mark.parametrize(
    ("grammar", "matching", "others"),
    [
        (_SQL, ["SELECT col_1  from table_1  where col_2 = 1 "], ["SELECT x"]),
        (_JSON, ['{"a": [1, {"b": null}], "c":"x\\n\\u00e9"}', "{}"], ['{"a"}', "{", "[]"]),
        (_ARITHMETIC, ["a1+2=3\n", "(a +b)*3 =4\na= b\n"], ["=\n", "a=3"]),
        (_JAPANESE, ["ひカ ひ"], ["a", "ひ "]),
        (_LIST, ["- a\n- é b\n"], ["- a", "- \n"]),
        ('root ::= "a"* "ab" | "a" "bc" | x\n | "q"\nx ::= "ab" "d"', ["aab", "abc", "q"], ["aa"]),
        ('root ::= [a-z]* "end" s\ns ::= "(" s ")" | ""', ["end", "xend(())"], ["x", "end(("]),
        (r'root ::= "\u00e9\x7F\U0001F600" [^\]\-a^]', ["é\x7f\U0001f600b"], ["é\x7f\U0001f600-"]),
        ('root ::= "a"{2} "b"{1,} "c"{,2}.', ["aabx", "aabbcc\n"], ["abx", "aabcccx"]),
        ('Root-Of-it ::= root\nroot ::= unused-1? | root-Of-it "!"\nunused-1 ::= "u"\n'
         'root-Of-it ::= "r"', ["u", "", "r!"], ["r"]),
        ("start: A+\nA: /x::=/", ["x::=x::="], ["x"]),
    ],
)  # fmt: skip
def test_what_gbnf_matches(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    grammar: str,
    matching: list[str],
    others: list[str],
) -> None:
    made = structured_outputs(grammar=grammar)
    check_texts(compiler, tokenizer, made, matching=matching, others=others)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("root ::= a", "p: line 1: there is no rule 'a'; a grammar is in Lark ("),
        ('root ::= "x"\n"y" ::= ', "p: line 2: '::=' is not expected in GBNF; a grammar is in"),
        ('root ::= "a', "p: line 1: '\"a' is not expected in GBNF; a grammar"),
        ('rot ::= "a"', "p: there is no rule 'root'; a grammar"),
        ('"a" root ::= "b"', "p: line 1: expected a rule's name and '::=', not '\"a\"'"),
        ('root ::=\n("a"', "p: line 2: '(' has no ')'"),
        ("root ::= <think>", "p: line 1: '<think>' is not expected in GBNF"),
        ("root ::= *", "p: line 1: '*' has nothing to repeat"),
        ('root ::= "\\q"', "p: line 1: '\\\\q' is no escape of GBNF"),
        ('root ::= "\\ud800"', "p: line 1: '\\\\ud800' is no character"),
        ("root ::= [z-a]", "p: line 1: [z-a] has a range that ends before it begins"),
        ("root ::= []", "p: line 1: [] is an empty class"),
        (f'root ::= {"(" * 70}"a"{")" * 70}', "p: line 1: it is nested more than 64 deep"),
        (f'root ::= "{"a" * 33_000}"', "p: it has more than 32,768 characters of GBNF"),
    ],
)
def test_what_is_wrong_with_gbnf(grammar: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        structured_outputs(grammar=grammar, param="p")
    assert str(refusal.value).startswith(message)
    assert "GBNF" in str(refusal.value) or "class" in message


@pytest.mark.parametrize(
    "rules",
    [
        [f"r{number} ::= r{number + 1}" for number in range(1200)],
        [f'r{number} ::= r{number + 1} " "*' for number in range(1200)],
        [f"r{number} ::= (r{number + 1} r{number + 1})*" for number in range(1200)],
    ],
)
def test_many_rules(rules: list[str]) -> None:
    for root in ("root ::= r0", "root ::= r0 root?"):
        made = as_lark("\n".join([root, *rules, 'r1200 ::= " "']))
        assert len(made) < 150_000


def test_what_is_neither(compiler: GrammarCompiler) -> None:
    made = structured_outputs(grammar='root = "a"')
    assert made is not None
    with pytest.raises(InvalidRequestError, match=r"a grammar is in Lark \(.* or in GBNF"):
        compiler.matcher(made)


def test_a_schema_at_fault_is_no_matter_of_syntax(compiler: GrammarCompiler) -> None:
    """Grammars of tool calls have such."""
    made = structured_outputs(grammar='start: "a" %json {"type": "object", "required": [1]}')
    assert made is not None
    with pytest.raises(InvalidRequestError) as refusal:
        compiler.matcher(made)
    assert "GBNF" not in str(refusal.value)


def test_lark_stays_as_it_is() -> None:
    for grammar in ("start: a\na: /::=/", "%llguidance {}\nstart: /::=/", "?start: /::=/"):
        assert as_lark(grammar) == grammar


def test_every_character_may_be_in_a_choice(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    codes = [*range(0x180), 0x2028, 0x2029, 0xD7FF, 0xE000, 0xFFFE, 0xFFFF, 0x1F600, 0x10FFFF]
    choice = [f"<{chr(code)}>" for code in codes]
    made = structured_outputs(choice=choice)
    assert made is not None
    for text in choice:
        matcher = compiler.matcher(made)
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert matcher.try_consume_tokens(token_ids) == len(token_ids), text
        assert matcher.is_accepting()
    with pytest.raises(InvalidRequestError, match="half of a surrogate pair"):
        structured_outputs(choice=["\ud83d"])


@pytest.mark.parametrize("token", ["<[4]>", "<[*]>", "<[^4]>", "<[4-9,12]>"])
def test_a_grammar_names_no_tokens(token: str) -> None:
    with pytest.raises(InvalidRequestError, match="names tokens, which is not supported"):
        structured_outputs(grammar=f'start: "a" {token}')


def test_what_looks_like_a_token_in_a_text_is_a_text() -> None:
    for grammar in ('start: "<[4]>"', "start: /<[4]>/", 'start: "a" // <[4]>'):
        assert structured_outputs(grammar=grammar) == StructuredOutputs("lark", grammar)
