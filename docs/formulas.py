"""Formulas of pages and docstrings, which are plain Unicode in their sources, as MathML in the site.

An indented block with characters beyond ASCII is a formula; code has fences, and commands are ASCII. Within text, a
letter with a script is one: x_i, e^{−t}. Browsers lay MathML out by themselves, so that nothing is fetched or computed
when a page is read.
"""

import html
import re
import unicodedata
from typing import Any

_BLOCK = re.compile(r'<div class="language-output highlight"><pre>(.*?)</pre></div>', re.DOTALL)
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ᵀ'", "0123456789−T′", strict=True))
_ACCENTS = "\u0302\u0303\u0304\u0307"  # hat, tilde, bar, dot
_OPENING, _CLOSING, _BARS = "([{", ")]}", "‖|"
_LARGE = {"Σ": "∑", "Π": "∏"}
_FRACTIONS = {"½": ("1", "2"), "⅓": ("1", "3")}
_LETTER = f"[^\\W\\d_{''.join(_RAISED)}][{_ACCENTS}]?"
_SCRIPT = rf"\{{[^}}]*\}}|(?:{_LETTER}|\d)"
_TOKEN = re.compile(
    r"(?P<text>[a-z]{2,}(?: [a-z]{2,})+)|(?P<word>[a-z]{3,})|(?P<number>\d+)"
    r"|(?P<covariance>Σ(?=_\w+(?: \+|[,.]|$)))"  # and no sum, because nothing follows that could be summed
    rf"|(?P<letter>{_LETTER})|(?P<sub>_(?:(?:{_SCRIPT})+'?))|(?P<sup>\^(?:{_SCRIPT}))"
    rf"|(?P<raised>[{''.join(_RAISED)}]+)|(?P<space> +)|(?P<other>.)"
)
_SUB = r"_(?:\{[^}]*\}|[^\W_]{1,2}(?!\w)|[^\W_](?=\^))"
_SUP = r"\^(?:\{[^}]*\}|[^\W_](?![\w.]))"
_INLINE = re.compile(rf"(?<![\w/.^])(?:out|lse|{_LETTER})(?:{_SUB}(?:{_SUP})?|{_SUP})|(?:[)‖]|\d+){_SUP}")
_TEXT = re.compile(
    r"(<(?:pre|code|math|script|style|svg)\b.*?</(?:pre|code|math|script|style|svg)>|<[^>]*>)", re.DOTALL
)
Atom = tuple[str, str]  # kind and MathML


def on_page_content(content: str, **_: Any) -> str:
    """Replace the formulas of a page."""

    def block(match: re.Match[str]) -> str:
        text = html.unescape(re.sub("<[^>]*>", "", match[1]))
        if text.isascii():
            return match[0]
        lines = ["".join(map(formula, re.split(" {3,}", line.strip()))) for line in text.strip("\n").splitlines()]
        return "".join(f'<div class="formula">{line}</div>' for line in lines)

    parts = _TEXT.split(_BLOCK.sub(block, content))  # text, tag, text, …
    parts[::2] = [_INLINE.sub(lambda match: f"<math>{row(match[0])}</math>", text) for text in parts[::2]]
    return "".join(parts)


def formula(text: str) -> str:
    """Convert a formula in Unicode to MathML."""
    return f'<math display="block">{row(text)}</math>'


def row(text: str) -> str:
    """Convert a part of a formula to one element."""
    atoms: list[Atom] = []
    text, place = unicodedata.normalize("NFD", text), 0  # letters and accents apart
    while match := _TOKEN.match(text, place):
        kind, token, place = str(match.lastgroup), match[0], match.end()
        if kind in ("sub", "sup", "raised"):
            atoms.append(_scripted(atoms.pop(), kind, token))
        elif token == "√":
            inside, place = _argument(text, place)
            atoms.append(("letter", f"<msqrt>{row(inside)}</msqrt>"))
        elif kind != "space":
            atoms.append(_atom(kind, token, atoms))
        elif atoms[-1][0] == "word":
            atoms.append(("space", '<mspace width="0.2em"/>'))
    return f"<mrow>{''.join(element for _, element in atoms)}</mrow>"


def _atom(kind: str, token: str, before: list[Atom]) -> Atom:
    """Return the element of a token after others."""
    safe = html.escape(token)
    if kind == "text":
        return kind, f"<mtext>&nbsp;{safe}&nbsp;</mtext>"
    if kind == "number":
        return kind, f"<mn>{safe}</mn>"
    if token in _FRACTIONS:
        top, bottom = _FRACTIONS[token]
        return "number", f'<mstyle displaystyle="false"><mfrac><mn>{top}</mn><mn>{bottom}</mn></mfrac></mstyle>'
    if token in _LARGE and kind != "covariance":
        return "large", f"<mo>{_LARGE[token]}</mo>"
    if token[-1] in _ACCENTS:  # which two characters would else make upright
        return kind, f'<mi style="font-style: italic">{unicodedata.normalize("NFC", token)}</mi>'
    if kind in ("letter", "word", "covariance"):
        return kind, f"<mi>{safe}</mi>"
    if token in _OPENING + _CLOSING + _BARS:
        num_bars = sum(name in (f"open {token}", f"close {token}") for name, _ in before)
        is_open = token in _OPENING or (token in _BARS and num_bars % 2 == 0)
        form = "prefix" if is_open else "postfix"
        fence = f'<mo form="{form}" fence="true" stretchy="false" lspace="0" rspace="0">{safe}</mo>'
        return f"{'open' if is_open else 'close'} {token}", fence
    is_first = not before or before[-1][0].startswith(("operator", "open", "large"))
    return "operator", f'<mo form="prefix">{safe}</mo>' if token == "−" and is_first else f"<mo>{safe}</mo>"


def _scripted(base: Atom, kind: str, token: str) -> Atom:
    """Put a script to the right of an atom, or below a large operator."""
    name, element = base
    if token == "'":  # which stands high by itself
        return name, f'<mrow>{element}<mo lspace="0" rspace="0">′</mo></mrow>'
    if kind == "raised":
        raised = "".join(_RAISED[character] for character in token)
        script = row(raised).replace("<mi>T", '<mi mathvariant="normal">T')
    else:
        script = row(token[1:].strip("{}"))
    if name == "large" and kind == "sub":
        return "large", f"<munder>{element}{script}</munder>"
    if kind == "sub":
        return name, f"<msub>{element}{script}</msub>"
    if element.startswith("<msub>"):
        return name, f"<msubsup>{element.removeprefix('<msub>').removesuffix('</msub>')}{script}</msubsup>"
    return name, f"<msup>{element}{script}</msup>"


def _argument(text: str, place: int) -> tuple[str, int]:
    """Return what stands under a root, and the place after it: brackets, or all up to a bracket or a space."""
    if text[place] != "(":
        end = place + len(str(re.match(r"[^\s()]*", text[place:])[0]))  # type: ignore[index]
        return text[place:end], end
    depth, end = 1, place + 1
    while depth:
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    return text[place + 1 : end - 1], end
